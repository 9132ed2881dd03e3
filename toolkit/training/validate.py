"""N6: validation is a token-weighted mean over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from toolkit.data.base import TokenDataset
from toolkit.data.loader import Batch, val_batches
from toolkit.distributed import ranks
from toolkit.training.loss_parts import forward_inputs, loss_parts, pop_loss_parts


def batches_by_source(
    sources: Mapping[str, TokenDataset], max_rows: int | None, **options: Any
) -> dict[str, Iterator[Batch]]:
    """Return the validation batches of each source.

    Args:
        sources: Rows by name.
        max_rows: Rows of all sources together. Each has its part of them, in proportion to its size and at least one
            row, so that a limit does not change the sources' parts in the loss over all. None: all rows.
        options: See :func:`toolkit.data.loader.val_batches`.
    """
    total = sum(len(rows) for rows in sources.values())
    limits = {name: rows_of_source(len(rows), total, max_rows) for name, rows in sources.items()}
    return {name: val_batches(rows, max_rows=limits[name], **options) for name, rows in sources.items()}


def rows_of_source(size: int, total: int, max_rows: int | None) -> int:
    """Return how many of the ``size`` rows of a source to validate, see :func:`batches_by_source`."""
    return size if max_rows is None or max_rows >= total else max(1, max_rows * size // total)


@torch.no_grad()
def validate(
    fabric: Fabric,
    model: nn.Module,
    batches: Iterable[Batch] | Mapping[str, Iterable[Batch]],
    token_bytes: np.ndarray | None,
) -> dict[str, float]:
    """Return the loss (nats per token), the perplexity, and bits per byte where the tokenizer is known.

    Args:
        batches: The same number on every rank; a batch may hold no supervised token. Or such batches by source, in the
            same order on every rank.
        token_bytes: UTF-8 bytes that each token stands for, (vocabulary,).

    Returns:
        val_loss, val_ppl and val_bpb over all sources, the means of the parts of the loss, val_<part>, and
        val_loss_<source>; an empty dictionary if no token at all was supervised.
    """
    was_training = model.training
    model.eval()
    names = loss_parts(model)
    by_source = batches if isinstance(batches, Mapping) else {"": batches}
    totals = torch.zeros(len(by_source), 3 + len(names), dtype=torch.float64)  # nats, tokens, bytes, parts of the loss
    pop_loss_parts(model)
    for row, of_source in zip(totals, by_source.values(), strict=True):
        for batch in of_source:
            loss_sum, n_tokens = model(**forward_inputs(model, batch, fabric.device))
            parts = pop_loss_parts(model)
            targets = batch.labels[batch.labels >= 0].numpy()
            # ids beyond the tokenizer's own (padding of the vocabulary, foreign data) stand for no text
            n_bytes = int(token_bytes[targets[targets < len(token_bytes)]].sum()) if token_bytes is not None else 0
            sums = [float(loss_sum), int(n_tokens), n_bytes, *(float(parts.get(name, math.nan)) for name in names)]
            row += torch.tensor(sums, dtype=torch.float64)
    model.train(was_training)
    totals = ranks.sum_over_ranks(totals.flatten()).reshape(totals.shape)
    nats, tokens, n_bytes, *part_sums = totals.sum(0).tolist()
    if not tokens:
        return {}
    loss = nats / tokens
    metrics = {"val_loss": loss, "val_ppl": math.exp(min(loss, 700.0))}
    if n_bytes:
        metrics["val_bpb"] = nats / math.log(2) / n_bytes
    by_name = zip(names, part_sums, strict=True)  # nan: the model does not compute this part in validation
    metrics |= {f"val_{name}": part / tokens for name, part in by_name if not math.isnan(part)}
    of_sources = zip(by_source, totals[:, :2].tolist(), strict=True)
    return metrics | {f"val_loss_{name}": nats / tokens for name, (nats, tokens) in of_sources if name and tokens}
