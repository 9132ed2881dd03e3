"""Read the training data step by step, with prefetch. A read error on one rank stops all ranks at the same step."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

from toolkit.data.base import sample_order
from toolkit.data.batch import Batch, choose_padding
from toolkit.data.loader import train_batches
from toolkit.data.prefetch import Prefetcher
from toolkit.distributed import ranks
from toolkit.errors import DataError, UserError
from toolkit.training.launch import Launch
from toolkit.training.start_state import StartState


class DataReader:
    """Reads this rank's micro-batches, starting at the run's progress."""

    def __init__(self, launch: Launch) -> None:
        config, rows, device = launch.config, launch.data.train, launch.fabric.device
        batch, progress, limits = config.batch, launch.progress, launch.limits
        context = None if launch.spec.config is None else config.max_seq_length
        divisor = config.args.model_parallel.length_divisor
        self.padding = choose_padding(device.type, launch.longest_ragged > 0, context, divisor)
        self.order = sample_order(rows, config.args.seed, progress.data)
        self._end = last_position(launch, batch.global_batch_size)
        self.error: DataError | None = None
        steps: Iterator[list[Batch]] = train_batches(
            rows,
            self.order,
            start_position=progress.samples,
            total_positions=limits.total_samples,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            rank=ranks.layout().data_rank(ranks.global_rank()),
            world_size=ranks.layout().data_parallel,
            num_workers=config.args.data.num_workers,
            padding=self.padding,
            count=config.args.objective.count,
        )
        if launch.spec.config and config.args.data.checks_tokens:  # other data is checked before the run
            steps = _checked(steps, launch.spec.config.padded_vocab_size)
        if limits.last_step is not None:  # read nothing after it
            steps = islice(steps, max(0, limits.last_step - progress.step))
        self.prefetcher = Prefetcher(steps, device, config.args.data.reads_ahead)

    def describe(self) -> list[str]:
        """Return log lines that describe the sample order; empty if it has none."""
        describe: Callable[[int | None], list[str]] = getattr(self.order, "describe", lambda end: [])
        return describe(self._end)

    def read(self) -> list[Batch]:
        """Return the micro-batches of the next step. On a read error, set ``error`` and return an empty list."""
        try:
            return next(self.prefetcher)
        except DataError as error:
            self.error = error
            return []

    def state(self, position: int) -> dict[str, Any]:
        """Return the state of the sample order, see :meth:`toolkit.data.order.SampleOrder.state`.

        Does not wait for pending reads: after a signal, a run must save even if its storage hangs.
        """
        return self.order.state(position)

    def raise_error(self, saved: str | None) -> NoReturn:
        """Raise the read error on all ranks. ``saved`` is appended to the message; None before the first step."""
        errors = ranks.all_gather_object(None if self.error is None else str(self.error))
        reason = next(error for error in errors if error is not None)
        if saved is None:
            raise UserError(reason)
        raise DataError(f"{reason}; {saved}")


def last_position(start: StartState, global_batch_size: int) -> int | None:
    """Return the sample position where a run ends, estimated for ragged rows; None if unknown."""
    limits, done = start.limits, start.progress
    if limits.total_steps is None:
        return limits.total_samples
    end = done.samples + max(0, limits.total_steps - done.step) * global_batch_size
    return end if limits.total_samples is None else min(end, limits.total_samples)


def _checked(steps: Iterator[list[Batch]], vocab_size: int) -> Iterator[list[Batch]]:
    """Raise DataError for a token id that the model does not embed. On the host, before the device has the batch."""
    for batches in steps:
        for batch in batches:
            largest = max(int(batch.input_ids.max()), int(batch.labels.max()))
            if largest >= vocab_size:
                vocabulary = f"the model's vocabulary of {vocab_size:,} tokens"
                raise DataError(f"rows {batch.ids}: have token id {largest:,}, which is not in {vocabulary}")
        yield batches
