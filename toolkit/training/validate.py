"""N6: validation is a token-weighted mean over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from toolkit.data.loader import Batch
from toolkit.distributed import ranks
from toolkit.training.loss_parts import forward_inputs, loss_parts, pop_loss_parts


@torch.no_grad()
def validate(
    fabric: Fabric, model: nn.Module, batches: Iterable[Batch], token_bytes: np.ndarray | None
) -> dict[str, float]:
    """Return the loss (nats per token), the perplexity, and bits per byte where the tokenizer is known.

    Args:
        batches: The same number on every rank; a batch may hold no supervised token.
        token_bytes: UTF-8 bytes that each token stands for, (vocabulary,).

    Returns:
        val_loss, val_ppl and val_bpb, and the means of the parts of the loss, val_<part>; an empty dictionary if no
        token at all was supervised.
    """
    was_training = model.training
    model.eval()
    names = loss_parts(model)
    totals = torch.zeros(3 + len(names), dtype=torch.float64)  # nats, tokens, bytes, parts of the loss
    pop_loss_parts(model)
    for batch in batches:
        loss_sum, n_tokens = model(**forward_inputs(model, batch, fabric.device))
        parts = pop_loss_parts(model)
        targets = batch.labels[batch.labels >= 0].numpy()
        # ids beyond the tokenizer's own (padding of the vocabulary, foreign data) stand for no text
        n_bytes = int(token_bytes[targets[targets < len(token_bytes)]].sum()) if token_bytes is not None else 0
        sums = [float(loss_sum), int(n_tokens), n_bytes, *(float(parts.get(name, math.nan)) for name in names)]
        totals += torch.tensor(sums, dtype=torch.float64)
    model.train(was_training)
    nats, tokens, n_bytes, *part_sums = ranks.sum_over_ranks(totals).tolist()
    if not tokens:
        return {}
    loss = nats / tokens
    metrics = {"val_loss": loss, "val_ppl": math.exp(min(loss, 700.0))}
    if n_bytes:
        metrics["val_bpb"] = nats / math.log(2) / n_bytes
    by_name = zip(names, part_sums, strict=True)  # nan: the model does not compute this part in validation
    return metrics | {f"val_{name}": part / tokens for name, part in by_name if not math.isnan(part)}
