"""Choice of the optimizer and its options."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from toolkit.config import AUTO, CommandDefaults, OptimizerArgs
from toolkit.errors import UserError, did_you_mean
from toolkit.extension import load_registered, registered

UNSUPPORTED = {
    "Optimizer": "is the base class",
    "LBFGS": "evaluates the loss several times per step",
    "Muon": "takes matrices only; embeddings, norms and biases need another optimizer",
    "SparseAdam": "needs sparse gradients",
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of ``torch.optim`` by case-insensitive name, or one of an extension.

    Raises:
        UserError: no such class, or the training loop does not support it.
    """
    base = torch.optim.Optimizer
    known = {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, base)}
    match = next((n for n in known if n.lower() == name.lower()), None)
    if match is None and name in (added := registered("optimizers", known)):
        return load_registered("optimizers", name)
    if match is None:
        usable = sorted({*added, *known} - UNSUPPORTED.keys())
        raise UserError(
            f"--optimizer.name {name}: not in torch.optim{did_you_mean(name, usable)} ({', '.join(usable)})"
        )
    if match in UNSUPPORTED:
        raise UserError(f"--optimizer.name {name}: {UNSUPPORTED[match]}; use AdamW, for example")
    return known[match]


def resolve_optimizer(
    args: OptimizerArgs,
    precision: str,
    defaults: CommandDefaults,
    given_class: type[torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Return the resolved options of the optimizer, with its ``name``.

    The class must take the user's options; those that are "auto" apply if it does. ``defaults`` are those of the
    command. ``given_class`` is a class outside torch.optim.

    Raises:
        UserError: no such class, or it does not take an option.
    """
    cls = given_class or optimizer_class(args.name)
    takes = inspect.signature(cls).parameters
    requested = {k: v for k in ("weight_decay", "betas", "eps") if (v := getattr(args, k)) != AUTO} | args.options
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
    # those of the command are Adam's; an extension's optimizer has its own
    names = ("weight_decay",) if args.name in registered("optimizers") else ("weight_decay", "betas")
    given = {k: getattr(defaults, k) for k in names if k in takes} | requested
    if given.get("fused") and precision == "16-mixed":
        raise UserError(
            "--optimizer.options fused: not supported with --precision 16-mixed, whose gradients are scaled"
        )
    return {"name": args.name if given_class else cls.__name__, **given}
