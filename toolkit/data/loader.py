"""Rows to batches. The rows of a rank in a step are a pure function of (seed, step, rank): a run resumes at any step,
on any number of ranks, without replaying earlier steps."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count as count_from
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from toolkit.data.base import TokenDataset, row_count, row_lengths, rows_of
from toolkit.data.order import SampleOrder
from toolkit.errors import DataError
from toolkit.models.attention_kernels import DocumentBounds, document_bounds
from toolkit.models.labels import IGNORE_INDEX, TOKENS

FILLER = -1  # row index of a filler row, which only completes a batch
PAD_MULTIPLE = 64  # tokens
Count = Callable[["Batch"], dict[str, int]]


class Padding(NamedTuple):
    """How to pad a micro-batch to the length of its longest row.

    Args:
        multiple: Round the length up to a multiple of this.
        limit: The maximum of the rounded length, the model's context length.
        token: The input token of padding and filler rows.
    """

    multiple: int = 1
    limit: int | None = None
    token: int = 0

    def width(self, longest: int) -> int:
        rounded = -(-longest // self.multiple) * self.multiple
        return max(longest, rounded if self.limit is None else min(rounded, self.limit))


NO_ROUNDING = Padding()


def choose_padding(device_type: str, is_ragged: bool, limit: int | None) -> Padding:
    """Round lengths up on CUDA, where every new length selects kernels and fragments memory.

    On a CPU, padding tokens cost as much as real ones. ``limit`` None: the context length is unknown.
    """
    should_round = device_type == "cuda" and is_ragged and limit is not None
    return Padding(PAD_MULTIPLE, limit) if should_round else NO_ROUNDING


@dataclass
class Batch:
    """One micro-batch of one rank.

    Args:
        input_ids: (B, T) int64.
        labels: (B, T) int64, aligned with the logits: the next token, or -100 where the loss is masked.
        ids: Row indices, -1 for a filler row.
        n_tokens: Number of supervised tokens.
        n_inputs: Number of input tokens, without filler rows and padding.
    """

    input_ids: Tensor
    labels: Tensor
    ids: list[int]
    n_tokens: int
    n_inputs: int
    packed: dict[str, Tensor] = field(default_factory=dict)
    """For packed rows: "positions" and "documents", (B, T) int64 each."""
    sample_keys: list[int] = field(default_factory=list)
    """A number per row that is the same in every layout, -1 for a filler row: in training the position in the stream
    of samples (unique over epochs, the same after a resume), in validation the row index."""
    bounds: DocumentBounds | None = None
    """Bounds of packed documents, for attention kernels without masks."""
    counts: dict[str, int] = field(default_factory=dict)
    """The normalizers of the objective: supervised tokens, and the objective's own counts."""

    def __post_init__(self) -> None:
        self.counts = {TOKENS: self.n_tokens} | self.counts

    def inputs(
        self, device: torch.device, with_keys: bool = False, with_bounds: bool = False
    ) -> dict[str, Tensor | DocumentBounds]:
        """Return the arguments of the model's forward, on ``device``.

        ``with_keys``: and sample_keys, (B,) int64. ``with_bounds``: for packed rows also document_bounds.
        """
        tensors = {"input_ids": self.input_ids, "labels": self.labels, **self.packed}
        if with_keys:
            tensors["sample_keys"] = torch.tensor(self.sample_keys)
        inputs: dict[str, Tensor | DocumentBounds]
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        if with_bounds and self.bounds is not None:
            inputs["document_bounds"] = self.bounds.to(device)
        return inputs

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory, from which CUDA copies asynchronously."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """Return a copy on ``device``; the host does not wait for it."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        packed = {name: function(tensor) for name, tensor in self.packed.items()}
        bounds = self.bounds and self.bounds._replace(cu_seqlens=function(self.bounds.cu_seqlens))
        input_ids, labels = function(self.input_ids), function(self.labels)
        return replace(self, input_ids=input_ids, labels=labels, packed=packed, bounds=bounds)


