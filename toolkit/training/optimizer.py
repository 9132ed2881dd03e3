"""Which parameters are updated, and how."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from toolkit.args import OptimizerArgs
from toolkit.errors import UserError, did_you_mean

NOT_HERE = {
    "Optimizer": "is the base class",
    "LBFGS": "evaluates the loss several times per step",
    "SparseAdam": "needs sparse gradients, and these are dense",
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Find a class of ``torch.optim`` by name, without regard to case.

    Raises:
        UserError: there is none, or it cannot be used in this loop.
    """
    known = {
        n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }  # fmt: skip
    match = next((n for n in known if n.lower() == name.lower()), None)
    if match is None:
        usable = sorted(known.keys() - NOT_HERE.keys())
        raise UserError(
            f"--optimizer.name {name}: not in torch.optim{did_you_mean(name, usable)} ({', '.join(usable)})"
        )
    if match in NOT_HERE:
        raise UserError(f"--optimizer.name {name}: {NOT_HERE[match]}; use AdamW, for example")
    return known[match]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trained parameters into those that decay and those that are spared (law N5).

    Matrices of linear layers decay; biases, norms (one dimension) and embeddings, tied heads among them, do not.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decay, spared = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (spared if parameter.ndim < 2 or id(parameter) in embeddings else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, args: OptimizerArgs, defaults: dict[str, Any], learning_rate: float
) -> torch.optim.Optimizer:
    """Build the optimizer, fused where the class and the device have that.

    ``defaults`` (weight_decay, betas) apply where the class takes them; what the user asked for must be taken.

    Raises:
        UserError: the class does not take an option, or refuses its value.
    """
    cls = optimizer_class(args.name)
    takes = inspect.signature(cls).parameters
    asked = {k: v for k in ("weight_decay", "betas", "eps") if (v := getattr(args, k)) is not None} | args.options
    for option in asked:
        if option not in takes:
            options = sorted(takes.keys() - {"params"})
            raise UserError(f"--optimizer.{option}: {cls.__name__} takes no such option{did_you_mean(option, options)}")
    given = {k: v for k, v in defaults.items() if k in takes} | asked
    weight_decay = given.pop("weight_decay", 0.0)
    groups = parameter_groups(model, weight_decay)
    if "weight_decay" not in takes:
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    if "fused" in takes and not {"fused", "foreach"} & given.keys():
        given["fused"] = all(p.device.type in ("cuda", "cpu", "mps") for p in model.parameters())
    try:
        return cls(groups, lr=learning_rate, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"--optimizer.name {args.name}: {str(error).splitlines()[0]}") from error
