"""What ``--optimizer.in_backward`` goes together with. Imports no torch."""

from __future__ import annotations

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
