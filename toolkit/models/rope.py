"""Rotary position embedding (Su et al. 2021), in halves as Hugging Face and LitGPT pair the elements.

Element i of a head is rotated together with element i + n/2, n being the number of rotated elements; what lies beyond
n passes through. Angles, cosines and sines are fp32 whatever the precision of the model: they are never buffers, so
``.to(bf16)``, the meta device and FSDP leave them alone.
"""

from __future__ import annotations

import math

import torch

from toolkit.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair of elements: (rope_n_elem / 2,), fp32, on the CPU."""
    n = config.rope_n_elem
    inverse = 1.0 / (config.rope_base ** (torch.arange(0, n, 2, dtype=torch.float32, device="cpu") / n))
    return inverse if config.rope_adjustments is None else _llama3_scaling(inverse, config.rope_adjustments)


def _llama3_scaling(inverse: torch.Tensor, adjustments: dict[str, float]) -> torch.Tensor:
    """Stretch the long wavelengths by ``factor``, keep the short ones, blend in between (Llama 3.1).

    Source: ``apply_scaling`` in meta-llama/llama-models, models/llama3/model.py.
    """
    low, high = adjustments["low_freq_factor"], adjustments["high_freq_factor"]
    turns = adjustments["original_max_seq_len"] * inverse / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inverse / adjustments["factor"] + keep * inverse


class Rotation:
    """Rotates queries and keys by their positions; made once per forward pass and shared by the blocks.

    A plain object and not a pair of tensors: FSDP casts every floating-point tensor among a block's arguments to the
    parameters' dtype (FSDP1 looks into dataclasses, too), and cosines of 8 bits blur the positions.

    Args:
        positions: (T,) or (B, T), int64.
        inverse: What :func:`inverse_frequencies` returns, on the device of the positions.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, positions: torch.Tensor, inverse: torch.Tensor) -> None:
        angles = (positions[..., None].float() * inverse).unsqueeze(-2)  # (..., T, 1, n/2), the 1 for the heads
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate x: (B, T, heads, head_size), any dtype; the same comes back."""
        n = self.cos.size(-1)
        rotated = x[..., :n].float()
        # rolled by half, (a, b) is (b, a): a cos - b sin, b cos + a sin, without cutting the halves apart
        rotated = (rotated * self.cos + rotated.roll(n // 2, dims=-1) * self.sin).to(x.dtype)
        return rotated if n == x.size(-1) else torch.cat((rotated, x[..., n:]), dim=-1)
