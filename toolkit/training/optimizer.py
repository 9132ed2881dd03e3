"""Construction of the optimizer and its parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit.checkpoints.weights import canonical_name
from toolkit.errors import UserError
from toolkit.models.lora import is_adapter
from toolkit.planning.combined import CombinedOptimizer
from toolkit.planning.optimizer import optimizer_class
from toolkit.training.bf16_optimizer import BF16Optimizer


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    no_decay: frozenset[str],
    combined: type[CombinedOptimizer] | None = None,
    in_blocks: Mapping[str, tuple[int, ...]] | None = None,
    *,
    split_qkv: bool = False,
    b_lr_ratio: float = 1.0,
) -> list[dict[str, Any]]:
    """Split the trainable parameters, sharded or not, into groups with and without weight decay.

    Args:
        combined: Each group is split into the parameters that its main optimizer takes, ``main`` true, and the rest.
        in_blocks: See :func:`~toolkit.planning.optimizer.block_params`.
        split_qkv: Give the main optimizer weights with stacked matrices in groups of the same ``rows``.
        b_lr_ratio: Learning rate of the adapters' B relative to the others, ``lr_ratio`` of its groups.
    """
    in_blocks = in_blocks or {}
    parts: dict[tuple[bool, bool, tuple[int, ...], float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = canonical_name(name)
            decays = name not in no_decay
            is_main = combined is not None and combined.is_main(parameter, name in in_blocks, decays)
            rows = in_blocks[name] if is_main and split_qkv else ()
            ratio = b_lr_ratio if is_adapter(name) and name.endswith(".B") else 1.0
            parts.setdefault((decays, is_main, rows, ratio), []).append(parameter)
    return [
        {"params": parts[key], "weight_decay": weight_decay if key[0] else 0.0}
        | ({} if combined is None else {"main": key[1]})
        | ({"rows": key[2]} if split_qkv else {})
        | ({"lr_ratio": key[3]} if b_lr_ratio != 1 else {})
        for key in sorted(parts, reverse=True)
    ]


def build_optimizer(
    model: nn.Module,
    options: dict[str, Any],
    learning_rate: float,
    precision: str,
    no_decay: frozenset[str],
    given_class: type[torch.optim.Optimizer] | None = None,
    in_blocks: Mapping[str, tuple[int, ...]] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer from :func:`resolve_optimizer`'s options, fused where class and device support it.

    It is not fused under 16-mixed: a fused optimizer unscales the gradients itself, after clipping. ``no_decay`` and
    ``in_blocks`` are the results of ``no_decay_params`` and ``block_params`` in :mod:`toolkit.planning.optimizer`.
    """
    given = dict(options)
    name, state_dtype = given.pop("name"), given.pop("state_dtype", "auto")
    cls: type = given_class or optimizer_class(name)  # its arguments are not those of the base class
    takes = inspect.signature(cls).parameters
    combined = cls if issubclass(cls, CombinedOptimizer) else None
    split_qkv, ratio = given.get("split_qkv", False), given.pop("loraplus_lr_ratio", 1.0)
    decay = given.pop("weight_decay", 0.0)
    groups = parameter_groups(model, decay, no_decay, combined, in_blocks, split_qkv=split_qkv, b_lr_ratio=ratio)
    if "weight_decay" not in takes and ratio == 1:
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    if "fused" in takes and precision != "16-mixed" and not {"fused", "foreach"} & given.keys():
        given["fused"] = all(p.device.type in ("cuda", "cpu", "mps") for p in model.parameters())
    try:
        optimizer = cls(groups, lr=learning_rate, **given)
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"--optimizer.name {cls.__name__}: {str(error).splitlines()[0]}") from error
    has_masters, has_bf16_moments = precision == "bf16-master", state_dtype == "bf16"
    if has_masters or has_bf16_moments:
        return BF16Optimizer(optimizer, has_masters=has_masters, has_bf16_moments=has_bf16_moments)
    return optimizer
