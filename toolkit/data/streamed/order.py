"""The rows of a stream and their order.

In each epoch the units come in a permutation, and the rows of a unit, which fills memory maps and not memory, in a
permutation of their own: both are pure functions of seed and epoch. The first epoch begins with unit 0, which is
prepared first.
"""

from __future__ import annotations

import bisect
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.data.order import shuffled_index
from toolkit.data.streamed.reader import StreamReader
from toolkit.data.streamed.stream import Copy, UnitCounts
from toolkit.errors import DataError, join_first

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.data.tokens.store import TokenStore

ROW_BITS = 32  # a row id is unit << ROW_BITS | row
_OPEN_UNITS = 4
_ATTEMPTS = 3  # to read a unit that others evict
_AHEAD = 2  # units to prepare before they are needed, and one more for each preparer


class UnitRows:
    """Rows of prepared units: blocks of T + 1 tokens, read wherever they are."""

    def __init__(self, reader: StreamReader, block_size: int) -> None:
        self.reader, self.block_size = reader, block_size
        self._open: dict[int, tuple[TokenStore, Copy | None]] = {}

    def read(self, unit: int, row: int) -> dict[str, Tensor]:
        """Return a row, see :class:`toolkit.data.base.TokenDataset`; its unit is prepared again if it is not there.

        Raises:
            DataError: it cannot be prepared, or it is damaged and cannot be removed.
        """
        import torch

        start = row * self.block_size
        for _ in range(_ATTEMPTS):
            store, copy = self._store(unit)
            try:
                tokens = store.tokens(start, start + self.block_size)
                break
            except DataError as error:  # evicted or damaged after it was opened
                reason = error
                del self._open[unit]
                self.reader.stream.remove_damaged(unit, copy)
        else:
            raise reason
        block = torch.from_numpy(tokens.astype(np.int64))
        return {"input_ids": block[:-1], "labels": block[1:]}

    def _store(self, unit: int) -> tuple[TokenStore, Copy | None]:
        if unit not in self._open:
            stream = self.reader.stream
            copy = stream.copy_of(unit)  # before it is opened: a newer one is not taken for the one that failed
            while (store := stream.open(unit)) is None:  # evicted: prepared again
                self.reader.wait(unit, [*self._open, unit], [])
                copy = stream.copy_of(unit)
            while len(self._open) >= _OPEN_UNITS:
                del self._open[next(iter(self._open))]
            self._open[unit] = store, copy
        return self._open[unit]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


class RowSpans:
    """Rows of known number, such as those to validate on.

    Args:
        spans: Unit, first row and end row of each part.
    """

    def __init__(self, units: UnitRows, spans: list[tuple[int, int, int]]) -> None:
        self.units, self.spans = units, spans
        self._ends = list(accumulate(stop - start for _, start, stop in spans))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect.bisect_right(self._ends, index)
        unit, _, stop = self.spans[part]
        return self.units.read(unit, stop - (self._ends[part] - index))


class StreamedRows:
    """The training rows of a stream. Their number is unknown.

    Args:
        first: A unit with rows; ``rows[0]`` is its first one.
        n_first: Training rows of unit ``first``.
        held_out: Further rows at its end, which are not for training.
        skips_broken: Whether files that cannot be read are left out; else they are errors.

    Attributes:
        preview: The rows of unit ``first``.
    """

    def __init__(self, units: UnitRows, first: int, n_first: int, held_out: int, skips_broken: bool) -> None:
        self.units, self.first, self.held_out, self.skips_broken = units, first, held_out, skips_broken
        self.preview = RowSpans(units, [(first, 0, n_first)])

    def __getitem__(self, row_id: int) -> dict[str, Tensor]:
        unit, row = (row_id >> ROW_BITS, row_id & ((1 << ROW_BITS) - 1)) if row_id else (self.first, 0)
        return self.units.read(unit, row)

    def order(self, seed: int, state: dict[str, Any]) -> StreamOrder:
        """Return the order of a run, see :func:`toolkit.data.base.sample_order`."""
        return StreamOrder(self, seed, state)

    def count(self, unit: int, counts: UnitCounts) -> int:
        """Return the number of training rows of a unit."""
        if counts.broken and not self.skips_broken:
            raise DataError(describe_broken(counts.broken))
        return counts.tokens // self.units.block_size - (self.held_out if unit == self.first else 0)


def describe_broken(broken: dict[str, str]) -> str:
    """Return one line about the first of the broken files."""
    name, reason = next(iter(broken.items()))
    return f"{name}: {reason}; replace the file, or set --data.on_bad_shard skip"


