"""Sample order: which row stands at each position of the endless stream of samples that a run reads.

A dataset of known length has one permutation per epoch. It is computed and never stored; seeking is free.

A permutation of n rows is a Feistel network over the smallest even-bit domain of at least n values, with cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: under four steps on average).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np


class SampleOrder(Protocol):
    """The row at each position of the stream, the same on all ranks (N3)."""

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the row indices at ``positions``, int64 of their shape; positions increase from call to call.

        It may wait for data that is being prepared. A prefetching thread of the training process calls it, never a
        worker, and not while the run reads held-out rows.

        Raises:
            DataError: The data cannot be read.
        """

    def state(self, position: int) -> dict[str, Any]:
        """Return the state from which a run can resume at ``position`` without reading earlier rows (JSON).

        A prefetching thread may be in :meth:`ids` at the same time.
        """


@dataclass(frozen=True)
class ShuffledOrder:
    """Endless epochs of ``n`` rows, each with its own permutation; see :func:`shuffled_index`."""

    n: int
    seed: int

    def ids(self, positions: np.ndarray) -> np.ndarray:
        return shuffled_index(positions, self.n, self.seed)

    def state(self, position: int) -> dict[str, Any]:
        return {}


_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 values (the finalizer of splitmix64: Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: np.ndarray, key: np.ndarray, half_bits: int) -> np.ndarray:
    """Apply the network to values of ``2 * half_bits`` bits; a bijection for every key."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> bits, x & mask
    for _ in range(_ROUNDS):
        key = key + _GOLDEN
        left, right = right, left ^ (_mix(key ^ _mix(right + _GOLDEN)) & mask)
    return (left << bits) | right


@overload
def shuffled_index(position: int, n: int, seed: int) -> int: ...


@overload
def shuffled_index(position: np.ndarray, n: int, seed: int) -> np.ndarray: ...


def shuffled_index(position: np.ndarray | int, n: int, seed: int) -> np.ndarray | int:
    """Return the row at ``position`` of the endless stream of shuffled epochs.

    A pure function of its arguments: position ``e * n + i`` is element i of the permutation of epoch e.

    Args:
        position: Non-negative position(s) in the stream; an int returns an int, an array an int64 array of its shape.
        n: Rows in an epoch.
        seed: Any integer.

    Raises:
        ValueError: There are no rows.
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
    row = row.astype(np.int64)
    return int(row[0]) if positions.ndim == 0 else row.reshape(positions.shape)
