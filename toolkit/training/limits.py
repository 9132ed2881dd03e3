"""When a run ends: the limit that is reached first; and how often it validates and saves until then."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.args import AUTO, EvalArgs, TrainArgs
from toolkit.errors import UserError
from toolkit.training.state import Progress

VALIDATIONS, CHECKPOINTS = 10, 5  # of a run, where their intervals are auto
MIN_INTERVAL = 5  # steps; a run of a few steps is a trial, which saves and validates at its end
MAX_SAVE_SECONDS = 600.0


@dataclass(frozen=True)
class Limits:
    """The end of a run.

    Args:
        total_steps: Optimizer steps of the whole run, over all launches; None when only the clock ends it.
        total_samples: Samples of the whole run where epochs limit it; the last global batch may be short.
        max_tokens: Input tokens of the whole run.
        last_step: Ends the run. It is ``total_steps``, but where that is an estimate, from ``max_tokens`` and the mean
            length of unequal rows: then ``total_steps`` only shapes the learning rate.
        max_seconds: Wall time of this launch.
    """

    total_steps: int | None
    total_samples: int | None
    max_tokens: int | None
    max_seconds: float | None
    last_step: int | None

    def reached(self, step: int, tokens: int) -> bool:
        """Whether a run that has made ``step`` steps over ``tokens`` tokens is finished."""
        return (self.last_step is not None and step >= self.last_step) or (
            self.max_tokens is not None and tokens >= self.max_tokens
        )


def build_limits(
    args: TrainArgs, done: Progress, *, n_rows: int, tokens_per_row: float, is_ragged: bool = False
) -> Limits:
    """Turn the limits that the user gave (one at least) into one end.

    ``done`` is how far the run has come: the last batch of an epoch may have been short, so that steps and samples
    before it do not tell of those to come. ``tokens_per_row`` is their mean.
    """
    assert args.global_batch_size is not None
    ends, estimates, total_samples = [], [], None
    if args.max_steps is not None:
        ends.append(args.max_steps)
    if args.max_tokens is not None:
        left = max(0, args.max_tokens - done.tokens)
        end = done.step + math.ceil(left / (args.global_batch_size * tokens_per_row))
        (estimates if is_ragged else ends).append(end)
    if args.epochs is not None:
        total_samples = math.ceil(args.epochs * n_rows)
        ends.append(done.step + math.ceil(max(0, total_samples - done.samples) / args.global_batch_size))
    assert ends or estimates or args.max_time is not None
    seconds = None if args.max_time is None else args.max_time * 60
    total, last = min(ends + estimates, default=None), min(ends, default=None)
    return Limits(total, total_samples, args.max_tokens, seconds, last)


def require_ahead(args: TrainArgs, done: Progress, limits: Limits, longest_row: int, checkpoint: Path) -> None:
    """Refuse to resume ``checkpoint``, which is ``done``, with a limit that it has passed.

    The last step of a run may reach beyond ``max_tokens``, by less than a global batch of its longest row.

    Raises:
        UserError: naming the limit.
    """
    assert args.global_batch_size is not None
    passed = {
        "max_steps": (args.max_steps, args.max_steps is not None and done.step > args.max_steps),
        "max_tokens": (
            args.max_tokens,
            args.max_tokens is not None and done.tokens >= args.max_tokens + args.global_batch_size * longest_row,
        ),
        "epochs": (args.epochs, limits.total_samples is not None and done.samples > limits.total_samples),
    }
    for name, (value, is_passed) in passed.items():
        if is_passed:
            raise UserError(
                f"--train.{name} {value}: {checkpoint} is past this limit, after {done.step:,} steps, "
                f"{done.tokens:,} tokens and {done.samples:,} samples; raise it, or train anew in another --out_dir"
            )


@dataclass(frozen=True)
class Intervals:
    """How often a run validates and saves before its end; None is never.

    Args:
        eval_steps, save_steps: Optimizer steps; due at multiples of them, so that a resumed run keeps to them.
        eval_seconds, save_seconds: Wall time since the last one, or since the launch.
    """

    eval_steps: int | None
    eval_seconds: float | None
    save_steps: int | None
    save_seconds: float | None


def build_intervals(train: TrainArgs, evaluation: EvalArgs, limits: Limits) -> Intervals:
    """Resolve the intervals that are auto by the length of the run; explicit ones are taken as they are."""
    eval_seconds = save_seconds = None
    if evaluation.interval == AUTO and limits.max_seconds is not None:
        eval_seconds = limits.max_seconds / VALIDATIONS
    if train.save_every_minutes not in (AUTO, None):
        save_seconds = train.save_every_minutes * 60
    elif train.save_every_minutes == AUTO and train.save_interval == AUTO:
        save_seconds = min(MAX_SAVE_SECONDS, (limits.max_seconds or math.inf) / CHECKPOINTS)
    return Intervals(
        _interval(evaluation.interval, VALIDATIONS, limits), eval_seconds,
        _interval(train.save_interval, CHECKPOINTS, limits), save_seconds,
    )  # fmt: skip


def _interval(given: int | str, per_run: int, limits: Limits) -> int | None:
    if given != AUTO:
        return given or None
    return None if limits.total_steps is None else max(MIN_INTERVAL, math.ceil(limits.total_steps / per_run))
