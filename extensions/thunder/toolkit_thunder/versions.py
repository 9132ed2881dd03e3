"""The versions of lightning-thunder and torch that work together, and how thunder is imported."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

from toolkit.errors import UserError

THUNDER = "0.2.6"
"""The extension uses parts of Thunder that are not public, so that another version may not work."""
TORCH = ((2, 10), (2, 13))
"""First and last minor version: toolkit's first, and the one that this version of Thunder was tried with."""
_NAMED_TENSORS = ("align_as", "align_to", "has_names", "refine_names", "rename")
"""Methods of torch.Tensor that torch 2.13 no longer has, and that Thunder registers when it is imported."""


def require_versions(needed_by: str) -> None:
    """Check the installed versions, without importing them.

    Args:
        needed_by: The option or class, for the message.

    Raises:
        UserError: lightning-thunder is not installed, or it or torch has another version.
    """
    try:
        installed = metadata.version("lightning-thunder")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != THUNDER:
        raise UserError(
            f"{needed_by}: needs lightning-thunder {THUNDER}, found {installed}; "
            f"run: pip install lightning-thunder=={THUNDER}"
        )
    version = metadata.version("torch")
    first, last = TORCH
    if not first <= tuple(int(part) for part in version.split(".")[:2]) <= last:
        supported = " to ".join(f"{major}.{minor}" for major, minor in TORCH)
        raise UserError(f"{needed_by}: lightning-thunder {THUNDER} needs torch {supported}, found {version}")


@functools.cache
def load_thunder() -> ModuleType:
    """Import thunder and return it.

    Raises:
        UserError: see :func:`require_versions`.
    """
    require_versions("thunder")
    with _placeholders(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as those about executors that are not installed
        import thunder
    # of torch 2.13, in each collective of Thunder
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    return thunder


@contextmanager
def _placeholders() -> Iterator[None]:
    """Add the methods that Thunder registers and torch has no more, and remove them again."""
    import torch

    added = [name for name in _NAMED_TENSORS if not hasattr(torch.Tensor, name)]
    for name in added:
        setattr(torch.Tensor, name, _placeholder(name))
    try:
        yield
    finally:
        for name in added:
            delattr(torch.Tensor, name)


def _placeholder(name: str) -> Any:
    def method(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"torch.Tensor.{name} is not in this version of torch")

    method.__name__ = name  # Thunder looks for it under this name
    return method
