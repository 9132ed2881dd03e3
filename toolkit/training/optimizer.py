"""Construction of the optimizer and its parameter groups."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from toolkit.checkpoints.weights import canonical_name
from toolkit.errors import UserError
from toolkit.planning.optimizer import optimizer_class


def no_decay_params(model: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters without weight decay (N5): biases, norms and embeddings.

    Tied heads are embeddings; experts' biases are matrices. Call this before a strategy wraps the model, because shards
    are all one-dimensional.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}

    return frozenset(
        canonical_name(name)
        for name, p in model.named_parameters()
        if p.ndim < 2 or name.endswith(".bias") or id(p) in embeddings
    )


def parameter_groups(model: nn.Module, weight_decay: float, no_decay: frozenset[str]) -> list[dict[str, Any]]:
    """Split the trainable parameters, sharded or not, into groups with and without weight decay."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (undecayed if canonical_name(name) in no_decay else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module,
    options: dict[str, Any],
    learning_rate: float,
    precision: str,
    no_decay: frozenset[str],
    given_class: type[torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer from :func:`resolve_optimizer`'s options, fused where class and device support it.

    It is not fused under 16-mixed: a fused optimizer unscales the gradients itself, after clipping. ``no_decay`` is the
    result of :func:`no_decay_params`.

    Raises:
        UserError: the class rejects a value.
    """
    given = dict(options)
    name = given.pop("name")
    cls: type = given_class or optimizer_class(name)  # its arguments are not those of the base class
    takes = inspect.signature(cls).parameters
    groups = parameter_groups(model, given.pop("weight_decay", 0.0), no_decay)
    if "weight_decay" not in takes:
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    if "fused" in takes and precision != "16-mixed" and not {"fused", "foreach"} & given.keys():
        given["fused"] = all(p.device.type in ("cuda", "cpu", "mps") for p in model.parameters())
    try:
        return cls(groups, lr=learning_rate, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"--optimizer.name {cls.__name__}: {str(error).splitlines()[0]}") from error
