"""Build parameter groups: with or without weight decay (N5), and by main or other optimizer in a hybrid optimizer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.distributed.names import canonical_name
from toolkit.distributed.shards import shard_of
from toolkit.models.lora_config import is_adapter

if TYPE_CHECKING:
    from toolkit.optim.hybrid import HybridOptimizer

GROUP_KEY = "key"
"""What :func:`parameter_groups` splits by, in each group: weight decay, ``main``, ``rows`` and ``lr_ratio``."""


def no_decay_params(model: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters without weight decay (N5): biases, norms and embeddings.

    Tied heads count as embeddings. Stacked expert biases are matrices and are matched by name. Call this before a
    strategy wraps the model, because shards are one-dimensional.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}

    return frozenset(
        canonical_name(name)
        for name, p in model.named_parameters()
        if p.ndim < 2 or name.endswith(".bias") or id(p) in embeddings
    )


def block_params(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> dict[str, tuple[int, ...]]:
    """Return {canonical name: row counts of its stacked matrices} for the parameters inside blocks.

    Fused queries, keys and values have row counts; others have ``()``. Call this before a strategy wraps the model.
    """
    inside = {id(p) for m in model.modules() if isinstance(m, blocks) for p in m.parameters()}
    rows: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if (stacked := getattr(module, "stacked_rows", None)) is not None:  # attention
            layer, sizes = stacked
            rows[canonical_name(f"{name}.{layer}.weight")] = sizes
    names = [canonical_name(name) for name, p in model.named_parameters() if id(p) in inside]
    return {name: rows.get(name, ()) for name in names}


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    no_decay: frozenset[str],
    hybrid_class: "type[HybridOptimizer] | None" = None,
    in_blocks: Mapping[str, tuple[int, ...]] | None = None,
    *,
    split_qkv: bool = False,
    b_lr_ratio: float = 1.0,
) -> list[dict[str, Any]]:
    """Split the trainable parameters, sharded or not, into groups with and without weight decay.

    Args:
        hybrid_class: Hybrid optimizer; splits each group into its main optimizer's parameters (``main`` True) and the
            rest.
        in_blocks: See :func:`block_params`.
        split_qkv: Group the main optimizer's weights by the ``rows`` of their stacked matrices.
        b_lr_ratio: Learning rate of the adapters' B relative to other parameters; ``lr_ratio`` in the groups.
    """
    in_blocks = in_blocks or {}
    parts: dict[tuple[bool, bool, tuple[int, ...], float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = canonical_name(name)
            decays = name not in no_decay
            is_main = hybrid_class is not None and hybrid_class.is_main(parameter, name in in_blocks, decays)
            rows = in_blocks[name] if is_main and split_qkv else ()
            ratio = b_lr_ratio if is_adapter(name) and name.endswith(".B") else 1.0
            parts.setdefault((decays, is_main, rows, ratio), []).append(shard_of(parameter))
    return [
        {"params": parts[key], "weight_decay": weight_decay if key[0] else 0.0, GROUP_KEY: key}
        | ({} if hybrid_class is None else {"main": key[1]})
        | ({"rows": key[2]} if split_qkv else {})
        | ({"lr_ratio": key[3]} if b_lr_ratio != 1 else {})
        for key in sorted(parts, reverse=True)
    ]


def group_keys(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """Return a key per group, in descending order. The groups of pipeline stages correspond by key.

    If :func:`parameter_groups` did not make the groups, they correspond by position.
    """
    return [group.get(GROUP_KEY, (-i,)) for i, group in enumerate(optimizer.param_groups)]
