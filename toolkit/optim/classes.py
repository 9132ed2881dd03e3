"""Find the optimizer's class, resolve its options and build it."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from toolkit.config import AUTO, OPTIMIZER_SHORTHANDS, CommandDefaults, OptimizerArgs
from toolkit.distributed.device import can_fuse
from toolkit.distributed.shards import is_sharded
from toolkit.errors import UserError, did_you_mean, option_text
from toolkit.extension import load_registered, registered
from toolkit.optim import HYBRID_OPTIMIZERS
from toolkit.optim.bf16 import BF16Optimizer
from toolkit.optim.evaluation_weights import begin_training
from toolkit.optim.groups import parameter_groups

if TYPE_CHECKING:
    from toolkit.optim.hybrid import HybridOptimizer

UNSUPPORTED = {
    "Optimizer": "is the base class",
    "LBFGS": "evaluates the loss several times per step",
    "SparseAdam": "needs sparse gradients",
}


def hybrid_class(name: str) -> "type[HybridOptimizer] | None":
    """Import one of :mod:`toolkit.optim.hybrid`'s optimizers by case-insensitive name; None for other names."""
    match = next((known for known in HYBRID_OPTIMIZERS if known.lower() == name.lower()), None)
    if match is None:
        return None
    from toolkit.optim import hybrid  # most runs use torch's

    return getattr(hybrid, match)


def optimizer_class(name: str) -> type[Optimizer]:
    """Return an optimizer class by case-insensitive name, from ``torch.optim``, toolkit or an extension."""
    if (hybrid := hybrid_class(name)) is not None:
        return hybrid
    classes = {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, Optimizer)}
    match = next((n for n in classes if n.lower() == name.lower()), None)
    if match is None and name in (added := registered("optimizers", {*classes, *HYBRID_OPTIMIZERS})):
        return load_registered("optimizers", name)
    if match is None:
        usable = sorted({*added, *classes, *HYBRID_OPTIMIZERS} - UNSUPPORTED.keys())
        raise UserError(f"--optimizer.name {name}: no such optimizer{did_you_mean(name, usable)} ({', '.join(usable)})")
    if match in UNSUPPORTED:
        raise UserError(f"--optimizer.name {name}: {UNSUPPORTED[match]}; use AdamW, for example")
    return classes[match]


def resolve_optimizer(
    args: OptimizerArgs, defaults: CommandDefaults, user_class: type[Optimizer] | None = None
) -> dict[str, Any]:
    """Return the optimizer's resolved options, including ``name``.

    The class must accept the user's options. The command's ``defaults`` apply to "auto" options that the class accepts.
    ``user_class`` is a class outside torch.optim.
    """
    cls = user_class or optimizer_class(args.name)
    takes = inspect.signature(cls).parameters
    requested = {k: v for k in OPTIMIZER_SHORTHANDS if (v := getattr(args, k)) != AUTO} | args.options
    if "lr" in requested:
        raise UserError(
            f"--optimizer.options lr {requested['lr']}: is not supported; set --train.learning_rate instead"
        )
    for option in requested:
        if option not in takes or option == "params":
            options = sorted(takes.keys() - {"params", "lr"})
            where = f"options {option}" if option in args.options else option
            hint = did_you_mean(option, options) or f"; it takes {', '.join(options)}"
            value = option_text(requested[option])
            raise UserError(f"--optimizer.{where} {value}: {cls.__name__} takes no such option{hint}")
    # the command's betas are Adam's; an extension's optimizer has other defaults
    names = ("weight_decay",) if args.name in registered("optimizers") else ("weight_decay", "betas")
    resolved = {k: getattr(defaults, k) for k in names if k in takes} | requested
    if user_class is None and cls.__name__ == "Muon" and not resolved.setdefault("split_qkv", True):
        del resolved["split_qkv"]  # for compatibility with older checkpoints, which lack it
    if args.state_dtype != AUTO:
        resolved["state_dtype"] = args.state_dtype
    return {"name": args.name if user_class else cls.__name__, **resolved}


def build_optimizer(
    model: nn.Module,
    options: dict[str, Any],
    learning_rate: float,
    precision: str,
    no_decay: frozenset[str],
    user_class: type[Optimizer] | None = None,
    in_blocks: Mapping[str, tuple[int, ...]] | None = None,
) -> Optimizer:
    """Build the optimizer from :func:`resolve_optimizer`'s options, fused if the class and device support it.

    It is not fused under 16-mixed: a fused optimizer unscales the gradients itself, after clipping. ``no_decay`` and
    ``in_blocks`` are the results of ``no_decay_params`` and ``block_params`` in :mod:`toolkit.optim.groups`.
    """
    arguments = dict(options)
    name, state_dtype = arguments.pop("name"), arguments.pop("state_dtype", "auto")
    cls: type = user_class or optimizer_class(name)  # its arguments differ from the base class's
    takes = inspect.signature(cls).parameters
    hybrid = cls if hasattr(cls, "is_main") else None
    split_qkv, ratio = arguments.get("split_qkv", False), arguments.pop("loraplus_lr_ratio", 1.0)
    decay = arguments.pop("weight_decay", 0.0)
    groups = parameter_groups(model, decay, no_decay, hybrid, in_blocks, split_qkv=split_qkv, b_lr_ratio=ratio)
    if "weight_decay" not in takes and ratio == 1:
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    if "fused" in takes and precision != "16-mixed" and not {"fused", "foreach"} & arguments.keys():
        arguments["fused"] = can_fuse(model.parameters())
    if cls is torch.optim.Adafactor and any(map(is_sharded, model.parameters())):
        from toolkit.optim.adafactor import ShardedAdafactor  # of use only here

        cls = ShardedAdafactor
    optimizer = construct(cls, groups, lr=learning_rate, **arguments)
    has_masters, has_bf16_moments = precision == "bf16-master", state_dtype == "bf16"
    if has_masters or has_bf16_moments:
        return BF16Optimizer(optimizer, has_masters=has_masters, has_bf16_moments=has_bf16_moments)
    return optimizer


def construct(cls: type, groups: Any, **arguments: Any) -> Optimizer:
    """Return ``cls(groups, **arguments)``. Raise UserError for a value that the class refuses."""
    try:
        return cls(groups, **arguments)
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        reason = f"{(str(error) or type(error).__name__).splitlines()[0]}; correct --optimizer.options"
        raise UserError(f"--optimizer.name {cls.__name__}: {reason}") from error


def has_moments(options: dict[str, Any]) -> bool:
    """Whether the optimizer keeps state with the shape of the weights; ``options``: see :func:`resolve_optimizer`."""
    cls = optimizer_class(options["name"])
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.zeros_like(parameter)
    arguments = {k: v for k, v in options.items() if k not in ("name", "state_dtype", "fused")}
    optimizer = construct(cls, [parameter], **arguments)
    begin_training(optimizer)
    optimizer.step()
    return any(getattr(value, "shape", None) == parameter.shape for value in optimizer.state[parameter].values())
