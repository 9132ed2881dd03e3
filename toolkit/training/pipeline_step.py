"""Run one optimizer step through the stages of a pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F

from toolkit.data.loader import Batch
from toolkit.distributed import ranks
from toolkit.distributed.pipeline import pipeline_of
from toolkit.models.attention_kernels import document_bounds
from toolkit.models.labels import IGNORE_INDEX
from toolkit.objectives.base import LOSS, Objective, scales
from toolkit.objectives.inputs import forward_inputs, original_module
from toolkit.optim.update import Update
from toolkit.training.step import StepResult, apply_step

_FILLERS = {"positions": 0, "documents": -1}  # as in collation


def pipeline_step(
    fabric: Fabric,
    objective: Objective,
    update: Update,
    micro_batches: list[Batch],
    counts: Mapping[str, int],
    overlap: Callable[[], None] = lambda: None,
) -> StepResult:
    """Accumulate the gradient over the micro-batches and update the weights.

    Same arguments, result and errors as :func:`toolkit.training.step.train_step`.
    """
    model = original_module(update.model)
    pipeline, parts = pipeline_of(model), objective.parts(model)
    assert pipeline is not None
    scale = scales(parts, counts, ranks.layout().loss_ranks)
    inputs = [forward_inputs(update.model, batch, fabric.device) for batch in of_one_length(micro_batches)]
    totals = {LOSS: pipeline.accumulate(inputs, scale[LOSS])}
    return apply_step(update, parts, scale, totals, micro_batches, counts, overlap)


def of_one_length(batches: list[Batch]) -> list[Batch]:
    """Pad the rows of all micro-batches to one length, because the buffers between stages have a fixed shape."""
    longest = max(batch.input_ids.size(1) for batch in batches)
    return [batch if batch.input_ids.size(1) == longest else _padded(batch, longest) for batch in batches]


def _padded(batch: Batch, length: int) -> Batch:
    def pad(tensor: Tensor, filler: int) -> Tensor:
        return F.pad(tensor, (0, length - tensor.size(1)), value=filler)

    packed = {name: pad(tensor, _FILLERS[name]) for name, tensor in batch.packed.items()}
    bounds = None if batch.bounds is None else document_bounds(packed["documents"])
    input_ids, labels = pad(batch.input_ids, 0), pad(batch.labels, IGNORE_INDEX)
    return replace(batch, input_ids=input_ids, labels=labels, packed=packed, bounds=bounds)
