"""Run one optimizer step with the gradient of the global batch's loss (N2), after checking it for NaN and Inf (N7)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from toolkit.checkpoints.weights import Tensors
from toolkit.data.batch import Batch
from toolkit.distributed import ranks
from toolkit.distributed.model_parts import pipeline_of
from toolkit.errors import GuardError, UserError
from toolkit.objectives.base import LOSS, Objective, means, scales
from toolkit.objectives.inputs import forward_inputs, original_module
from toolkit.optim.update import Update
from toolkit.training.time_breakdown import BACKWARD, FORWARD


class StepResult(NamedTuple):
    loss: float
    """Mean over the global batch. For next-token prediction: per supervised token, in nats (N2)."""
    grad_norm: float
    """Global gradient norm before clipping, the same on all ranks."""
    skipped: bool
    """Whether there was no update: the fp16 GradScaler lowered its scale, or the step was a spike."""
    parts: Mapping[str, float]
    """Means of the objective's other parts."""


def launch_step(
    objective: Objective,
    update: Update,
    micro_batches: list[Batch],
    counts: Mapping[str, int],
    overlap: Callable[[], None] = lambda: None,
    launched: Callable[[], None] = lambda: None,
) -> Callable[[], StepResult]:
    """Accumulate the gradient over the micro-batches and update the weights.

    Args:
        update: Clips and applies the gradient.
        counts: The objective's normalizers, summed over all ranks. Strategies average gradients over ranks, so loss
            sums are multiplied by (averaged ranks / count) to get the gradient of the global mean.
        overlap: Host work to do while the device computes.
        launched: Called once, after the first micro-batch is launched, or in a pipeline after the last.

    Returns:
        A function that waits for the device and returns the result; all ranks call it. It raises GuardError if the loss
        or the gradient is not finite. The weights are unchanged then, or with ``--optimizer.in_backward`` finite.
    """
    # parts with a weight come first, because N7 checks only those
    parts = tuple(sorted(objective.parts(original_module(update.model)), key=lambda part: part.weight == 0))
    scale = scales(parts, counts, ranks.layout().loss_ranks)
    sums = _accumulate(objective, update, micro_batches, scale, launched)
    norm = update.norm()
    totals = {part.name: sums[part.name] for part in parts if part.name in sums}
    local = torch.stack(list(totals.values()))
    if not ranks.is_first("tensor"):
        local = torch.zeros_like(local)  # ranks of a tensor group compute the same loss
    summed = ranks.sum_over_ranks(local.clone())

    def describe(values: list[float]) -> tuple[float, dict[str, float]]:
        return means(parts, dict(zip(totals, values[1:], strict=True)), counts)

    checked = torch.cat([norm.float().view(1), summed.float()])
    read = update.apply(checked, 1 + len(scale), overlap, lambda values: describe(values)[0])
    ids = [row for batch in micro_batches for row in batch.ids if row >= 0]

    def result() -> StepResult:
        grad_norm, *values = totals_read = read()
        losses = values[: len(scale)]
        if not update.accepts([grad_norm, *losses]):
            raise GuardError(describe_nonfinite(float(local[: len(scale)].sum()), grad_norm, ids))
        loss_mean, part_means = describe(totals_read)
        return StepResult(loss_mean, grad_norm, update.skipped or not math.isfinite(grad_norm), part_means)

    return result


def train_step(*args: Any, **options: Any) -> StepResult:
    """Launch a step and wait for its result; see :func:`launch_step`."""
    return launch_step(*args, **options)()


def _accumulate(
    objective: Objective,
    update: Update,
    micro_batches: list[Batch],
    scale: Mapping[str, float],
    launched: Callable[[], None],
) -> Tensors:
    """Accumulate the gradient, in a pipeline through its stages. Return this rank's sums of the parts."""
    model, fabric, totals = update.model, update.fabric, Tensors()
    if (pipeline := pipeline_of(original_module(model))) is not None:
        longest = max(batch.input_ids.size(1) for batch in micro_batches)  # buffers between stages have a fixed shape
        inputs = [forward_inputs(model, batch.padded(longest), fabric.device) for batch in micro_batches]
        totals = {LOSS: pipeline.accumulate(inputs, scale[LOSS])}
        launched()
        return totals
    if objective.looks_ahead:
        objective.look_ahead(model, micro_batches, fabric.device)
    for i, batch in enumerate(micro_batches):
        with fabric.no_backward_sync(model, enabled=i < len(micro_batches) - 1):
            with record_function(FORWARD):
                sums = objective.sums(model, batch, fabric.device)
                for name in scale.keys() - sums.keys():
                    raise UserError(
                        f"objective {type(objective).__name__}: sums() must return {name}, a part with a weight"
                    )
                loss = torch.stack([sums[name] * factor for name, factor in scale.items()]).sum()
            with record_function(BACKWARD):
                fabric.backward(loss)
        if i == 0:
            launched()
        totals = {name: totals.get(name, 0) + value.detach() for name, value in sums.items()}
    return totals


def describe_nonfinite(loss_sum: float, grad_norm: float, ids: list[int]) -> str:
    """Describe the ranks with a non-finite loss, or all ranks if only the gradient is non-finite. Collective."""
    by_rank = list(enumerate(ranks.all_gather_object((loss_sum, ids))))
    nonfinite_ranks = [entry for entry in by_rank if not math.isfinite(entry[1][0])] or by_rank
    return f"gradient norm {grad_norm:.6g}, " + "; ".join(
        f"loss {loss:.6g} on rank {rank}, its samples: {rows}" for rank, (loss, rows) in nonfinite_ranks
    )
