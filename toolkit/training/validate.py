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


@torch.no_grad()
def validate(
    fabric: Fabric, model: nn.Module, batches: Iterable[Batch], token_bytes: np.ndarray | None
) -> dict[str, float]:
    """Return the loss (nats per token), the perplexity, and bits per byte where the tokenizer is known.

    Args:
        batches: The same number on every rank; a batch may hold no supervised token.
        token_bytes: UTF-8 bytes that each token stands for, (vocabulary,).

    Returns:
        val_loss, val_ppl and val_bpb; an empty dictionary if no token at all was supervised.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    for batch in batches:
        loss_sum, n_tokens = model(**batch.inputs(fabric.device))
        targets = batch.labels[batch.labels >= 0].numpy()
        # ids beyond the tokenizer's own (padding of the vocabulary, foreign data) stand for no text
        n_bytes = int(token_bytes[targets[targets < len(token_bytes)]].sum()) if token_bytes is not None else 0
        totals += torch.tensor([float(loss_sum), int(n_tokens), n_bytes], dtype=torch.float64)
    model.train(was_training)
    nats, tokens, n_bytes = ranks.sum_over_ranks(totals).tolist()
    if not tokens:
        return {}
    loss = nats / tokens
    metrics = {"val_loss": loss, "val_ppl": math.exp(min(loss, 700.0))}
    if n_bytes:
        metrics["val_bpb"] = nats / math.log(2) / n_bytes
    return metrics
