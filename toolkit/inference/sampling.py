"""The choice of the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.errors import GuardError, UserError

SMALLEST_TEMPERATURE = 1e-6  # below it all the probability is on one token anyway, and fp32 would overflow


def check_sampling(temperature: float, top_k: int | None, top_p: float) -> None:
    """Raise UserError for settings that mean nothing."""
    if not 0 <= temperature < float("inf"):
        raise UserError(f"--temperature {temperature}: must not be negative; 0 always takes the likeliest token")
    if top_k is not None and top_k < 0:
        raise UserError(f"--top_k {top_k}: must not be negative; 0 switches it off")
    if not 0 < top_p <= 1:
        raise UserError(f"--top_p {top_p}: must be greater than 0 and at most 1; 1 switches it off")


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row.

    Args:
        logits: (B, V), of any floating dtype.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw among so many of the likeliest tokens; 0 or None: all.
        top_p: Draw among the fewest likeliest tokens whose probabilities, at this temperature and after top_k, reach
            this sum (nucleus sampling, arXiv:1904.09751); 1: all.
        vocab_size: Tokens from this id on are padding of the vocabulary and never drawn.
        generator: On the device of the logits.

    Returns:
        Ids, (B,) int64.

    Raises:
        UserError: a setting is out of its range.
        GuardError: the logits are not finite.
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits[:, :vocab_size].float()
    if not torch.isfinite(logits).all():
        raise GuardError("the model's logits are not finite: its weights are damaged, or the precision is too low")
    if temperature == 0:
        return logits.argmax(-1)
    # likeliest first; ids[b, j] is the token of column j
    count = min(top_k, logits.size(-1)) if top_k else logits.size(-1)
    logits, ids = logits.topk(count) if top_k else logits.sort(descending=True, stable=True)
    probabilities = torch.softmax(logits / max(temperature, SMALLEST_TEMPERATURE), dim=-1)
    before = probabilities.cumsum(-1) - probabilities  # the sum of all likelier tokens
    if top_p < 1:
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)  # the first has 0 before it: one always stays
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, drawn).squeeze(-1)
