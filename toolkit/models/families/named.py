"""Named configurations: one line of a family's table each."""

from __future__ import annotations

from typing import Any

from toolkit.models.config import ModelConfig

_SIZES = ("n_layer", "n_embd", "n_head", "n_query_groups", "intermediate_size")


def named(name: str, *sizes: int, **fields: Any) -> ModelConfig:
    """Return a configuration.

    Args:
        name: Its name.
        *sizes: n_layer, n_embd, n_head, n_query_groups, intermediate_size; the last ones may be left out.
        **fields: All other fields that differ from their defaults.
    """
    return ModelConfig(name=name, **dict(zip(_SIZES, sizes, strict=False)), **fields)
