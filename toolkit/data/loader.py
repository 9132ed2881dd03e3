"""From rows to batches. Which rows a rank reads in a step is a pure function of (seed, step, rank), so a run can be
continued at any step, on another number of ranks, without replaying what went before."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from toolkit.data.base import TokenDataset
from toolkit.data.order import shuffled_index
from toolkit.models.labels import IGNORE_INDEX

FILLER = -1  # the row number of a row that only fills up a batch
PAD_MULTIPLE = 64  # tokens


class Padding(NamedTuple):
    """How the rows of a micro-batch are made equally long: as the longest of them.

    Args:
        multiple: Its tokens are rounded up to a multiple of this.
        limit: But not beyond so many, which is all that the model takes.
        token: The input token of padding and fillers.
    """

    multiple: int = 1
    limit: int | None = None
    token: int = 0

    def width(self, longest: int) -> int:
        """Tokens per row, (T)."""
        rounded = -(-longest // self.multiple) * self.multiple
        return max(longest, rounded if self.limit is None else min(rounded, self.limit))


NO_ROUNDING = Padding()


def choose_padding(device_type: str, is_ragged: bool, limit: int | None) -> Padding:
    """Round up on CUDA, where every new length costs: kernels are chosen and memory is cut for each of them.

    On a CPU a token of padding costs as much as any other. ``limit`` None: what the model takes is not known.
    """
    rounds = device_type == "cuda" and is_ragged and limit is not None
    return Padding(PAD_MULTIPLE, limit) if rounds else NO_ROUNDING


@dataclass
class Batch:
    """One micro-batch of one rank.

    Args:
        input_ids: (B, T) int64.
        labels: (B, T) int64, aligned with the logits: the next token, or -100 where nothing is to be learned.
        ids: Row numbers, -1 for a filler.
        n_tokens: Supervised tokens.
        n_inputs: Input tokens of real rows; fillers and padding are left out.
    """

    input_ids: Tensor
    labels: Tensor
    ids: list[int]
    n_tokens: int
    n_inputs: int
    packed: dict[str, Tensor] = field(default_factory=dict)
    """Where rows hold several documents: "positions" and "documents", (B, T) int64 each."""

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """What the model's forward takes, on its device."""
        given = {"input_ids": self.input_ids, "labels": self.labels, **self.packed}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in given.items()}


def _collate(rows: list[dict[str, Tensor] | None], ids: list[int], longest: int, padding: Padding) -> Batch:
    """Stack rows to (B, T), T by the longest of them or else ``longest``; None becomes a row without supervised tokens.

    Padding is neither supervised nor counted (N2).
    """
    width = padding.width(max((len(row["input_ids"]) for row in rows if row is not None), default=longest))
    input_ids = torch.full((len(rows), width), padding.token, dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORE_INDEX, dtype=torch.int64)
    n_inputs = 0
    # padding is a document of its own, so that no row of attention is empty
    packed = {name: torch.full_like(labels, filler) for name, filler in (("positions", 0), ("documents", -1))}
    is_packed = any(row is not None and "documents" in row for row in rows)
    for i, row in enumerate(rows):
        if row is not None:
            length = len(row["input_ids"])
            input_ids[i, :length] = row["input_ids"]
            labels[i, :length] = row["labels"]
            for name in packed if is_packed else ():
                packed[name][i, :length] = row[name]
            n_inputs += length
    n_tokens = int((labels != IGNORE_INDEX).sum())
    return Batch(input_ids, labels, ids, n_tokens, n_inputs, packed if is_packed else {})


class _MicroBatches(Dataset):
    """Indexed by a list of row numbers, gives a Batch: a worker hands over whole micro-batches."""

    def __init__(self, rows: TokenDataset, padding: Padding) -> None:
        self.rows = rows
        self.padding = padding

    def __getitem__(self, ids: list[int]) -> Batch:
        rows = [None if i == FILLER else self.rows[i] for i in ids]
        longest = len(self.rows[0]["input_ids"]) if all(row is None for row in rows) else 0
        return _collate(rows, ids, longest, self.padding)


