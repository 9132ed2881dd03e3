"""Sampling of the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.errors import GuardError, require_option

MIN_TEMPERATURE = 1e-6  # below it sampling is greedy, and fp32 would overflow


def check_sampling(temperature: float, top_k: int | None, top_p: float) -> None:
    """Raise UserError for settings out of range."""
    in_range = 0 <= temperature < float("inf")
    require_option(in_range, "temperature", temperature, "must not be negative; 0 is greedy")
    require_option(top_k is None or top_k >= 0, "top_k", top_k, "must not be negative; 0 disables it")
    require_option(0 < top_p <= 1, "top_p", top_p, "must be greater than 0 and at most 1; 1 disables it")


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one token per row.

    Args:
        logits: (B, V), of any floating dtype.
        temperature: Divides the logits; 0 is greedy.
        top_k: Sample from the k most likely tokens; 0 or None: all.
        top_p: Sample from the smallest set of most likely tokens whose probabilities, after temperature and top_k, sum
            to at least this (nucleus sampling, arXiv:1904.09751); 1: all.
        vocab_size: Ids from this on are vocabulary padding and never sampled.
        generator: Generator on the device of the logits.

    Returns:
        Ids, (B,) int64.

    Raises:
        UserError: A setting is out of range.
        GuardError: The logits contain NaN or Inf.
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits[:, :vocab_size].float()
    if not torch.isfinite(logits).all():
        raise GuardError("the model's logits are not finite: its weights are damaged, or the precision is too low")
    if temperature == 0:
        return logits.argmax(-1)
    # most likely first; ids[b, j] is the token of column j
    count = min(top_k, logits.size(-1)) if top_k else logits.size(-1)
    logits, ids = logits.topk(count) if top_k else logits.sort(descending=True, stable=True)
    probabilities = torch.softmax(logits / max(temperature, MIN_TEMPERATURE), dim=-1)
    before = probabilities.cumsum(-1) - probabilities  # the sum over all more likely tokens
    if top_p < 1:
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)  # always keeps the first
    sampled = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, sampled).squeeze(-1)
