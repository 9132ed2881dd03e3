"""Helpers for tables of named configurations, one per line."""

from collections.abc import Callable
from functools import partial
from typing import Any

from toolkit.models.config import ModelConfig

_SIZES = ("n_layer", "n_embd", "n_head", "n_query_groups", "intermediate_size")


def named(name: str, *sizes: int, **fields: Any) -> ModelConfig:
    """Return a configuration. ``sizes`` are n_layer, n_embd, n_head, n_query_groups and intermediate_size."""
    values: dict[str, Any] = dict(zip(_SIZES, sizes, strict=False))
    return ModelConfig(name=name, **values, **fields)


def named_with(**fields: Any) -> Callable[..., ModelConfig]:
    """Return :func:`named` with default fields, which a call can override."""
    return partial(named, **fields)