def _start_worker(_worker: int) -> None:
    # Launchers signal every process of a run: the training process reacts, and needs its workers to finish the step
    # (S3). They end when it tells them to, or when it has ended; see _close_all, too.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # Windows has no SIGUSR1
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The threads of the tokenizers library do not survive a fork; a worker that tokenises must do without them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with_parent() -> None:
    """End this worker when the training process has ended, killed perhaps. Torch's watchdog needs seconds for that, and
    does not see it while a row is read."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _load(
    rows: TokenDataset, micro_batches: Iterable[list[int]], num_workers: int, padding: Padding
) -> Iterator[Batch]:
    loader = DataLoader(
        _MicroBatches(rows, padding),
        sampler=micro_batches,
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=_start_worker,
        # DataLoader draws a seed for its workers: not from the global generator, whose state belongs to the run.
        generator=torch.Generator(),
    )
    batches = _hold(iter(loader))
    _open.add(batches)
    return batches


def _hold(batches: Iterator[Batch]) -> Generator[Batch, None, None]:
    yield from batches


_open: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the workers of loaders that something, a traceback say, still holds at exit.

    multiprocessing would send them the SIGTERM that they ignore, and wait for ever. Its hook runs after this one.
    """
    for batches in list(_open):
        batches.close()


def _step_ids(
    start: int, n: int, seed: int, total: int | None, layout: tuple[int, int, int, int], lengths: np.ndarray | None
) -> np.ndarray:
    """Row numbers of one rank in the step that begins at position ``start``, (accumulation, micro_batch_size).

    -1 beyond the end of the run. Rows of unequal ``lengths`` stay in their global batch, so that the run is the same,
    but come to its micro-batches longest first: neighbours need little padding, on all ranks at once, and if memory
    does not suffice that shows early.
    """
    global_size, micro_size, rank, world_size = layout
    positions = start + np.arange(global_size)
    ids = shuffled_index(positions, n, seed)
    if total is not None:
        ids = np.where(positions < total, ids, FILLER)
    if lengths is not None:
        ids = ids[_longest_first(ids, lengths)]
    return ids.reshape(-1, world_size, micro_size)[:, rank]


def _longest_first(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The order of rows by length; fillers last, equal ones as they came."""
    return np.argsort(np.where(ids == FILLER, 0, -lengths[ids]), kind="stable")


def train_batches(
    rows: TokenDataset,
    *,
    seed: int,
    start_position: int,
    total_positions: int | None,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    num_workers: int,
    padding: Padding = NO_ROUNDING,
) -> Iterator[list[Batch]]:
    """Yield, per optimizer step from ``start_position`` on, the micro-batches of this rank.

    A global batch is the next G positions of the shuffled stream, cut at ``total_positions`` (None: endless).
    In the short last batch fillers stand in for what is missing, so that shapes and counts are equal on all ranks. Rows
    are read as they are asked for; workers read a few micro-batches ahead.

    Args:
        rows: What to read.
        seed: Chooses the order.
        start_position: Rows read before; going there costs nothing.
        total_positions: Rows in the run, over all epochs.
        global_batch_size: Rows per step, G; a whole number of ``world_size * micro_batch_size``.
        micro_batch_size: Rows per micro-batch.
        rank: This process, from 0.
        world_size: How many processes share the global batch.
        num_workers: Reading processes; 0 reads here. The result is the same.
        padding: How rows of unequal length are filled up.

    Raises:
        ValueError: if the global batch does not divide (N1) or there are no rows.
    """
    if global_batch_size % (world_size * micro_batch_size):
        raise ValueError(
            f"a global batch of {global_batch_size} rows does not divide into {world_size} x {micro_batch_size}"
        )
    layout = (global_batch_size, micro_batch_size, rank, world_size)
    size = global_batch_size
    starts = count(start_position, size) if total_positions is None else range(start_position, total_positions, size)
    n = len(rows)
    if n < 1:
        raise ValueError("there are no rows to train on")
    lengths = getattr(rows, "lengths", None)
    micro_batches = (
        ids for start in starts for ids in _step_ids(start, n, seed, total_positions, layout, lengths).tolist()
    )
    batches = _load(rows, micro_batches, num_workers, padding)
    accumulation = global_batch_size // (world_size * micro_batch_size)
    return iter(lambda: list(islice(batches, accumulation)), [])


def val_batches(
    rows: TokenDataset,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    max_rows: int | None,
    num_workers: int = 0,
    padding: Padding = NO_ROUNDING,
) -> Iterator[Batch]:
    """Yield the validation batches of this rank: rows in order, or the longest first, each once over all ranks.

    Every rank gets the same number of batches (fillers at the end). ``max_rows`` limits the rows, over all ranks: they
    are the same rows whatever the micro-batch and the number of ranks.
    """
    n, per_round = min(len(rows), max_rows or len(rows)), world_size * micro_batch_size
    rounds = -(-n // per_round)
    ids = np.full(rounds * per_round, FILLER)
    ids[:n] = np.arange(n)
    if (lengths := getattr(rows, "lengths", None)) is not None:
        ids = ids[_longest_first(ids, lengths)]
    micro_batches = ids.reshape(rounds, world_size, micro_batch_size)[:, rank].tolist()
    return _load(rows, micro_batches, num_workers, padding)
