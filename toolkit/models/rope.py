"""Rotary position embedding (RoPE, Su et al. 2021), with the half-split pairing of Hugging Face and LitGPT.

Dimension i of a head is rotated together with dimension i + n/2, where n is the number of rotated dimensions; the
remaining dimensions are unchanged. Angles, cosines and sines are fp32 for any model dtype. They are not buffers, so
``.to(bf16)``, the meta device and FSDP do not change them.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.models.config import ModelConfig
from toolkit.models.config_checks import yarn_mscale
from toolkit.models.labels import IGNORE_INDEX


def inverse_frequencies(config: ModelConfig, is_long: bool = False, local: bool = False) -> Tensor:
    """Return the inverse frequencies in radians per position, (rope_n_elem / 2,), fp32, on the CPU.

    ``is_long`` uses longrope's factors for sequences longer than the original context. ``local`` returns the unscaled
    frequencies of layers with rope index 1.
    """
    n, base = config.rope_n_elem, (config.rope_local_base_freq if local else None) or config.rope_base
    inverse = 1.0 / (base ** (torch.arange(0, n, 2, dtype=torch.float32, device="cpu") / n))
    kind, adjustments = config.rope_kind, config.rope_adjustments or {}
    if local or kind is None:
        return inverse
    if kind == "linear":
        return inverse / adjustments["factor"]
    if kind == "proportional":  # the others are zero: their angle is zero at every position
        rotated = int(adjustments["partial_rotary_factor"] * n // 2)
        return F.pad(inverse[:rotated], (0, n // 2 - rotated)) / adjustments.get("factor", 1.0)
    if kind == "longrope":
        factors = adjustments["long_factor" if is_long else "short_factor"]
        return inverse / torch.tensor(factors, dtype=torch.float32, device="cpu")
    return _yarn_scaling(inverse, adjustments, base) if kind == "yarn" else _llama3_scaling(inverse, adjustments)


def document_lengths(input_ids: Tensor, documents: Tensor | None, labels: Tensor | None) -> Tensor:
    """Return each token's document length, (B, T) int64.

    Without ``documents`` (B, T), each row is one document. With labels (B, T), a document ends at its last supervised
    token. Later tokens do not affect the loss, and counting padding would make it depend on the batch (N2).
    """
    at = torch.arange(input_ids.size(1), device=input_ids.device).expand_as(input_ids)
    # padding, -1, becomes the last document
    documents = torch.zeros_like(at) if documents is None else documents % input_ids.size(1)
    ends = at + 1 if labels is None else (at + 1) * (labels != IGNORE_INDEX)
    last = torch.zeros_like(at).scatter_reduce(1, documents, ends, "amax")
    first = torch.full_like(at, input_ids.size(1)).scatter_reduce(1, documents, at, "amin")
    return (last - first).clamp(min=0).gather(1, documents)


def attention_factor(config: ModelConfig, local: bool = False) -> float:
    """Return the factor for cosines and sines that sharpens attention over long contexts (YaRN and longrope)."""
    adjustments = config.rope_adjustments or {}
    if local or config.rope_kind not in ("yarn", "longrope"):
        return 1.0
    if (value := adjustments.get("attention_factor")) is not None:
        return value
    factor, mscale, mscale_all_dim = adjustments["factor"], adjustments.get("mscale"), adjustments.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def query_scale(config: ModelConfig, positions: Tensor) -> Tensor | None:
    """Return the factors of the queries at ``positions``, (..., T, 1, 1), fp32; None without query_scaling_beta.

    Source: Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence), as in transformers' Ministral 3.
    """
    if config.query_scaling_beta is None or config.rope_adjustments is None:
        return None
    extensions = torch.floor(positions / config.rope_adjustments["original_max_seq_len"])
    return (1 + config.query_scaling_beta * torch.log(1 + extensions))[..., None, None]


def _yarn_scaling(inverse: Tensor, adjustments: dict[str, Any], base: float) -> Tensor:
    """Apply YaRN scaling.

    Wavelengths with fewer than beta_slow rotations in the original context are scaled by ``factor``. Those with more
    than beta_fast rotations do not change. Frequencies in between are interpolated.

    Source: Peng et al. 2023 (YaRN), section 3.2; The bounds are rounded outward to integers unless ``truncate`` is
    false.
    """
    n = 2 * inverse.numel()

    def dimension(rotations: float) -> float:
        return n * math.log(adjustments["original_max_seq_len"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(adjustments["beta_fast"]), dimension(adjustments["beta_slow"])
    if adjustments.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    steps = torch.arange(n // 2, dtype=torch.float32, device="cpu")
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return ramp * inverse / adjustments["factor"] + (1 - ramp) * inverse


def _llama3_scaling(inverse: Tensor, adjustments: dict[str, float]) -> Tensor:
    """Scale long wavelengths by ``factor``, keep short ones and interpolate in between (Llama 3.1).

    Source: ``apply_scaling`` in meta-llama/llama-models, models/llama3/model.py.
    """
    low, high = adjustments["low_freq_factor"], adjustments["high_freq_factor"]
    rotations = adjustments["original_max_seq_len"] * inverse / (2 * math.pi)  # within the original context
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inverse / adjustments["factor"] + keep * inverse


class RotaryEmbedding:
    """Rotates queries and keys by position. Created once per forward pass and shared by all blocks.

    Not a tuple or dataclass of tensors: FSDP casts every floating-point tensor among a block's arguments to the
    parameters' dtype, and bf16 cosines cannot resolve positions.

    Args:
        positions: (T,) or (B, T), int64.
        inverse: Result of :func:`inverse_frequencies`, on the device of the positions; or (B, T, rope_n_elem / 2).
        attention_factor: Result of :func:`attention_factor`.
        query_scale: Result of :func:`query_scale`.
    """

    __slots__ = ("cos", "query_scale", "sin")

    def __init__(
        self,
        positions: Tensor,
        inverse: Tensor,
        attention_factor: float = 1.0,
        query_scale: Tensor | None = None,
    ) -> None:
        self.query_scale = query_scale
        angles = (positions[..., None].float() * inverse).unsqueeze(-2)  # (..., T, 1, n/2), broadcast over heads
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self.cos = torch.cat((cos, cos), dim=-1)
        self.sin = torch.cat((-sin, sin), dim=-1)

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x, (B, T, heads, head_size). Shape and dtype do not change."""
        n = self.cos.size(-1)
        if n < x.size(-1):
            first, rest = x.split((n, x.size(-1) - n), dim=-1)  # its gradient is one copy, of two slices five
            return torch.cat((self.apply(first), rest), dim=-1)
        y = x.float()
        # rolling by half swaps the halves, (a, b) -> (b, a): a cos - b sin, b cos + a sin, without splitting
        return (y * self.cos + y.roll(n // 2, dims=-1) * self.sin).to(x.dtype)


class RotaryFrequencies:
    """The frequencies of a model, computed once per device, and its rotary embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._cache: dict[tuple, Tensor] = {}

    def embeddings(self, positions: Tensor, lengths: Tensor | int) -> dict[int, RotaryEmbedding]:
        """Return the rotary embedding for each rope index in use, except -1 (no RoPE); none with learned positions.

        Args:
            positions: (T,) or (B, T), int64.
            lengths: Lengths of the sequences in tokens, which determine the factors of longrope; (B, T) or one for all.
        """
        config = self._config
        if config.position_embedding == "learned":
            return {}
        is_long = config.original_max_position is not None and lengths > config.original_max_position
        return {
            index: RotaryEmbedding(
                positions,
                self._frequencies(positions.device, index == 1, is_long),
                attention_factor(config, local=index == 1),
                query_scale(config, positions),
            )
            for index in {config.rope_index(layer) for layer in range(config.n_layer)} - {-1}
        }

    def _frequencies(self, device: torch.device, local: bool, is_long: Tensor | bool) -> Tensor:
        """Return :func:`inverse_frequencies`, (..., rope_n_elem / 2), in the shape of ``is_long``."""
        if isinstance(is_long, Tensor):
            short, long = (self._frequencies(device, local, which) for which in (False, True))
            return torch.where(is_long.unsqueeze(-1), long, short)
        key = (device, local, is_long)
        if key not in self._cache:
            layer = next(i for i in range(self._config.n_layer) if self._config.rope_index(i) == local)
            inverse = inverse_frequencies(self._config.layer(layer), is_long, local).to(device)
            if type(inverse) is not Tensor:  # do not cache a FakeTensor beyond its mode
                return inverse
            self._cache[key] = inverse
        return self._cache[key]
