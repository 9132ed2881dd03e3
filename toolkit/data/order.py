"""Sample order: map positions in the infinite sample stream to rows.

A dataset of known length is reshuffled each epoch. The permutation is computed on the fly, so seeking is free.

A permutation of n rows is a Feistel network over the smallest even-bit domain with at least n values. Cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002) takes under four steps on average.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class SampleOrder(Protocol):
    """Interface of a sample order, a map from stream positions to rows. Equal on all ranks (N3)."""

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the row indices at ``positions``, int64 of the same shape. Positions increase between calls.

        May block until data is prepared. The prefetch thread of the training process calls it. Workers never call it,
        and it is not called during validation.

        Raises:
            DataError: The data cannot be read.
        """

    def state(self, position: int) -> dict[str, Any]:
        """Return the JSON state to resume at ``position`` without reading earlier rows.

        The prefetch thread may run :meth:`ids` concurrently.
        """


@dataclass(frozen=True)
class ShuffledOrder:
    """Infinite epochs of ``n`` rows, reshuffled each epoch; see :func:`shuffled_index`."""

    n: int
    seed: int

    def ids(self, positions: np.ndarray) -> np.ndarray:
        return shuffled_index(positions, self.n, self.seed)

    def state(self, position: int) -> dict[str, Any]:
        return {}


_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash uint64 values with the splitmix64 finalizer (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: np.ndarray, key: np.ndarray, half_bits: int) -> np.ndarray:
    """Apply the Feistel network to ``2 * half_bits``-bit values. Bijective for every key."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for _ in range(_ROUNDS):
        key = key + _GOLDEN
        left, right = right, left ^ (_mix(key ^ _mix(right + _GOLDEN)) & mask)
    return (left << bits) | right


def shuffled_index(position: np.ndarray | int, n: int, seed: int) -> np.ndarray:
    """Return the row at ``position`` in the infinite stream of shuffled epochs.

    A pure function: position ``e * n + i`` is element i of epoch e's permutation.

    Args:
        position: Non-negative stream position(s). Returns int64 of the same shape.
        n: Rows per epoch.
        seed: Any integer.

    Raises:
        ValueError: ``n`` is less than 1.
    """
    if n < 1:
        raise ValueError(f"cannot shuffle {n} rows")
    positions = np.asarray(position, dtype=np.int64)
    flat = positions.reshape(-1)
    epoch, index = (flat // n).astype(np.uint64), (flat % n).astype(np.uint64)
    seed_key = _mix(np.array([seed % (1 << 64)], dtype=np.uint64) + _GOLDEN)
    key = _mix(seed_key + epoch * _GOLDEN)
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    row = _feistel(index, key, half_bits)
    while (outside := row >= n).any():
        row[outside] = _feistel(row[outside], key[outside], half_bits)
    return row.astype(np.int64).reshape(positions.shape)
