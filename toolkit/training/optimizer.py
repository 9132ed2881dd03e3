"""Which parameters are updated, and how."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from toolkit.args import OptimizerArgs
from toolkit.checkpoints.weights import canonical_name
from toolkit.errors import UserError, did_you_mean

NOT_HERE = {
    "Optimizer": "is the base class",
    "LBFGS": "evaluates the loss several times per step",
    "Muon": "takes matrices only, and embeddings, norms and biases need another",
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


def no_decay_params(model: nn.Module) -> frozenset[str]:
    """Return the canonical names of the parameters that do not decay (N5): biases, norms and embeddings.

    Tied heads are embeddings; the biases of experts are matrices. To be asked before a strategy wraps the model: shards
    have one dimension, all of them.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}

    def is_spared(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim < 2 or name.endswith(".bias") or id(parameter) in embeddings

    return frozenset(canonical_name(name) for name, p in model.named_parameters() if is_spared(name, p))


def parameter_groups(model: nn.Module, weight_decay: float, no_decay_params: frozenset[str]) -> list[dict[str, Any]]:
    """Split the trained parameters, whole or sharded, into those that decay and those that are no_decay_params."""
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (rest if canonical_name(name) in no_decay_params else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def resolve_optimizer(
    args: OptimizerArgs,
    defaults: dict[str, Any],
    precision: str,
    given_class: type[torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Return the options of the optimizer that will be built, with its ``name``.

    ``defaults`` (weight_decay, betas) apply where the class takes them; what the user asked for must be taken.
    ``given_class`` is one that torch.optim does not have.

    Raises:
        UserError: there is no such class, or it does not take an option.
    """
    cls = given_class or optimizer_class(args.name)
    takes = inspect.signature(cls).parameters
    asked = {k: v for k in ("weight_decay", "betas", "eps") if (v := getattr(args, k)) is not None} | args.options
    if "lr" in asked:
        raise UserError(
            f"--optimizer.options lr {asked['lr']}: the rate is set by --train.learning_rate; leave this out"
        )
    for option in asked:
        if option not in takes or option == "params":
            options = sorted(takes.keys() - {"params", "lr"})
            where = f"options {option}" if option in args.options else option
            hint = did_you_mean(option, options) or f"; it takes {', '.join(options)}"
            raise UserError(f"--optimizer.{where} {asked[option]}: {cls.__name__} takes no such option{hint}")
    given = {k: v for k, v in defaults.items() if k in takes} | asked
    if given.get("fused") and precision == "16-mixed":
        raise UserError("--optimizer.options fused: does not go with --precision 16-mixed, whose gradients are scaled")
    return {"name": args.name if given_class else cls.__name__, **given}


def build_optimizer(
    model: nn.Module,
    options: dict[str, Any],
    learning_rate: float,
    precision: str = "32-true",
    no_decay_params: frozenset[str] | None = None,
    given_class: type[torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that :func:`resolve_optimizer` describes, fused where the class and the device have that.

    Not under 16-mixed: a fused optimizer takes the fp16 scale off the gradients itself, and clipping would see them
    scaled. ``no_decay_params`` is what :func:`no_decay_params` said of the model; needed where the model is wrapped.

    Raises:
        UserError: the class refuses a value.
    """
    given = dict(options)
    name = given.pop("name")
    cls = given_class or optimizer_class(name)
    no_decay_params = no_decay_params(model) if no_decay_params is None else no_decay_params
    takes = inspect.signature(cls).parameters
    groups = parameter_groups(model, given.pop("weight_decay", 0.0), no_decay_params)
    if "weight_decay" not in takes:
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    if "fused" in takes and precision != "16-mixed" and not {"fused", "foreach"} & given.keys():
        given["fused"] = all(p.device.type in ("cuda", "cpu", "mps") for p in model.parameters())
    try:
        return cls(groups, lr=learning_rate, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"--optimizer.name {cls.__name__}: {str(error).splitlines()[0]}") from error
