"""Compute validation metrics as a token-weighted mean over all ranks (N6)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from toolkit.data.base import TokenDataset
from toolkit.data.batch import Batch
from toolkit.data.loader import val_batches
from toolkit.distributed import ranks
from toolkit.objectives.base import LOSS, Objective, Part, means, total_counts
from toolkit.objectives.inputs import original_module


def batches_by_source(
    sources: Mapping[str, TokenDataset], max_rows: int | None, **options: Any
) -> dict[str, Iterator[Batch]]:
    """Return the validation batches of each source.

    Args:
        sources: Rows by name.
        max_rows: Maximum number of rows over all sources; None: all rows. It is split in proportion to source sizes,
            at least one row each, so the sources' shares in the total loss do not change.
        options: See :func:`toolkit.data.loader.val_batches`.
    """
    total = sum(len(rows) for rows in sources.values())
    limits = {name: rows_of_source(len(rows), total, max_rows) for name, rows in sources.items()}
    return {name: val_batches(rows, max_rows=limits[name], **options) for name, rows in sources.items()}


def rows_of_source(size: int, total: int, max_rows: int | None) -> int:
    """Return how many of a source's ``size`` rows to validate, see :func:`batches_by_source`."""
    return size if max_rows is None or max_rows >= total else max(1, max_rows * size // total)


@torch.no_grad()
def validate(
    fabric: Fabric,
    objective: Objective,
    model: nn.Module,
    batches: Mapping[str, Iterable[Batch]],
    token_bytes: np.ndarray | None,
) -> dict[str, float]:
    """Return the validation metrics.

    Args:
        model: The model as Fabric wraps it.
        batches: Batches by source, in the same order on every rank; the name is "" if there is one source. All ranks
            need the same number of batches; a batch may have no supervised tokens.
        token_bytes: Number of UTF-8 bytes per token, shape (vocabulary,); None without a tokenizer.

    Returns:
        val_loss over all sources, val_loss_<source>, and val_<part> for other parts of the objective. If the loss is a
        negative log-likelihood, also val_ppl and, with ``token_bytes``, val_bpb. Empty without supervised tokens.
    """
    was_training = model.training
    model.eval()
    objective.outputs = []
    parts = objective.parts(original_module(model))
    n_counts = len(objective.normalizers) + 1
    totals = torch.zeros(len(batches), n_counts + len(parts), dtype=torch.float64)  # counts, bytes, sums
    for row, of_source in zip(totals, batches.values(), strict=True):
        for batch in of_source:
            sums = objective.sums(model, batch, fabric.device)
            targets = batch.labels[batch.labels >= 0].numpy()
            # ids beyond the tokenizer's vocabulary (padding, other data) have no text
            n_bytes = int(token_bytes[targets[targets < len(token_bytes)]].sum()) if token_bytes is not None else 0
            counts = total_counts(objective, [batch]).values()
            # nan: the model does not compute this part in validation
            values = [float(sums.get(part.name, math.nan)) for part in parts]
            row += torch.tensor([*counts, n_bytes, *values], dtype=torch.float64)
    if not ranks.is_first("pipeline", "context", "tensor"):
        totals[:, :n_counts] = 0  # these ranks read the same rows as the first
    if not ranks.is_first("tensor"):
        totals.zero_()
    model.train(was_training)
    totals = ranks.sum_over_ranks(totals.flatten()).reshape(totals.shape)
    metrics = _metrics(objective, parts, totals.sum(0).tolist())
    further = objective.metrics(original_module(model)) if metrics else {}
    metrics |= {f"val_{name}": value for name, value in further.items() if math.isfinite(value)}
    objective.outputs = None
    for name, row in zip(batches, totals.tolist(), strict=True):
        if name and "val_loss" in (its_metrics := _metrics(objective, parts, row)):
            metrics[f"val_loss_{name}"] = its_metrics["val_loss"]
    return metrics


def _metrics(objective: Objective, parts: tuple[Part, ...], totals: list[float]) -> dict[str, float]:
    """Compute the metrics from totals: counts, bytes and the parts' sums."""
    n = len(objective.normalizers)
    counts, n_bytes = dict(zip(objective.normalizers, totals[:n], strict=True)), totals[n]
    sums = {p.name: value for p, value in zip(parts, totals[n + 1 :], strict=True) if not math.isnan(value) or p.weight}
    if not all(counts[part.normalizer] for part in parts if part.weight):
        return {}
    loss, further = means(parts, sums, counts)
    metrics = {"val_loss": loss} if any(part.weight for part in parts) else {}
    if objective.is_likelihood:
        metrics["val_ppl"] = math.exp(min(loss, 700.0))
        if n_bytes:
            metrics["val_bpb"] = sums[LOSS] / math.log(2) / n_bytes
    return metrics | {f"val_{name}": value for name, value in further.items()}
