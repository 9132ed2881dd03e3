"""Limits that end a run, and the intervals of validation and checkpoints."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config import AUTO, Auto, EvalArgs, TrainArgs
from toolkit.errors import UserError
from toolkit.planning.start_checks import unknown_rows_error

N_VALIDATIONS, N_CHECKPOINTS = 10, 5  # per run, with auto intervals
MIN_INTERVAL = 5  # steps; shorter runs are trials that save and validate at the end only
MAX_SAVE_SECONDS = 600.0


@dataclass
class Progress:
    """The progress of a run.

    Args:
        step: Optimizer steps done.
        tokens: Input tokens so far, over all ranks.
        samples: Position in the sample stream, over all ranks.
        seconds: Seconds of all steps, waiting for data included, summed over all launches.
        logged_rows: Rows of metrics.csv.
        metrics_crc: CRC-32 of these rows; 0 if unknown.
        data: State of the sample order at ``samples``, see :meth:`toolkit.data.order.SampleOrder.state`.
    """

    step: int = 0
    tokens: int = 0
    samples: int = 0
    seconds: float = 0.0
    logged_rows: int = 0
    metrics_crc: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """The limits of a run.

    Args:
        total_steps: Optimizer steps of the run, over all launches; None if only max_time limits it.
        total_samples: Samples of the run if epochs limit it; the last global batch may be short.
        max_tokens: Input tokens of the run.
        last_step: The last step of the run. Differs from ``total_steps`` if that is an estimate from ``max_tokens``
            and the mean length of ragged rows. The estimate only determines the LR schedule.
        max_seconds: Wall-time limit of this launch in seconds, in addition to another limit.
        total_seconds: Training time of the run over all launches, if nothing else limits it.
    """

    total_steps: int | None
    total_samples: int | None
    max_tokens: int | None
    max_seconds: float | None
    last_step: int | None
    total_seconds: float | None = None

    def reached(self, step: int, tokens: int, seconds: float = 0.0) -> bool:
        """Whether a run is finished after ``step`` steps, ``tokens`` tokens and ``seconds`` of training."""
        pairs = ((self.last_step, step), (self.max_tokens, tokens), (self.total_seconds, seconds))
        return any(limit is not None and value >= limit for limit, value in pairs)


def build_limits(
    args: TrainArgs, done: Progress, *, n_rows: int | None, tokens_per_row: float, is_ragged: bool = False
) -> Limits:
    """Combine the user's limits; at least one must be set.

    ``done`` is the progress so far. It is needed because the last batch of an epoch may have been short, so steps and
    samples are not proportional. ``n_rows`` is None if it is unknown; ``tokens_per_row`` is a mean.
    """
    total_samples = by_samples = by_tokens = None
    if args.max_tokens is not None:
        tokens_left = max(0, args.max_tokens - done.tokens)
        by_tokens = done.step + math.ceil(tokens_left / (args.global_batch_size * tokens_per_row))
    if args.epochs is not None and n_rows is not None:
        total_samples = math.ceil(args.epochs * n_rows)
        by_samples = done.step + math.ceil(max(0, total_samples - done.samples) / args.global_batch_size)
    ends = [end for end in (args.max_steps, by_samples, by_tokens) if end is not None]
    if args.epochs is not None and n_rows is None and not ends:
        raise unknown_rows_error(args.epochs)
    assert ends or args.max_time is not None
    exact = [end for end in (args.max_steps, by_samples, None if is_ragged else by_tokens) if end is not None]
    seconds = args.max_time * 60 if ends and args.max_time is not None else None
    total, last = min(ends, default=None), min(exact, default=None)
    return Limits(total, total_samples, args.max_tokens, seconds, last, args.budget_seconds)


def require_within_limits(args: TrainArgs, done: Progress, limits: Limits, longest_row: int, checkpoint: Path) -> None:
    """Check that ``checkpoint``, with progress ``done``, is not past a limit.

    The last step may exceed ``max_tokens`` by less than a global batch with ``longest_row`` tokens per row.
    """
    last_step = args.global_batch_size * longest_row
    is_past = {
        "max_steps": args.max_steps is not None and done.step > args.max_steps,
        "max_tokens": args.max_tokens is not None and done.tokens >= args.max_tokens + last_step,
        "epochs": limits.total_samples is not None and done.samples > limits.total_samples,
    }
    for name in is_past:
        if is_past[name]:
            raise UserError(
                f"--train.{name} {getattr(args, name)}: {checkpoint} is past this limit, after {done.step:,} steps, "
                f"{done.tokens:,} tokens and {done.samples:,} samples; raise it, or use a new --out_dir"
            )


@dataclass(frozen=True)
class Intervals:
    """Intervals between validations and between checkpoints; None disables.

    Args:
        eval_steps, save_steps: Interval in optimizer steps. Validation or saving is due at every multiple of it.
        eval_seconds, save_seconds: Wall time in seconds since the previous validation or checkpoint, or the launch.
    """

    eval_steps: int | None
    eval_seconds: float | None
    save_steps: int | None
    save_seconds: float | None


def build_intervals(train: TrainArgs, evaluation: EvalArgs, limits: Limits) -> Intervals:
    """Resolve auto intervals from the length of the run; explicit intervals are unchanged."""
    eval_steps = _interval(evaluation.interval, N_VALIDATIONS, limits)
    save_steps = _interval(train.save_interval, N_CHECKPOINTS, limits)
    eval_seconds = save_seconds = None
    if evaluation.interval == AUTO and train.max_time is not None:
        eval_seconds = 60 * train.max_time / N_VALIDATIONS
    if train.save_every_minutes not in (AUTO, None):
        save_seconds = train.save_every_minutes * 60
    elif train.save_every_minutes == AUTO and train.save_interval == AUTO:
        save_seconds = MAX_SAVE_SECONDS
    return Intervals(eval_steps, eval_seconds, save_steps, save_seconds)


def _interval(interval: int | Auto, per_run: int, limits: Limits) -> int | None:
    if interval != AUTO:
        return interval or None
    return None if limits.total_steps is None else max(MIN_INTERVAL, math.ceil(limits.total_steps / per_run))


def is_due(interval: int | None, step: int) -> bool:
    return bool(interval and step % interval == 0)
