"""Several samples in one row: which go together is decided once, ahead of all epochs."""

from __future__ import annotations

import bisect

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack samples by best-fit decreasing: the longest first, each into the fullest row that still has room for it.

    At most 11/9 of the fewest rows possible, plus a few (Johnson, "Near-optimal bin packing algorithms", 1973). A pure
    function of its arguments; equal lengths are taken in their order.

    Args:
        lengths: (n,) input tokens of each sample, 1 to ``capacity``.
        capacity: Input tokens that fit into a row.

    Returns:
        Rows of sample numbers, in increasing order; the rows are ordered by their first.

    Raises:
        ValueError: if a sample does not fit.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"samples of {lengths.min()} to {lengths.max()} tokens do not fit into {capacity}")
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> rows
    rooms: list[int] = []  # the keys of with_room, sorted
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(sample)
        if left := room - length:
            if left not in with_room:
                bisect.insort(rooms, left)
                with_room[left] = []
            with_room[left].append(row)
    return sorted(sorted(row) for row in rows)
