"""Sample packing: rows are composed once, before the first epoch."""

from __future__ import annotations

import bisect

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack samples by best-fit decreasing: longest first, each into the fullest row with enough room.

    Uses at most 11/9 of the optimal number of rows, plus a constant (Johnson, "Near-optimal bin packing algorithms",
    1973). A pure function of its arguments; ties keep their order.

    Args:
        lengths: (n,) input tokens of each sample, 1 to ``capacity``.
        capacity: Input tokens per row.

    Returns:
        Rows of sample indices in increasing order; the rows are ordered by their first sample.

    Raises:
        ValueError: A sample does not fit.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"samples of {lengths.min()} to {lengths.max()} tokens do not fit into {capacity}")
    rows: list[list[int]] = []
    rows_by_free: dict[int, list[int]] = {}  # free tokens -> rows
    free_sizes: list[int] = []  # the sorted keys of rows_by_free
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        i = bisect.bisect_left(free_sizes, length)
        if i == len(free_sizes):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free = free_sizes[i]
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                del rows_by_free[free], free_sizes[i]
        rows[row].append(sample)
        if left := free - length:
            if left not in rows_by_free:
                bisect.insort(free_sizes, left)
                rows_by_free[left] = []
            rows_by_free[left].append(row)
    return sorted(sorted(row) for row in rows)
