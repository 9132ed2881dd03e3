"""Construction of the optimizer and its parameter groups."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from toolkit.args import OptimizerArgs
from toolkit.checkpoints.weights import canonical_name
from toolkit.errors import UserError, did_you_mean

UNSUPPORTED = {
    "Optimizer": "is the base class",
    "LBFGS": "evaluates the loss several times per step",
    "Muon": "takes matrices only; embeddings, norms and biases need another optimizer",
    "SparseAdam": "needs sparse gradients",
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of ``torch.optim`` by case-insensitive name.

    Raises:
        UserError: no such class, or the training loop does not support it.
    """
    known = {
        n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }  # fmt: skip
    match = next((n for n in known if n.lower() == name.lower()), None)
    if match is None:
        usable = sorted(known.keys() - UNSUPPORTED.keys())
        raise UserError(
            f"--optimizer.name {name}: not in torch.optim{did_you_mean(name, usable)} ({', '.join(usable)})"
        )
    if match in UNSUPPORTED:
        raise UserError(f"--optimizer.name {name}: {UNSUPPORTED[match]}; use AdamW, for example")
    return known[match]


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
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (undecayed if canonical_name(name) in no_decay else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def resolve_optimizer(
    args: OptimizerArgs,
    defaults: dict[str, Any],
    precision: str,
    given_class: type[torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Return the resolved options of the optimizer, with its ``name``.

    ``defaults`` (weight_decay, betas) apply if the class takes them; the user's options must be accepted.
    ``given_class`` is a class outside torch.optim.

    Raises:
        UserError: no such class, or it does not take an option.
    """
    cls = given_class or optimizer_class(args.name)
    takes = inspect.signature(cls).parameters
    requested = {k: v for k in ("weight_decay", "betas", "eps") if (v := getattr(args, k)) is not None} | args.options
    if "lr" in requested:
        raise UserError(
            f"--optimizer.options lr {requested['lr']}: --train.learning_rate sets the learning rate; remove this"
        )
    for option in requested:
        if option not in takes or option == "params":
            options = sorted(takes.keys() - {"params", "lr"})
            where = f"options {option}" if option in args.options else option
            hint = did_you_mean(option, options) or f"; it takes {', '.join(options)}"
            raise UserError(f"--optimizer.{where} {requested[option]}: {cls.__name__} takes no such option{hint}")
    given = {k: v for k, v in defaults.items() if k in takes} | requested
    if given.get("fused") and precision == "16-mixed":
        raise UserError(
            "--optimizer.options fused: not supported with --precision 16-mixed, whose gradients are scaled"
        )
    return {"name": args.name if given_class else cls.__name__, **given}


def build_optimizer(
    model: nn.Module,
    options: dict[str, Any],
    learning_rate: float,
    precision: str = "32-true",
    no_decay: frozenset[str] | None = None,
    given_class: type[torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer from :func:`resolve_optimizer`'s options, fused where class and device support it.

    It is not fused under 16-mixed: a fused optimizer unscales the gradients itself, after clipping. ``no_decay`` is the
    result of :func:`no_decay_params`; required if the model is wrapped.

    Raises:
        UserError: the class rejects a value.
    """
    given = dict(options)
    name = given.pop("name")
    cls = given_class or optimizer_class(name)
    no_decay = no_decay_params(model) if no_decay is None else no_decay
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
