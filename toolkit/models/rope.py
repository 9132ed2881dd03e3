"""Rotary position embedding (Su et al. 2021), in halves as Hugging Face and LitGPT pair the elements.

Element i of a head is rotated together with element i + n/2, n being the number of rotated elements; what lies beyond
n passes through. Angles, cosines and sines are fp32 whatever the precision of the model: they are never buffers, so
``.to(bf16)``, the meta device and FSDP leave them alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.models.config import ModelConfig
from toolkit.models.labels import IGNORE_INDEX


def inverse_frequencies(config: ModelConfig, is_long: bool = False, local: bool = False) -> torch.Tensor:
    """Radians per position of each pair of elements: (rope_n_elem / 2,), fp32, on the CPU.

    Args:
        config: The architecture.
        is_long: Those of longrope for sequences longer than the original context.
        local: Those of the layers with rope index 1, which are not scaled.
    """
    n, base = config.rope_n_elem, config.rope_local_base_freq if local else config.rope_base
    inverse = 1.0 / (base ** (torch.arange(0, n, 2, dtype=torch.float32, device="cpu") / n))
    kind, adjustments = config.rope_kind, config.rope_adjustments
    if local or kind is None:
        return inverse
    if kind == "linear":
        return inverse / adjustments["factor"]
    if kind == "longrope":
        factors = adjustments["long_factor" if is_long else "short_factor"]
        return inverse / torch.tensor(factors, dtype=torch.float32, device="cpu")
    return _yarn_scaling(inverse, adjustments, base) if kind == "yarn" else _llama3_scaling(inverse, adjustments)


def document_lengths(
    input_ids: torch.Tensor, documents: torch.Tensor | None, labels: torch.Tensor | None
) -> torch.Tensor:
    """How many tokens the document of each token has, (B, T) int64.

    With labels those up to the document's last supervised one: what comes after it changes no loss, and padding must
    not make a row longer, or the loss would depend on which rows are computed together (N2).

    Args:
        input_ids: (B, T).
        documents: (B, T), which of the documents packed into a row each token belongs to; a row is one when not given.
        labels: (B, T), with -100 where nothing is supervised.
    """
    at = torch.arange(input_ids.size(1), device=input_ids.device).expand_as(input_ids)
    documents = torch.zeros_like(at) if documents is None else documents % input_ids.size(1)  # padding, -1, as the last
    ends = at + 1 if labels is None else (at + 1) * (labels != IGNORE_INDEX)
    last = torch.zeros_like(at).scatter_reduce(1, documents, ends, "amax")
    first = torch.full_like(at, input_ids.size(1)).scatter_reduce(1, documents, at, "amin")
    return (last - first).clamp(min=0).gather(1, documents)


def attention_factor(config: ModelConfig, local: bool = False) -> float:
    """What cosines and sines are multiplied by, which sharpens attention over long contexts (YaRN and longrope)."""
    adjustments = config.rope_adjustments
    if local or config.rope_kind not in ("yarn", "longrope"):
        return 1.0
    if (given := adjustments.get("attention_factor")) is not None:
        return given
    factor, mscale, of_all = (adjustments.get(name) for name in ("factor", "mscale", "mscale_all_dim"))
    return _mscale(factor, mscale) / _mscale(factor, of_all) if mscale and of_all else _mscale(factor, 1.0)


def _mscale(factor: float, share: float) -> float:
    """Peng et al. 2023, equation 22, with DeepSeek's share of it."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_scaling(inverse: torch.Tensor, adjustments: dict[str, Any], base: float) -> torch.Tensor:
    """Stretch the wavelengths that turn less than beta_slow times within the original context by ``factor``, keep
    those that turn more than beta_fast times, blend in between.

    Source: Peng et al. 2023 (YaRN), section 3.2; the borders are rounded outwards to whole elements unless
    ``truncate`` is false.
    """
    n = 2 * inverse.numel()

    def element(turns: float) -> float:
        return n * math.log(adjustments["original_max_seq_len"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = element(adjustments["beta_fast"]), element(adjustments["beta_slow"])
    if adjustments.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    steps = torch.arange(n // 2, dtype=torch.float32, device="cpu")
    stretch = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * inverse / adjustments["factor"] + (1 - stretch) * inverse


def _llama3_scaling(inverse: torch.Tensor, adjustments: dict[str, float]) -> torch.Tensor:
    """Stretch the long wavelengths by ``factor``, keep the short ones, blend in between (Llama 3.1).

    Source: ``apply_scaling`` in meta-llama/llama-models, models/llama3/model.py.
    """
    low, high = adjustments["low_freq_factor"], adjustments["high_freq_factor"]
    turns = adjustments["original_max_seq_len"] * inverse / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inverse / adjustments["factor"] + keep * inverse


class RotaryEmbedding:
    """Rotates queries and keys by their positions; made once per forward pass and shared by the blocks.

    A plain object and not a pair of tensors: FSDP casts every floating-point tensor among a block's arguments to the
    parameters' dtype (FSDP1 looks into dataclasses, too), and cosines of 8 bits blur the positions.

    Args:
        positions: (T,) or (B, T), int64.
        inverse: What :func:`inverse_frequencies` returns, on the device of the positions; or (B, T, rope_n_elem / 2).
        attention_factor: What :func:`attention_factor` returns.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, positions: torch.Tensor, inverse: torch.Tensor, attention_factor: float = 1.0) -> None:
        angles = (positions[..., None].float() * inverse).unsqueeze(-2)  # (..., T, 1, n/2), the 1 for the heads
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate x: (B, T, heads, head_size), any dtype; the same comes back."""
        n = self.cos.size(-1)
        rotated = x[..., :n].float()
        # rolled by half, (a, b) is (b, a): a cos - b sin, b cos + a sin, without cutting the halves apart
        rotated = (rotated * self.cos + rotated.roll(n // 2, dims=-1) * self.sin).to(x.dtype)
        return rotated if n == x.size(-1) else torch.cat((rotated, x[..., n:]), dim=-1)