def _collate(
    rows: list[dict[str, Tensor] | None], ids: list[int], keys: list[int], longest: int, padding: Padding
) -> Batch:
    """Stack rows to (B, T), padded to the longest row, or ``longest`` if all are None. None becomes a filler row.

    Padding is neither supervised nor counted (N2).
    """
    width = padding.width(max((len(row["input_ids"]) for row in rows if row is not None), default=longest))
    input_ids = torch.full((len(rows), width), padding.token, dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORE_INDEX, dtype=torch.int64)
    n_inputs = 0
    # Padding is a separate document: no row of the attention mask may be empty.
    packed = {name: torch.full_like(labels, filler) for name, filler in (("positions", 0), ("documents", -1))}
    is_packed = any(row is not None and "documents" in row for row in rows)
    for i, row in enumerate(rows):
        if row is not None:
            length = len(row["input_ids"])
            input_ids[i, :length] = row["input_ids"]
            labels[i, :length] = row["labels"]
            if is_packed:  # a row of a source without packing is one document
                packed["positions"][i, :length] = row.get("positions", torch.arange(length))
                packed["documents"][i, :length] = row.get("documents", torch.tensor(0))
            n_inputs += length
    n_tokens = int((labels != IGNORE_INDEX).sum())
    bounds = document_bounds(packed["documents"]) if is_packed else None
    return Batch(input_ids, labels, ids, n_tokens, n_inputs, packed if is_packed else {}, keys, bounds)


class _MicroBatches(Dataset):
    """Maps row indices and sample keys to a Batch: a worker returns complete micro-batches."""

    def __init__(self, rows: TokenDataset, padding: Padding, count: Count | None) -> None:
        self.rows, self.padding, self.count = rows, padding, count
        self.group_size = getattr(rows, "group_size", 1)

    def __getitem__(self, ids_and_keys: list[list[int]] | DataError) -> Batch | DataError:
        if isinstance(ids_and_keys, DataError):
            return ids_and_keys
        ids, keys = ids_and_keys
        try:
            rows = [row for i in ids for row in self._read(i)]
            longest = len(self._read(0)[0]["input_ids"]) if all(row is None for row in rows) else 0
        except DataError as error:
            return error  # if a worker raised it, the message would contain the traceback
        ids, keys = ([number for number in numbers for _ in range(self.group_size)] for numbers in (ids, keys))
        batch = _collate(rows, ids, keys, longest, self.padding)
        if self.count is not None:
            batch.counts |= self.count(batch)
        return batch

    def _read(self, index: int) -> list[Any]:
        """Return the rows of an index; the rows of a group are neighbors in one micro-batch."""
        if index == FILLER:
            return [None] * self.group_size
        return rows_of(self.rows[index])