class StreamOrder:
    """See :class:`toolkit.data.order.SampleOrder`. The row counts of units are known once they are prepared.

    Args:
        state: Epoch, index in its permutation, position where that unit starts, and the unit's rows if some of them
            were read; {} for the start of a run.
    """

    def __init__(self, rows: StreamedRows, seed: int, state: dict[str, Any]) -> None:
        self.rows, self.seed = rows, seed
        # Epoch and index of the next unit, and the position where it starts: all units before are in the lists below.
        self._next: tuple[tuple[int, int], int] = (
            (state.get("epoch", 0), state.get("index", 0)),
            state.get("position", 0),
        )
        self._begun = self._next[0], state.get("rows")  # None: it is not begun, or its rows were not saved
        # Units that were reached: the position of the first row, epoch and index, number, and rows (not 0).
        self._starts: list[int] = []
        self._places: list[tuple[int, int]] = []
        self._units: list[int] = []
        self._counts: list[int] = []
        self._broken: set[str] = set()

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """See :meth:`SampleOrder.ids`."""
        while positions.size and self._next[1] <= positions.max():
            self._extend()
        segments = np.searchsorted(self._starts, positions, side="right") - 1
        found = np.empty_like(positions, dtype=np.int64)
        for segment in np.unique(segments):
            is_here, unit, n = segments == segment, self._units[segment], self._counts[segment]
            epoch = self._places[segment][0]
            offsets = positions[is_here] - self._starts[segment]
            # A seed for each unit; the epoch selects one of its permutations.
            shuffled = shuffled_index(epoch * n + offsets, n, self.seed + (unit + 1) * 0x9E3779B97F4A7C15)
            found[is_here] = (unit << ROW_BITS) | shuffled
        return found

    def state(self, position: int) -> dict[str, Any]:
        """See :meth:`SampleOrder.state`."""
        place, start = self._next
        rows = self._begun[1] if place == self._begun[0] else None
        if position < start:  # else nothing was read, or all units up to here were consumed
            segment = bisect.bisect_right(self._starts, position) - 1
            place, start = self._places[segment], self._starts[segment]
            rows = self._counts[segment] if position > start else None
        state = {"epoch": place[0], "index": place[1], "position": start}
        return state if rows is None else state | {"rows": rows}

    def _unit(self, epoch: int, index: int) -> int:
        n = len(self.rows.units.reader.stream.source.units)
        unit = shuffled_index(epoch * n + index, n, self.seed)
        if epoch == 0 and (index == 0 or unit == 0):  # unit 0 changes places with the first one
            unit = 0 if index == 0 else shuffled_index(0, n, self.seed)
        return unit

    def _extend(self) -> None:
        """Wait for the next unit that has rows."""
        reader, n_units = self.rows.units.reader, len(self.rows.units.reader.stream.source.units)
        for _ in range(n_units + 1):
            place, start = self._next
            epoch, index = place
            unit = self._unit(epoch, index)
            following = [divmod(epoch * n_units + index + i, n_units) for i in range(1, _AHEAD + reader.workers + 1)]
            ahead = [number for number in dict.fromkeys(self._unit(*at) for at in following) if number != unit]
            counts = reader.wait(unit, self._kept(unit), ahead)
            n_rows = self.rows.count(unit, counts)
            self._require_same_rows(place, unit, n_rows)
            self._report_broken(counts)
            if n_rows > 0:
                self._starts.append(start)
                self._places.append(place)
                self._units.append(unit)
                self._counts.append(n_rows)
            self._next = divmod(epoch * n_units + index + 1, n_units), start + max(0, n_rows)
            if n_rows > 0:
                return
        option = "no file of the data has a row that can be read"
        raise DataError(f"{option}; give other files, or a smaller --train.max_seq_length")

    def _require_same_rows(self, place: tuple[int, int], unit: int, n_rows: int) -> None:
        """Refuse to go on within a unit that has another number of rows now, which are in another order."""
        begun, saved = self._begun
        if place == begun and saved not in (None, n_rows):
            source = self.rows.units.reader.stream.source
            names = join_first([source.files[part.file].name for part in source.units[unit]], 3)
            raise DataError(
                f"{names}: has {max(0, n_rows):,} rows here, but {saved:,} when the checkpoint was saved; restore the "
                "file as it was, or start a new run with another --out_dir"
            )

    def _kept(self, unit: int) -> list[int]:
        """Return the units not to evict: this one, those of the batches read ahead, and that of the held-out rows."""
        held_out = [self.rows.first] if self.rows.held_out else []
        return list(dict.fromkeys([unit, *self._units[-1:], *held_out]))

    def _report_broken(self, counts: UnitCounts) -> None:
        for name in counts.broken.keys() - self._broken:
            self._broken.add(name)
            total = f"{len(self._broken):,} in total" if len(self._broken) > 1 else "the first one"
            self.rows.units.reader.report(f"Data: skipped the rest of {name}: {counts.broken[name]} ({total})")
