"""Sample the next token on the device of the logits, without synchronizing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import GuardError, require_option

MIN_TEMPERATURE = 1e-6  # below it sampling is greedy, and fp32 would overflow
NONFINITE = -1
"""Returned instead of a token id if the row's logits contain NaN or Inf."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Raises UserError for a value out of range.

    Args:
        temperature: Divides the logits; 0 is greedy.
        top_k: Sample from the k most likely tokens; 0 or None: all.
        top_p: Sample from the smallest set of most likely tokens whose probabilities, after temperature and top_k, sum
            to at least this (nucleus sampling, arXiv:1904.09751); 1: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        is_valid = 0 <= self.temperature < float("inf")
        require_option(is_valid, "temperature", self.temperature, "must not be negative; 0 is greedy")
        require_option((self.top_k or 0) >= 0, "top_k", self.top_k, "must not be negative; 0 disables it")
        require_option(0 < self.top_p <= 1, "top_p", self.top_p, "must be greater than 0 and at most 1; 1 disables it")


GREEDY = Sampling(temperature=0)


def draw_uniforms(seeds: Sequence[int | None], count: int) -> Tensor:
    """Return (B, count) fp64 uniform numbers in [0, 1) on the CPU. Row b depends only on seed b.

    ``count`` is the number of tokens. If a seed is None, torch's default generator draws it.
    """
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
        rows.append(torch.rand(count, dtype=torch.float64, generator=generator))
    return torch.stack(rows)


def sample(
    logits: Tensor, sampling: Sampling, *, vocab_size: int | None = None, uniform: Tensor | None = None
) -> Tensor:
    """Sample one token per row.

    Args:
        logits: (B, V), any floating-point dtype.
        sampling: How to choose the tokens.
        vocab_size: Size of the unpadded vocabulary. Padding ids are never sampled.
        uniform: (B,), random numbers in [0, 1) that select tokens by cumulative probability. Required unless greedy.

    Returns:
        Ids, (B,) int64; :data:`NONFINITE` where the logits of a row contain NaN or Inf.
    """
    logits = logits[:, :vocab_size].float()
    if sampling.temperature == 0:
        ids = logits.argmax(-1)
    else:
        assert uniform is not None
        ids = _sample(logits / max(sampling.temperature, MIN_TEMPERATURE), sampling.top_k, sampling.top_p, uniform)
    return torch.where(logits.sum(-1).isfinite(), ids, NONFINITE)  # one Inf or NaN makes the sum Inf or NaN


def _sample(logits: Tensor, top_k: int | None, top_p: float, uniform: Tensor) -> Tensor:
    """Return the token where the cumulative probability exceeds ``uniform`` times the total; (B, V), (B,) -> (B,)."""
    ids: Tensor | None = None  # ids[b, j] is the token of column j, most likely first; None: column j is token j
    if top_k:
        logits, ids = logits.topk(min(top_k, logits.size(-1)))
    elif top_p < 1:
        logits, ids = logits.sort(descending=True, stable=True)
    probabilities = torch.softmax(logits, dim=-1)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # the sum over all more likely tokens
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)  # always keeps the first
    # the last of many small probabilities would be lost in a sum in fp32; MPS has no fp64
    dtype = torch.float32 if logits.device.type == "mps" else torch.float64
    cumulative = probabilities.cumsum(-1, dtype=dtype)
    below_one = uniform.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)  # fp64 may be rounded to 1 in fp32
    threshold = below_one[:, None] * cumulative[:, -1:]
    column = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.size(-1) - 1)
    return (column if ids is None else ids.gather(-1, column)).squeeze(-1)


def require_finite(tokens: Sequence[int]) -> None:
    """Raise GuardError if the sampled tokens contain :data:`NONFINITE`."""
    if NONFINITE in tokens:
        raise GuardError("the logits are not finite; verify the checkpoint, or use a higher --precision")
