"""Batch rows. A rank's rows in a step are a pure function of (seed, step, rank), so a run can resume at any step and on
any number of ranks without replaying earlier steps."""

import atexit
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count as count_from
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from toolkit.data.base import AddedBos, TokenDataset, member, row_lengths, rows_of
from toolkit.data.batch import FILLER, NO_ROUNDING, Batch, Padding, collate
from toolkit.data.order import SampleOrder
from toolkit.errors import DataError, one_line
from toolkit.io.threads import ignore_signals

Count = Callable[[Batch], dict[str, int]]


class _MicroBatches(Dataset):
    """Maps row indices and sample keys to a Batch, so that workers return complete micro-batches."""

    def __init__(
        self, rows: TokenDataset, padding: Padding, count: Count | None, added_bos: AddedBos | None = None
    ) -> None:
        self.rows, self.padding, self.count, self.added_bos = rows, padding, count, added_bos
        self.group_size = member(rows, "group_size")

    def __getitem__(self, numbers: list[list[int]] | DataError) -> Batch | DataError:
        if isinstance(numbers, DataError):
            return numbers
        ids, keys, partners = numbers
        try:
            rows = [row for i, partner in zip(ids, partners, strict=True) for row in self._read(i, partner)]
            longest = len(self._read(0, 0)[0]["input_ids"]) if all(row is None for row in rows) else 0
        except DataError as error:
            return error  # an exception raised in a worker would have its traceback in the message
        if self.added_bos is not None:
            rows = [row and self.added_bos.without_loss(row) for row in rows]
        ids, keys = ([number for number in numbers for _ in range(self.group_size)] for numbers in (ids, keys))
        batch = collate(rows, ids, keys, longest, self.padding)
        if self.count is not None:
            batch.counts |= self.count(batch)
        return batch

    def _read(self, index: int, partner: int) -> list[Any]:
        """Return the rows at ``index``: all rows of a group, or a single row."""
        if index == FILLER:
            return [None] * self.group_size
        if (with_partner := member(self.rows, "with_partner")) is not None:
            return with_partner(index, partner)
        return rows_of(self.rows[index])


