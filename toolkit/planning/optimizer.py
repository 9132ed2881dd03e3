"""Choice of the optimizer and its options."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from toolkit.checkpoints.weights import canonical_name
from toolkit.config import AUTO, CommandDefaults, OptimizerArgs
from toolkit.distributed.strategy import StrategyPlan
from toolkit.errors import UserError, did_you_mean
from toolkit.extension import load_registered, registered
from toolkit.models.attention import CausalSelfAttention
from toolkit.models.latent_attention import LatentAttention
from toolkit.planning.combined import AdamW8bit, CombinedOptimizer, Muon

COMBINED: dict[str, type[CombinedOptimizer]] = {"Muon": Muon, "AdamW8bit": AdamW8bit}
UNSUPPORTED = {
    "Optimizer": "is the base class",
    "LBFGS": "evaluates the loss several times per step",
    "SparseAdam": "needs sparse gradients",
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class by case-insensitive name: of ``torch.optim``, of :data:`COMBINED`, or of an extension."""
    base = torch.optim.Optimizer
    known = {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, base)} | COMBINED
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
    if cls is Muon and not given.setdefault("split_qkv", True):
        del given["split_qkv"]  # as in the checkpoints of versions without it
    if args.state_dtype != AUTO:
        given["state_dtype"] = args.state_dtype
    return {"name": args.name if given_class else cls.__name__, **given}


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


def block_params(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> dict[str, tuple[int, ...]]:
    """Return the canonical names of the parameters inside blocks, and the rows of each of the matrices stacked in one.

    These are queries, keys and values; ``()`` for other parameters. Call this before a strategy wraps the model.
    """
    inside = {id(p) for m in model.modules() if isinstance(m, blocks) for p in m.parameters()}
    rows: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, CausalSelfAttention | LatentAttention):
            layer, sizes = module.stacked_rows
            rows[canonical_name(f"{name}.{layer}.weight")] = sizes
    names = [canonical_name(name) for name, p in model.named_parameters() if id(p) in inside]
    return {name: rows.get(name, ()) for name in names}


def check_low_memory(
    options: dict[str, Any],
    precision: str,
    strategy: StrategyPlan,
    *,
    has_adapters: bool,
    has_blocks: bool,
    is_own: bool,
) -> None:
    """Check that strategy, weights and class go with bf16-master, bf16 moments, or a combined optimizer.

    Args:
        options: See :func:`resolve_optimizer`.
        is_own: Whether the class is one of torch.optim or of :data:`COMBINED`.
    """
    name, state_dtype = options["name"], options.get("state_dtype")
    chosen = {
        "--precision bf16-master": precision == "bf16-master",
        f"--optimizer.state_dtype {state_dtype}": state_dtype is not None,
        f"--optimizer.name {name}": name in COMBINED,
    }
    for option, is_chosen in chosen.items():
        if not is_chosen:
            continue
        if strategy.kind == "fsdp" or strategy.extension is not None:
            instead = "bf16-mixed, whose weights fsdp gathers in bf16" if "master" in option else "AdamW in fp32"
            raise UserError(
                f"{option}: is for one device or --strategy ddp, and this run uses {strategy.kind}; with shards use "
                f"{instead}"
            )
        if not is_own:
            raise UserError(f"{option}: is for torch's optimizers, which update each weight by itself; leave it out")
    if has_adapters and precision == "bf16-master":
        raise UserError("--precision bf16-master: adapters are fp32 beside a bf16 base already; use bf16-true")
    if name == "Muon" and not has_blocks:
        raise UserError("--optimizer.name Muon: is for the matrices of blocks, and none were found: block_classes")
    if state_dtype is None:
        return
    reasons = {
        "those of --precision bf16-true are bf16 already": precision == "bf16-true" and not has_adapters,
        "is not proven with --precision 16-mixed, use bf16-mixed or 32-true": precision == "16-mixed",
        "AdamW8bit has them in 8 bits": name == "AdamW8bit",
        f"{name} has none here": not _has_moments(options),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"--optimizer.state_dtype {state_dtype}: is for moments; {reason}; leave it out")


def _has_moments(options: dict[str, Any]) -> bool:
    """Whether the optimizer has state of the shape of the weights."""
    cls = optimizer_class(options["name"])
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = cls([parameter], **{k: v for k, v in options.items() if k not in ("name", "state_dtype", "fused")})
    optimizer.step()
    return any(getattr(value, "shape", None) == parameter.shape for value in optimizer.state[parameter].values())
