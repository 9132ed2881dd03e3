"""Run one optimizer step through the stages of a pipeline."""

from collections.abc import Callable, Mapping

from lightning.fabric import Fabric

from toolkit.data.batch import Batch
from toolkit.distributed import ranks
from toolkit.distributed.pipeline import pipeline_of
from toolkit.objectives.base import LOSS, Objective, scales
from toolkit.objectives.inputs import forward_inputs, original_module
from toolkit.optim.update import Update
from toolkit.training.step import StepResult, apply_step


def pipeline_step(
    fabric: Fabric,
    objective: Objective,
    update: Update,
    micro_batches: list[Batch],
    counts: Mapping[str, int],
    overlap: Callable[[], None] = lambda: None,
    launched: Callable[[], None] = lambda: None,
) -> StepResult:
    """Accumulate the gradient over the micro-batches and update the weights.

    Same arguments, result and errors as :func:`toolkit.training.step.train_step`; ``launched`` is called after the last
    micro-batch.
    """
    model = original_module(update.model)
    pipeline, parts = pipeline_of(model), objective.parts(model)
    assert pipeline is not None
    scale = scales(parts, counts, ranks.layout().loss_ranks)
    longest = max(batch.input_ids.size(1) for batch in micro_batches)  # buffers between stages have a fixed shape
    inputs = [forward_inputs(update.model, batch.padded(longest), fabric.device) for batch in micro_batches]
    totals = {LOSS: pipeline.accumulate(inputs, scale[LOSS])}
    launched()
    return apply_step(update, parts, scale, totals, micro_batches, counts, overlap)
