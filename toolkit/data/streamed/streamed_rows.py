"""The rows of a stream and their order.

Each epoch permutes the segments, and the rows within each segment. Both permutations are pure functions of seed and
epoch. The first epoch begins with segment 0, which is prepared first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from toolkit.data.base import Row, State, TokenDataset, next_token_row
from toolkit.data.order import shuffled_index
from toolkit.data.streamed.stream import CopyId, SegmentCounts
from toolkit.data.streamed.stream_reader import StreamReader
from toolkit.data.tokens.token_store import TokenStore
from toolkit.errors import DataError, join_first

ROW_BITS = 32  # a row id is segment << ROW_BITS | row
_OPEN_SEGMENTS = 4
_ATTEMPTS = 3  # to read a segment that other processes may evict
_AHEAD = 2  # segments to prepare ahead of need, plus one per tokenize worker


class SegmentRows:
    """Random access to the rows of segments. A row is a block of T + 1 tokens."""

    def __init__(self, reader: StreamReader, block_size: int) -> None:
        self.reader, self.block_size = reader, block_size
        self._open: dict[int, tuple[TokenStore, CopyId | None]] = {}

    def read(self, segment: int, row: int) -> Row:
        """Return a row, see :class:`toolkit.data.base.TokenDataset`. Prepare the segment again if it was evicted.

        Raises:
            DataError: The segment cannot be prepared, or a damaged copy cannot be removed.
        """
        start = row * self.block_size
        for _ in range(_ATTEMPTS):
            store, copy = self._store(segment)
            try:
                tokens = store.tokens(start, start + self.block_size)
                break
            except DataError as error:  # evicted or damaged after it was opened
                reason = error
                del self._open[segment]
                self.reader.stream.remove_damaged(segment, copy)
        else:
            raise reason
        return next_token_row(tokens)

    def _store(self, segment: int) -> tuple[TokenStore, CopyId | None]:
        if segment not in self._open:
            while (opened := self.reader.stream.open(segment)) is None:  # evicted: prepared again
                self.reader.wait(segment, [*self._open, segment], [])
            while len(self._open) >= _OPEN_SEGMENTS:
                del self._open[next(iter(self._open))]
            self._open[segment] = opened
        return self._open[segment]

    def __getstate__(self) -> State:
        return {**self.__dict__, "_open": {}}


class RowSpans(TokenDataset):
    """A fixed set of rows, such as the validation rows.

    Args:
        spans: (segment, first row, end row) of each span.
    """

    def __init__(self, segments: SegmentRows, spans: list[tuple[int, int, int]]) -> None:
        self.segments, self.spans = segments, spans
        self._ends = list(accumulate(stop - start for _, start, stop in spans))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        self.require_row(index)
        part = bisect.bisect_right(self._ends, index)
        segment, _, stop = self.spans[part]
        return self.segments.read(segment, stop - (self._ends[part] - index))


class StreamedRows(TokenDataset):
    """The training rows of a stream. ``len()`` does not work, as row ids have gaps.

    Args:
        first_segment: Number of the first segment with rows. ``rows[0]`` is row 0 of this segment.
        preview_rows: Number of training rows in this segment.
        held_out: {segment: number of validation rows at its end}.
        skips_broken: Whether to skip the rest of unreadable files instead of raising DataError.
        numbers: The segments to read; by default all.
        epoch_rows: Number of training rows, if known.

    Attributes:
        preview: The training rows of the first segment.
    """

    def __init__(
        self,
        segments: SegmentRows,
        first_segment: int,
        preview_rows: int,
        held_out: dict[int, int],
        skips_broken: bool = False,
        numbers: Sequence[int] | None = None,
        epoch_rows: int | None = None,
    ) -> None:
        self.segments, self.held_out, self.skips_broken = segments, held_out, skips_broken
        self.first_segment = first_segment
        self.numbers = range(len(segments.reader.stream.source.segments)) if numbers is None else numbers
        self.epoch_rows, self.preview = epoch_rows, RowSpans(segments, [(first_segment, 0, preview_rows)])

    def __getitem__(self, row_id: int) -> Row:
        segment, row = (row_id >> ROW_BITS, row_id & ((1 << ROW_BITS) - 1)) if row_id else (self.first_segment, 0)
        return self.segments.read(segment, row)

    def order(self, seed: int, state: State) -> StreamOrder:
        """Return the sample order, see :func:`toolkit.data.base.sample_order`."""
        return StreamOrder(self, seed, state)

    def count(self, segment: int, counts: SegmentCounts) -> int:
        """Return the number of training rows of a segment."""
        if counts.broken and not self.skips_broken:
            raise DataError(describe_broken(counts.broken))
        return counts.tokens // self.segments.block_size - self.held_out.get(segment, 0)


def describe_broken(broken: dict[str, str]) -> str:
    name, reason = next(iter(broken.items()))
    return f"{name}: {reason}; replace the file, or set --data.on_bad_shard skip"


class StreamOrder:
    """Sample order over segments, see :class:`toolkit.data.order.SampleOrder`. Preparing a segment gives its row count.

    Args:
        state: Resume point: ``epoch``, ``index`` in the epoch's permutation, start ``position`` of the segment, and its
            number of ``rows`` if reading has begun. {} at the start of a run.
    """

    def __init__(self, rows: StreamedRows, seed: int, state: State) -> None:
        self.rows, self.seed, self._reader = rows, seed, rows.segments.reader
        self._source = self._reader.stream.source
        # (epoch, index) and start position of the next segment
        self._next = (state.get("epoch", 0), state.get("index", 0)), state.get("position", 0)
        self._begun = self._next[0], state.get("rows")  # None if reading has not begun or the count was not saved
        # Of the segments reached so far: position of the first row; (epoch, index), number and row count (never 0).
        self._starts: list[int] = []
        self._reached: list[tuple[tuple[int, int], int, int]] = []
        self._broken: set[str] = set()

    def ids(self, positions: np.ndarray) -> np.ndarray:
        while positions.size and self._next[1] <= positions.max():
            self._extend()
        slots = np.searchsorted(self._starts, positions, side="right") - 1
        row_ids = np.empty_like(positions, dtype=np.int64)
        for slot in np.unique(slots):
            is_here, ((epoch, _), segment, n) = slots == slot, self._reached[slot]
            offsets = positions[is_here] - self._starts[slot]
            # A seed for each segment; the epoch selects one of its permutations.
            shuffled = shuffled_index(epoch * n + offsets, n, self.seed + (segment + 1) * 0x9E3779B97F4A7C15)
            row_ids[is_here] = (segment << ROW_BITS) | shuffled
        return row_ids

    def state(self, position: int) -> State:
        epoch_index, start = self._next
        rows = self._begun[1] if epoch_index == self._begun[0] else None
        if position < start:  # else nothing was read, or all segments up to here were consumed
            slot = bisect.bisect_right(self._starts, position) - 1
            (epoch_index, _, count), start = self._reached[slot], self._starts[slot]
            rows = count if position > start else None
        state = {"epoch": epoch_index[0], "index": epoch_index[1], "position": start}
        return state if rows is None else state | {"rows": rows}

    def _segment_at(self, epoch: int, index: int) -> int:
        n = len(self.rows.numbers)
        slot = int(shuffled_index(epoch * n + index, n, self.seed))
        if epoch == 0 and (index == 0 or slot == 0):  # swap segment 0 with the first one
            slot = 0 if index == 0 else int(shuffled_index(0, n, self.seed))
        return self.rows.numbers[slot]

    def _extend(self) -> None:
        """Wait for the next segment with rows, and append it to the order."""
        reader, n_segments = self._reader, len(self.rows.numbers)
        for _ in range(n_segments + 1):
            epoch_index, start = self._next
            epoch, index = epoch_index
            segment = self._segment_at(epoch, index)
            following = [
                divmod(epoch * n_segments + index + i, n_segments) for i in range(1, _AHEAD + reader.workers + 1)
            ]
            ahead = [number for number in dict.fromkeys(self._segment_at(*at) for at in following) if number != segment]
            # must not be evicted: this segment, the previous and the first with held-out rows
            held_out = list(self.rows.held_out)[:1]
            in_use = dict.fromkeys([segment, *(number for _, number, _ in self._reached[-1:]), *held_out])
            counts = reader.wait(segment, [*in_use], ahead)
            n_rows = self.rows.count(segment, counts)
            self._require_same_rows(epoch_index, segment, n_rows)
            self._report_broken(counts)
            if n_rows > 0:
                self._starts.append(start)
                self._reached.append((epoch_index, segment, n_rows))
            self._next = divmod(epoch * n_segments + index + 1, n_segments), start + max(0, n_rows)
            if n_rows > 0:
                return
        option = "no file of the data has a row that can be read"
        raise DataError(f"{option}; use other files, or a smaller --train.max_seq_length")

    def _require_same_rows(self, epoch_index: tuple[int, int], segment: int, n_rows: int) -> None:
        """Raise DataError if the resumed segment's row count has changed; the order would differ."""
        begun, saved = self._begun
        if epoch_index == begun and saved not in (None, n_rows):
            names = join_first(self._source.names(segment), 3)
            raise DataError(
                f"{names}: has {max(0, n_rows):,} rows now, but {saved:,} when the checkpoint was saved; restore the "
                "file as it was, or start a new run with another --out_dir"
            )

    def _report_broken(self, counts: SegmentCounts) -> None:
        for name in counts.broken.keys() - self._broken:
            self._broken.add(name)
            total = f"{len(self._broken):,} in total" if len(self._broken) > 1 else "the first one"
            self._reader.report(f"Data: skipped the rest of {name}: {counts.broken[name]} ({total})")
