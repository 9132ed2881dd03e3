"""What is not supported together. Imports no torch."""

from __future__ import annotations

from typing import Any

from toolkit.errors import UserError


def check_in_backward(
    *, has_adapters: bool, world_size: int, accumulation: int, max_norm: float, precision: str, is_torch_optimizer: bool
) -> None:
    """Check that every weight can be updated as soon as its gradient is known."""
    reasons = {
        "would save nothing, the gradients of adapters are small; leave it out": has_adapters,
        f"needs one device, and {world_size} are in use; FSDP shards gradients instead": world_size > 1,
        f"needs the complete gradient in one backward pass, and {accumulation} micro-batches are accumulated; use "
        "--train.micro_batch_size equal to --train.global_batch_size": accumulation > 1,
        "clipping needs the norm of all gradients first; use --train.max_norm 0": max_norm > 0,
        "does not go with --precision 16-mixed, whose scaler checks all gradients first; use bf16-mixed or 32-true": (
            precision == "16-mixed"
        ),
        "only torch's optimizers are known to update each weight by itself; leave it out": not is_torch_optimizer,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"--optimizer.in_backward true: {reason}")


def check_low_memory(
    options: dict[str, Any],
    precision: str,
    strategy_kind: str,
    *,
    is_extension: bool,
    has_adapters: bool,
    has_blocks: bool,
    is_hybrid: bool,
    is_builtin: bool,
    has_moments: bool,
) -> None:
    """Check that strategy, weights and class go with bf16-master, bf16 moments, or a hybrid optimizer.

    Args:
        options: The resolved options of the optimizer, with its name.
        is_extension: Whether an extension provides the strategy.
        is_builtin: Whether the class is one of torch's or of :mod:`toolkit.optim.hybrid`.
        has_moments: Whether the optimizer has state of the shape of the weights.
    """
    name, state_dtype = options["name"], options.get("state_dtype")
    chosen = {
        "--precision bf16-master": precision == "bf16-master",
        f"--optimizer.state_dtype {state_dtype}": state_dtype is not None,
        f"--optimizer.name {name}": is_hybrid,
    }
    for option, is_chosen in chosen.items():
        if not is_chosen:
            continue
        if strategy_kind == "fsdp" or is_extension:
            instead = "bf16-mixed, whose weights fsdp gathers in bf16" if "master" in option else "AdamW in fp32"
            raise UserError(
                f"{option}: is for one device or --strategy ddp, and this run uses {strategy_kind}; with shards use "
                f"{instead}"
            )
        if not is_builtin:
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
        f"{name} has none here": not has_moments,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"--optimizer.state_dtype {state_dtype}: is for moments; {reason}; leave it out")
