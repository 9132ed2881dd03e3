"""One optimizer step: the gradient of the global batch's mean loss (N2), checked before it is used (N7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch.profiler import record_function

from toolkit.data.loader import Batch
from toolkit.distributed import ranks
from toolkit.distributed.fabric import gradient_norm
from toolkit.distributed.private_lightning import FabricModule
from toolkit.errors import GuardError
from toolkit.training.guarded_update import can_guard, clip_gradients, guarded_step, knows_norm_first
from toolkit.training.loss_parts import forward_inputs, pop_loss_parts
from toolkit.training.step_in_backward import StepInBackward
from toolkit.training.trace import BACKWARD, FORWARD

MAX_SKIPPED_IN_A_ROW = 50
"""An fp16 scaler that finds no scale within so many steps never will."""


class StepResult(NamedTuple):
    loss: float
    """Mean over the supervised tokens of the global batch, in nats (N2)."""
    grad_norm: float
    """Norm of the complete gradient before clipping, the same on all ranks."""
    skipped: bool
    """The fp16 scaler left the weights alone and lowered its scale."""
    parts: Mapping[str, float]
    """Means of the parts of the loss, of a model that has them; like the loss over all supervised tokens."""


def train_step(
    fabric: Fabric,
    model: FabricModule,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[Batch],
    *,
    n_tokens: int,
    learning_rate: float,
    max_norm: float | None,
    before_update: Callable[[], None] | None = None,
    in_backward: StepInBackward | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> StepResult:
    """Accumulate the gradient over the micro-batches and update the weights.

    Where the optimizer can check and clip the gradient itself and nothing is called in between, the update is launched
    before the host waits for loss and norm (see :mod:`toolkit.training.guarded_update`), otherwise after that.

    Args:
        n_tokens: Supervised tokens of the global batch, over all ranks. Every strategy averages gradients over the
            ranks, so that the sum of losses times (world size / n_tokens) has the gradient of the global mean.
        max_norm: Clip the norm of the gradient to this; None or 0 does not clip.
        before_update: Called when the gradient is complete, checked and clipped.
        in_backward: Updates the weights during the backward pass; then there is nothing to clip or to call.
        meanwhile: Called before the host waits for the device.

    Raises:
        GuardError: the loss or the gradient is not finite. The weights are untouched; with ``in_backward`` they are
            finite.
    """
    set_learning_rate(optimizer, learning_rate)
    scale = fabric.world_size / max(1, n_tokens)
    loss_total = torch.zeros((), device=fabric.device)
    pop_loss_parts(model)
    for i, batch in enumerate(micro_batches):
        with fabric.no_backward_sync(model, enabled=i < len(micro_batches) - 1):
            with record_function(FORWARD):
                loss_sum, _ = model(**forward_inputs(model, batch, fabric.device))
            with record_function(BACKWARD):
                fabric.backward(loss_sum * scale)
        loss_total += loss_sum.detach()
    is_guarded = in_backward is None and before_update is None and can_guard(fabric, optimizer)
    norm: Any  # of Fabric's annotations, one is that of clip_val, with which there is no norm
    if in_backward is not None:
        norm = in_backward.pop_norm()
    elif knows_norm_first(fabric):
        norm = gradient_norm(fabric, model, optimizer)
        if not is_guarded:
            clip_gradients(optimizer, norm, max_norm)
    else:
        # An infinite limit leaves the gradient as it is; the norm is wanted anyhow.
        norm = fabric.clip_gradients(model, optimizer, max_norm=max_norm or math.inf, error_if_nonfinite=False)
    parts = pop_loss_parts(model)
    summed = ranks.sum_over_ranks(torch.stack([loss_total, *parts.values()]))
    totals = torch.cat([norm.float().view(1), summed.float()])
    if is_guarded:
        guarded_step(optimizer, totals[:2], totals[0], max_norm)
        optimizer.zero_grad(set_to_none=True)
    if meanwhile is not None:
        meanwhile()
    grad_norm, loss_sum, *part_sums = totals.tolist()  # the step's one synchronisation; the same on every rank
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    finite = math.isfinite(grad_norm)
    if not math.isfinite(loss_sum) or (not finite and scaler is None):
        raise GuardError(describe_nonfinite(float(loss_total), grad_norm, micro_batches))
    if in_backward is None and not is_guarded:
        if before_update is not None:
            before_update()
        optimizer.step()  # with a scaler, this leaves the weights alone where the gradient is not finite
        optimizer.zero_grad(set_to_none=True)
    means = {name: part / max(1, n_tokens) for name, part in zip(parts, part_sums, strict=True)}
    return StepResult(loss_sum / max(1, n_tokens), grad_norm, not finite, means)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_ratio", 1.0)


def describe_nonfinite(loss_sum: float, grad_norm: float, micro_batches: list[Batch]) -> str:
    """Name the ranks whose loss is not finite, or all where only the gradient is not; the same text on every rank."""
    ids = [row for batch in micro_batches for row in batch.ids if row >= 0]
    everywhere = list(enumerate(ranks.all_gather_object((loss_sum, ids))))
    nonfinite_ranks = [found for found in everywhere if not math.isfinite(found[1][0])] or everywhere
    return f"gradient norm {grad_norm:.6g}, " + "; ".join(
        f"loss {loss:.6g} on rank {rank}, its samples: {rows}" for rank, (loss, rows) in nonfinite_ranks
    )
