"""The training data of a run, step by step. Ranks that cannot read take part in the step's vote: all stop together."""

from __future__ import annotations

from typing import NoReturn

from toolkit.data.base import TokenDataset, sample_order
from toolkit.data.loader import Batch, Padding, train_batches
from toolkit.distributed import ranks
from toolkit.errors import DataError, UserError
from toolkit.planning.resolve import ResolvedConfig
from toolkit.training.run_state import RunState


class TrainReader:
    """Reads this rank's micro-batches, from where the run starts.

    Args:
        config: Of the run.
        state: With the progress to start from.
        rows: The training rows.
        padding: How to pad rows of unequal length.

    Raises:
        UserError: the run cannot go on with this data.
    """

    def __init__(self, config: ResolvedConfig, state: RunState, rows: TokenDataset, padding: Padding) -> None:
        batch, progress = config.batch, state.progress
        self.order = sample_order(rows, config.args.seed, progress.data)
        self.error: DataError | None = None
        self._batches = train_batches(
            rows,
            self.order,
            start_position=progress.samples,
            total_positions=state.limits.total_samples,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            rank=ranks.global_rank(),
            world_size=ranks.world_size(),
            num_workers=config.args.data.num_workers,
            padding=padding,
        )

    def read(self) -> list[Batch]:
        """Return the micro-batches of the next step; none if they cannot be read, and then ``error`` is set."""
        try:
            return next(self._batches)
        except DataError as error:
            self.error = error
            return []

    def raise_error(self, saved: str | None) -> NoReturn:
        """Raise the error of the rank that cannot read, on all ranks; every rank calls this.

        Args:
            saved: What was saved, for the message; None before the first step.

        Raises:
            UserError: nothing was trained in this launch.
            DataError: the run stops.
        """
        found = ranks.all_gather_object(None if self.error is None else str(self.error))
        reason = next(error for error in found if error is not None)
        if saved is None:
            raise UserError(reason)
        raise DataError(f"{reason}; {saved}")
