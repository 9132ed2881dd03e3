"""Rows of user-provided iterables and DataLoaders.

Every rank iterates over all items of an iterable and keeps the rows at its positions. A DataLoader yields the batches
of one rank, and the rank keeps all rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
import torch.utils.data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from toolkit.data.base import Row, State, TokenDataset
from toolkit.data.tokens.rows import MAX_CHECKED_ROWS, hash_rows, read_row, require_shifted
from toolkit.errors import DataError, UserError

_RESUME_POINT_INTERVAL, _MAX_RESUME_POINTS = 100, 1000
"""Rows between resume points, and number of saved resume points. They cover more rows than a run prefetches."""


class IterableRows(TokenDataset):
    """Access to the rows of an iterable by increasing position, across epochs. Also the :class:`SampleOrder`.

    ``rows[p]`` advances to item p; positions must increase. The iterable must yield the same rows whenever an epoch
    restarts. The first rows and the row at the resume point are checked against saved hashes.

    ``first``: The first rows. ``rows[p]`` reads from them until :meth:`order` is called.
    ``key``: Hash of the first rows; unchanged on resume.
    ``note``: Log message on how a resumed run reached its position, or "".
    """

    what = "iterable of rows"
    epoch_rows: int | None = None
    """Rows per epoch over all ranks, if known."""

    def __init__(self, source: Any, max_length: int | None) -> None:
        self._source, self._max_length = source, max_length
        self._initial = self._source_state()
        self._one_shot: Iterator[Any] | None = None
        items = self._open(epoch=0)
        first = list(islice(items, MAX_CHECKED_ROWS))
        if not first:
            raise UserError("dataset: yields no rows")
        if items is source:
            self._one_shot = chain(first, items)
        self._is_open = False
        self.first = [self._to_row(item, position) for position, item in enumerate(first)]
        require_shifted(self.first, "dataset")
        self.key = hash_rows(self.first)
        self.lengths_checked = [len(row["input_ids"]) for row in self.first]
        self.is_ragged = len(set(self.lengths_checked)) > 1
        self.note = ""

    # ---- position to row

    def order(self, seed: int, state: State) -> IterableRows:
        """Seek to the resume point in ``state``, or to the beginning. ``seed`` is not used."""
        self._is_open, self.note = True, ""
        self._items: Iterator[Any] | None = None
        self._epoch, self._epoch_start = state.get("epoch", 0), state.get("epoch_start", 0)
        self._next = self._epoch_start
        self._resume_points: list[State] = []
        self._expected = {position: hash_rows([row]) for position, row in enumerate(self.first)}
        if state:
            self._expected[state["place"]] = state["hash"]
            if self._load(state):
                return self
            name, count = type(self._source).__name__, state["position"] - self._next
            self.note = self.note or f"{name} has no state_dict() to resume from"
            self.note += f": reads {count:,} rows again that were trained on"
        if self._initial is not None:
            self._source.load_state_dict(self._initial)  # undo reading the first rows
        return self

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions; the iterable defines the order."""
        return positions.astype(np.int64)

    def state(self, position: int) -> State:
        """Return the last resume point at or before ``position``, or {} if there is none."""
        points = (point for point in self._resume_points[::-1] if point["place"] <= position)
        point = next(points, {})
        return point | {"position": position} if point else {}

    def __getitem__(self, position: int) -> Row:
        if not self._is_open:
            return self.first[position]
        assert position >= self._next, f"row {position} was read before"
        while self._next < position:
            self._advance()
        return self._to_row(self._advance(), position)

    def _advance(self) -> Any:
        """Return the next item; record a resume point every ``_RESUME_POINT_INTERVAL`` rows."""
        position, epoch = self._next, self._epoch
        is_due = not self._resume_points or position - self._resume_points[-1]["place"] >= _RESUME_POINT_INTERVAL
        before = self._source_state() if is_due else None
        item = self._next_item()
        self._next += 1
        digest = hash_rows([self._to_row(item, position)]) if is_due or position in self._expected else ""
        if self._expected.get(position, digest) != digest:
            raise DataError(
                f"dataset: item {position:,} changed between reads; {type(self._source).__name__} must yield the same "
                "rows on every rank (toolkit splits them) and in every iteration; seed the shuffle, use "
                "set_epoch(epoch) (see python: data on several ranks)"
            )
        if is_due and epoch == self._epoch:  # otherwise the state belongs to the previous epoch
            point = {"epoch": epoch, "epoch_start": self._epoch_start, "place": position, "hash": digest}
            self._resume_points.append(point if before is None else point | {"state": before})
            del self._resume_points[:-_MAX_RESUME_POINTS]
        return item

    def _next_item(self) -> Any:
        if self._items is None:
            self._items = self._open(self._epoch)
        for item in self._items:
            return item
        self._epoch, self._epoch_start = self._epoch + 1, self._next
        self._items = self._open(self._epoch)
        for item in self._items:
            return item
        raise DataError(f"dataset: yields no rows in epoch {self._epoch}")

    # ---- the user's object

    def _open(self, epoch: int) -> Iterator[Any]:
        if self._one_shot is not None:
            if epoch:
                raise DataError(
                    f"dataset: has ended after {self._next:,} rows, and {type(self._source).__name__} cannot "
                    "restart; train for fewer steps, or pass an object whose __iter__ starts from the beginning "
                    "(see python: data on several ranks)"
                )
            return self._one_shot
        _set_epoch(epoch, self._source)
        return iter(self._source)

    def _source_state(self) -> State | None:
        """Return a JSON-serializable copy of the iterable's ``state_dict()``, or None."""
        if not (hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")):
            return None
        try:
            return json.loads(json.dumps(self._source.state_dict()))
        except (TypeError, ValueError):  # such as tensors
            return None

    def _load(self, state: State) -> bool:
        """Restore the iterable from ``state``. Return whether the next row matches the saved hash."""
        name = type(self._source).__name__
        if "state" not in state or self._initial is None:
            return False
        _set_epoch(self._epoch, self._source)
        self._source.load_state_dict(state["state"])
        items = iter(self._source)
        for item in items:
            if hash_rows([self._to_row(item, state["place"])]) == state["hash"]:
                self._items, self._next, self._resume_points = chain([item], items), state["place"], [state]
                return True
            break
        self.note = f"load_state_dict() of {name} did not restore its next row"
        return False

    def _to_row(self, item: Any, position: int) -> Row:
        try:
            return read_row(item, f"item {position} of dataset", self._max_length)
        except UserError as error:
            raise DataError(str(error)) if self._is_open else error from None

    # ---- the other ranks

    def rank_info(self) -> Any:
        """Return the value of this rank for :meth:`require_disjoint`."""
        return self.key

    def require_disjoint(self, infos: list[Any]) -> None:
        """Raise UserError if :meth:`rank_info` differs between ranks."""
        for rank, key in enumerate(infos):
            if key != infos[0]:
                raise UserError(
                    f"dataset {type(self._source).__name__}: yields other rows on rank {rank} than on rank 0; yield "
                    "the same rows on every rank; toolkit splits them"
                )


class DataLoaderRows(IterableRows):
    """The rows of this rank's torch DataLoader. ``rows[p]`` returns the next row.

    Args:
        source: A batch is ``(input_ids, labels)`` or a mapping with both, (B, T) each, a tensor (B, T + 1), or a list
            of rows. If its generator is None, a new one is set.
        allow_duplicates: Allow several ranks to have the same samples.
    """

    what = "DataLoader of rows"

    def __init__(self, source: DataLoader, max_length: int | None, allow_duplicates: bool) -> None:
        drawing = [part for part in (source, _sampler_of(source)) if hasattr(part, "generator")]
        for part in drawing:
            if part.generator is None:  # otherwise it draws from the global RNG of training
                part.generator = torch.Generator()
        self._generators = [(part.generator, part.generator.get_state()) for part in drawing]
        super().__init__(source, max_length)
        self._allow_duplicates, self._rank_infos = allow_duplicates, [self.rank_info()]
        self.key = "DataLoader"  # its rows depend on the rank; order() compares them

    def order(self, seed: int, state: State) -> DataLoaderRows:
        """Seek as in :meth:`IterableRows.order`, but by reading all rows of this rank again."""
        super().order(seed, {})
        for generator, state_before in self._generators:
            generator.set_state(state_before)
        now = self.state(state.get("position", 0))
        if (before := state.get("ranks", now["ranks"])) != now["ranks"]:
            raise UserError(
                f"dataset DataLoader: gives each rank different rows, and the run had {before} ranks, not "
                f"{now['ranks']}; resume on {before}, or begin a run with the dataset itself, which toolkit splits"
            )
        if state and state != now:
            raise UserError(
                "dataset DataLoader: yields different rows than before; pass a seed or a generator to its sampler"
            )
        self._row = now["position"] // now["ranks"]
        if self._row:
            self.note = f"DataLoader: reads {self._row:,} rows again that were trained on; {_RECOMMENDED}"
        return self

    def state(self, position: int) -> State:
        """Return the position, the number of ranks, and a hash of the first rows of all ranks."""
        first = hashlib.sha256("".join(key for key, *_ in self._rank_infos).encode()).hexdigest()
        return {"position": position, "ranks": len(self._rank_infos), "hash": first}

    def __getitem__(self, position: int) -> Row:
        if not self._is_open:
            return self.first[position]
        self._row += 1
        return super().__getitem__(self._row - 1)

    def _source_state(self) -> None:
        return None  # a state would be valid for one rank only

    def _open(self, epoch: int) -> Iterator[Any]:
        loader: DataLoader = self._source
        _set_epoch(epoch, loader.dataset, _sampler_of(loader))
        return chain.from_iterable(map(_rows_of, loader)) if loader.batch_sampler is not None else iter(loader)

    @property
    def epoch_rows(self) -> int | None:  # type: ignore[override]
        counts = {count for *_, count in self._rank_infos}
        count = counts.pop()
        return None if counts or count is None else count * len(self._rank_infos)

    def rank_info(self) -> tuple[str, tuple[int, int] | None, int | None]:
        """Return the hash of the first rows, the sampler's (rank, world size) or None, and rows per epoch or None."""
        loader: DataLoader = self._source
        key, sampler = hash_rows(self.first), _sampler_of(loader)
        is_map = not isinstance(loader.dataset, torch_data.IterableDataset)
        count, batches = None, cast(Any, loader.batch_sampler)
        if is_map and hasattr(sampler, "__len__") and type(batches) in (torch_data.BatchSampler, type(None)):
            count = len(sampler)
            count -= count % batches.batch_size if getattr(batches, "drop_last", False) else 0
        if isinstance(sampler, torch_data.DistributedSampler):
            return key, (sampler.rank, sampler.num_replicas), count
        draws_all = type(sampler) in (torch_data.SequentialSampler, torch_data.RandomSampler)
        return key, (0, 1) if draws_all and is_map else None, count

    def require_disjoint(self, infos: list[Any]) -> None:
        self._rank_infos, name = infos, f"dataset DataLoader over {type(self._source.dataset).__name__}"
        keys = [key for key, *_ in infos]
        for rank, (key, part, _) in enumerate(infos if len(infos) > 1 and not self._allow_duplicates else []):
            if part == (0, 1) or keys.count(key) > 1:
                raise UserError(
                    f"{name}: feeds the same samples to several ranks; pass the dataset itself, which toolkit "
                    "splits, use a DistributedSampler, or set allow_duplicate_data=True"
                )
            if part not in (None, (rank, len(infos))):
                raise UserError(
                    f"{name}: its DistributedSampler has rank {part[0]} of {part[1]} on rank {rank} of "
                    f"{len(infos)}; pass the dataset itself, which toolkit splits, or under torchrun "
                    "pass toolkit.get_world_size() and toolkit.get_rank() to the sampler"
                )


_RECOMMENDED = "pass the dataset itself to resume without reading rows again"


IN_ORDER = (
    "only for a dataset with len() and [index]; an iterable is read in its own order by the training process; "
    "remove num_workers (a DataLoader has its own)"
)


def iterable_rows(dataset: Any, max_length: int | None, allow_duplicates: bool = False) -> IterableRows:
    """Return the rows of an iterable, or of a DataLoader on each rank.

    Args:
        max_length: Truncate rows to this many input tokens; None keeps their length.
        allow_duplicates: Allow the DataLoaders of several ranks to yield the same samples.
    """
    if is_loader(dataset):
        return DataLoaderRows(dataset, max_length, allow_duplicates)
    return IterableRows(dataset, max_length)


def is_iterable(dataset: Any) -> bool:
    """Whether a dataset is iterable-style: an ``IterableDataset``, or an iterable without len() or ``[index]``."""
    has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and (isinstance(dataset, IterableDataset) or not has_index)


def is_loader(dataset: Any) -> bool:
    return isinstance(dataset, DataLoader)


def _sampler_of(loader: DataLoader) -> Any:
    """Return the sampler of a DataLoader, or the inner sampler of a custom batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _set_epoch(epoch: int, *parts: Any) -> None:
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _rows_of(batch: Any) -> Iterable[Any]:
    """Split a batch into rows, see :class:`DataLoaderRows`."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(getattr(part, "ndim", 1) == 2 for part in batch):
        return zip(*batch, strict=True)
    if isinstance(batch, Mapping):
        columns = {name: batch[name] for name in ("input_ids", "labels") if name in batch}
        if len(columns) < 2:
            return [batch]  # read_row raises the error
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return batch
