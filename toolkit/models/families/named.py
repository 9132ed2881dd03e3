"""Named configurations: one line of a family's table each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from toolkit.models.config import ModelConfig

_SIZES = ("n_layer", "n_embd", "n_head", "n_query_groups", "intermediate_size")


def named(name: str, *sizes: int, **fields: Any) -> ModelConfig:
    """Return a configuration; ``sizes`` are n_layer, n_embd, n_head, n_query_groups and intermediate_size, in order."""
    values: dict[str, Any] = dict(zip(_SIZES, sizes, strict=False))
    return ModelConfig(name=name, **values, **fields)


def named_with(**fields: Any) -> Callable[..., ModelConfig]:
    """Return :func:`named` with these fields, which a call may override."""
    return partial(named, **fields)
