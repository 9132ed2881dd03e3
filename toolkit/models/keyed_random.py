"""Random numbers that are a function of (seed, stream, row, position): the same on any device, for any split of a batch
into micro-batches and ranks, and after a resume."""

import torch
from torch import Tensor

DROPOUT = 2
"""Stream of the dropout of adapters. Extensions may use 0 and 1."""

# As signed 64-bit integers: the golden ratio, and the multipliers of splitmix64's finalizer (Steele, Lea, Flood 2014).
_GOLDEN, _FIRST, _SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class DropoutBits:
    """Where the layers of a block find the random bits of their tokens; None: torch's generator decides."""

    tokens: Tensor | None = None  # (B, T) int64


def token_bits(seed: int, stream: int, keys: Tensor, positions: Tensor) -> Tensor:
    """Return 64 random bits per token, (B, T) int64, for row keys (B,) int64 and positions in the row (T,) int64."""
    state = _mix(torch.full_like(keys, seed % (1 << 62)) * 2 + stream + _GOLDEN)
    return derive(derive(state, keys)[:, None], positions)


def derive(bits: Tensor, index: Tensor | int) -> Tensor:
    """Return other random bits for each index."""
    return _mix(bits + (torch.as_tensor(index) + 1) * _GOLDEN)


def uniform(bits: Tensor, n: int) -> Tensor:
    """Return n numbers in [0, 1) for each token, (B, T, n) fp32."""
    return _shift(derive(bits[..., None], torch.arange(n, device=bits.device)), 40).to(torch.float32) * 2.0**-24


def keyed_dropout(x: Tensor, bits: Tensor, layer: int, p: float) -> Tensor:
    """Zero elements of x, (..., n), with probability p, and scale the others by 1 / (1 - p).

    A hash of 32 bits per element: it costs about as much as ``F.dropout`` and is fused where blocks are compiled.

    Args:
        bits: One per token, int64.
        layer: Number of the layer; each drops other elements of the same tokens.
    """
    channels = torch.arange(x.size(-1), dtype=torch.int32, device=x.device) * 0x3C6EF372
    channels = channels + (layer * 0x2545F491 & 0x7FFFFFFF)
    tokens = (bits >> 32).to(torch.int32).reshape(*x.shape[:-1], 1)
    mixed = tokens ^ channels
    mixed *= 0x7FEB352D  # the finalizer "lowbias32" without its last step, which changes low bits
    mixed ^= (mixed >> 15).bitwise_and_(0x1FFFF)
    mixed *= -0x7B935975
    return torch.where(mixed >= int(p * 2**32) - 2**31, x * (1 / (1 - p)), 0.0)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)
