"""Check the versions of lightning-thunder and torch, and import thunder."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

from toolkit.errors import UserError

THUNDER = "0.2.6"
"""The only supported version, because the extension uses private APIs of Thunder."""
TORCH = ((2, 11), (2, 13))
"""Supported minor versions: from toolkit's minimum to the latest tested with this version of Thunder."""
_NAMED_TENSORS = ("align_as", "align_to", "has_names", "refine_names", "rename")
"""Methods of torch.Tensor that Thunder registers on import, and that torch 2.13 has removed."""


def require_versions(needed_by: str) -> None:
    """Check the installed versions, without importing the packages.

    Args:
        needed_by: The option or class that needs Thunder, for the message.

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
        raise UserError(
            f"{needed_by}: lightning-thunder {THUNDER} needs torch {supported}, found {version}; install one of them"
        )


@functools.cache
def load_thunder() -> ModuleType:
    """Import and return thunder.

    Raises:
        UserError: see :func:`require_versions`.
    """
    require_versions("thunder")
    with _placeholders(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as warnings about missing executors
        import thunder
    # torch 2.13 warns at each of Thunder's collectives
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    return thunder


@contextmanager
def _placeholders() -> Iterator[None]:
    """Context that adds the methods that torch has removed and Thunder registers."""
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

    method.__name__ = name  # Thunder looks it up by this name
    return method
