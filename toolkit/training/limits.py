"""When a run ends: the limit that is reached first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.args import TrainArgs
from toolkit.training.state import Progress


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