def _start_worker(_worker: int) -> None:
    # Launchers signal every process of a run. Workers ignore the signal, because the training process needs them to
    # finish the step (S3). They exit when the training process closes them or exits; see also _close_all.
    ignore_signals()
    threading.Thread(target=exit_with_parent, daemon=True).start()
    # Threads of the tokenizers library do not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def exit_with_parent() -> None:
    """Exit this process when its parent exits or is killed. Run in a thread.

    Torch's watchdog for data loading processes takes seconds and does not run while a row is being read.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _load(
    dataset: _MicroBatches, micro_batches: Iterable[list[list[int]] | DataError], num_workers: int = 0
) -> Iterator[Batch]:
    loader = DataLoader(
        dataset,
        sampler=micro_batches,
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=_start_worker,
        # DataLoader draws a worker seed, which must not advance the global generator.
        generator=torch.Generator(),
    )
    workers: list[BaseProcess] = []
    batches = _as_generator(loader, workers)
    _open_loaders[batches] = workers
    return batches


def _as_generator(loader: DataLoader, workers: list[BaseProcess]) -> Generator[Batch, None, None]:
    error = iterator = None
    try:
        iterator = iter(loader)
        workers += getattr(iterator, "_workers", [])
        for batch in iterator:
            if isinstance(batch, DataError):
                error = batch
                break
            yield batch
    except (OSError, RuntimeError) as reason:  # no descriptors, processes or semaphores; a worker was killed
        if iterator is not None and "DataLoader worker (pid" not in str(reason):
            raise
        hint = "is there enough memory? use fewer, or 0 to read in the training process"
        error = DataError(f"--data.num_workers {loader.num_workers}: a process failed: {one_line(reason)}; {hint}")
    finally:
        del iterator  # shuts down the workers; a traceback would keep it alive
        _kill(workers)  # workers that hang in a read; they ignore SIGTERM
    if error is not None:
        raise error


_open_loaders: weakref.WeakKeyDictionary[Generator[Batch, None, None], list[BaseProcess]] = weakref.WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    """Close loaders that are still referenced at exit, for example by a traceback.

    The exit hook of multiprocessing sends SIGTERM, which workers ignore, and waits forever. It runs after this one.
    """
    for batches, workers in list(_open_loaders.items()):
        try:
            batches.close()
        except ValueError:  # the prefetch thread is still reading, see toolkit.data.prefetch
            _kill(workers)


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def _micro_batches_of_rank(
    ids: np.ndarray, keys: np.ndarray, lengths: np.ndarray | None, micro_size: int, rank: int, world_size: int
) -> list[list[list[int]]]:
    """Return one rank's row indices, sample keys and partners per micro-batch, (n, 3, micro size).

    The partner of a row is the one before it in ``ids``, of the first row the last one. Fillers, which are at the end,
    have none. With ``lengths``, rows are sorted longest first across the micro-batches. This reduces padding, balances
    the ranks, and makes out-of-memory errors appear early.
    """
    n = int((ids != FILLER).sum())
    columns = np.stack([ids, keys, np.concatenate([np.roll(ids[:n], 1), ids[n:]])])
    if lengths is not None:
        columns = columns[:, np.argsort(np.where(ids == FILLER, 0, -lengths[ids]), kind="stable")]
    return columns.reshape(3, -1, world_size, micro_size)[:, :, rank].swapaxes(0, 1).tolist()


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
    """Yield this rank's micro-batches for each optimizer step, starting at ``start_position``.

    A global batch is the next G positions of the sample stream. Filler rows complete a short last batch, so that all
    ranks have equal shapes and micro-batch counts. Rows are read lazily; workers prefetch a few micro-batches.

    Args:
        start_position: Rows consumed before this call. Seeking is free.
        total_positions: Rows in the run over all epochs; None for no limit.
        global_batch_size: Rows per step, G; a multiple of ``world_size * micro_batch_size``.
        num_workers: Data loading processes; 0 loads data in this process. Batches are the same for any number.
        count: Computes the objective's loss normalizers for a micro-batch.
    """
    size = global_batch_size
    starts = (
        count_from(start_position, size) if total_positions is None else range(start_position, total_positions, size)
    )
    lengths = row_lengths(rows)

    def micro_batches() -> Iterator[list[list[int]] | DataError]:
        try:
            for start in starts:
                positions = start + np.arange(size)
                if total_positions is not None:
                    positions = np.where(positions < total_positions, positions, FILLER)
                ids = np.full_like(positions, FILLER)
                ids[positions >= 0] = order.ids(positions[positions >= 0])
                yield from _micro_batches_of_rank(ids, positions, lengths, micro_batch_size, rank, world_size)
        except DataError as error:
            yield error  # raised when its step is reached; the loader prefetches, so raising here is too early

    batches = _load(_MicroBatches(rows, padding, count), micro_batches(), num_workers)
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
    added_bos: AddedBos | None = None,
) -> Iterator[Batch]:
    """Yield this rank's validation batches. Each row appears exactly once across all ranks.

    Rows are in order, or longest first if they differ in length. Filler rows give every rank the same number of
    batches. ``max_rows`` limits the total over all ranks to the first rows of the dataset. ``added_bos`` has no loss.
    """
    n, per_round = min(len(rows), max_rows or len(rows)), world_size * micro_batch_size
    ids = np.full(-(-n // per_round) * per_round, FILLER)
    ids[:n] = np.arange(n)
    micro_batches = _micro_batches_of_rank(ids, ids, row_lengths(rows), micro_batch_size, rank, world_size)
    return _load(_MicroBatches(rows, padding, count, added_bos), micro_batches)