def _start_worker(_worker: int) -> None:
    # Launchers signal every process of a run. The training process handles the signal and needs its workers to finish
    # the step (S3). Workers end when it closes them or exits; see also _close_all.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # Windows has no SIGUSR1
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    # The threads of the tokenizers library do not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def exit_with_parent() -> None:
    """Exit this process when its parent has ended or was killed; for a thread.

    Torch's watchdog for data loading processes takes seconds, and does not run while a row is read.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _load(
    rows: TokenDataset,
    micro_batches: Iterable[list[list[int]] | DataError],
    num_workers: int,
    padding: Padding,
    count: Count | None,
) -> Iterator[Batch]:
    loader = DataLoader(
        _MicroBatches(rows, padding, count),
        sampler=micro_batches,
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=_start_worker,
        # DataLoader draws a seed for its workers; the global generator's state must not change.
        generator=torch.Generator(),
    )
    workers: list[BaseProcess] = []
    batches = _as_generator(loader, workers)
    _open_loaders[batches] = workers
    return batches


def _as_generator(loader: DataLoader, workers: list[BaseProcess]) -> Generator[Batch, None, None]:
    error, iterator = None, iter(loader)
    workers += getattr(iterator, "_workers", [])
    try:
        for batch in iterator:
            if isinstance(batch, DataError):
                error = batch
                break
            yield batch
    finally:
        del iterator  # ends the workers; a traceback would keep it alive
        _kill(workers)  # those that hang in a read: they ignore SIGTERM
    if error is not None:
        raise error


_open_loaders: weakref.WeakKeyDictionary[Generator[Batch, None, None], list[BaseProcess]] = weakref.WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    """Close loaders that are still referenced at exit, for example by a traceback.

    multiprocessing would send their workers SIGTERM, which they ignore, and wait forever. Its hook runs after this one.
    """
    for batches, workers in list(_open_loaders.items()):
        try:
            batches.close()
        except ValueError:  # a thread still reads in it, see toolkit.data.prefetch
            _kill(workers)


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def _step_ids(
    start: int,
    order: SampleOrder,
    total: int | None,
    batch_shape: tuple[int, int, int, int],
    lengths: np.ndarray | None,
) -> np.ndarray:
    """Return row indices and positions of one rank in the step from ``start``, (accumulation, 2, micro_batch_size).

    Positions beyond the end of the run give -1. Rows of unequal ``lengths`` stay in their global batch but are sorted
    longest first across its micro-batches: neighbors need little padding, on all ranks at the same time, and an
    out-of-memory error appears early.
    """
    global_size, micro_size, rank, world_size = batch_shape
    positions = start + np.arange(global_size)
    if total is not None:
        positions = np.where(positions < total, positions, FILLER)
    ids = np.full_like(positions, FILLER)
    ids[positions >= 0] = order.ids(positions[positions >= 0])
    if lengths is not None:
        longest_first = _longest_first(ids, lengths)
        ids, positions = ids[longest_first], positions[longest_first]
    return np.stack([ids, positions]).reshape(2, -1, world_size, micro_size)[:, :, rank].swapaxes(0, 1)


def _longest_first(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.argsort(np.where(ids == FILLER, 0, -lengths[ids]), kind="stable")


def train_batches(
    rows: TokenDataset,
    order: SampleOrder,
    *,
    start_position: int,
    total_positions: int | None,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    num_workers: int,
    padding: Padding = NO_ROUNDING,
    count: Count | None = None,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of this rank for each optimizer step, starting at ``start_position``.

    A global batch is the next G positions of the stream of samples, up to ``total_positions`` (None: infinite). Filler
    rows complete a short last batch: shapes and counts are equal on all ranks. Rows are read lazily; workers
    prefetch a few micro-batches.

    Args:
        start_position: Rows consumed before; seeking is free.
        total_positions: Rows in the run, over all epochs.
        global_batch_size: Rows per step, G; a multiple of ``world_size * micro_batch_size``.
        num_workers: Data loading processes; 0 reads in this process. The result is the same.
        count: Counts the objective's normalizers in a micro-batch.
    """
    if global_batch_size % (world_size * micro_batch_size):
        raise ValueError(
            f"a global batch of {global_batch_size} rows does not divide into {world_size} x {micro_batch_size}"
        )
    batch_shape = (global_batch_size, micro_batch_size, rank, world_size)
    size = global_batch_size
    starts = (
        count_from(start_position, size) if total_positions is None else range(start_position, total_positions, size)
    )
    if row_count(rows) == 0:
        raise ValueError("there are no rows to train on")
    lengths = row_lengths(rows)

    def micro_batches() -> Iterator[list[list[int]] | DataError]:
        try:
            for start in starts:
                yield from _step_ids(start, order, total_positions, batch_shape, lengths).tolist()
        except DataError as error:
            yield error  # in sequence; raising here would be too early, because the loader prefetches

    batches = _load(rows, micro_batches(), num_workers, padding, count)
    accumulation = global_batch_size // (world_size * micro_batch_size)
    return iter(lambda: list(islice(batches, accumulation)), [])


def val_batches(
    rows: TokenDataset,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    max_rows: int | None,
    padding: Padding = NO_ROUNDING,
    count: Count | None = None,
) -> Iterator[Batch]:
    """Yield the validation batches of this rank: rows in order, or longest first, each exactly once over all ranks.

    Every rank gets the same number of batches, completed with filler rows. ``max_rows`` limits the rows over all ranks;
    they are the same for any micro-batch size and number of ranks.
    """
    n, per_round = min(len(rows), max_rows or len(rows)), world_size * micro_batch_size
    rounds = -(-n // per_round)
    ids = np.full(rounds * per_round, FILLER)
    ids[:n] = np.arange(n)
    if (lengths := row_lengths(rows)) is not None:
        ids = ids[_longest_first(ids, lengths)]
    micro_batches = ids.reshape(rounds, world_size, micro_batch_size)[:, rank].tolist()
    return _load(rows, [[one, one] for one in micro_batches], 0, padding, count)
