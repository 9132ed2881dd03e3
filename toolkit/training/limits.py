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
        max_seconds: Wall time of this launch.
    """

    total_steps: int | None
    total_samples: int | None
    max_tokens: int | None
    max_seconds: float | None

    def reached(self, step: int, tokens: int) -> bool:
        """Whether a run that has made ``step`` steps over ``tokens`` tokens is finished."""
        return (self.total_steps is not None and step >= self.total_steps) or (
            self.max_tokens is not None and tokens >= self.max_tokens
        )


def build_limits(args: TrainArgs, done: Progress, *, n_rows: int, tokens_per_row: int) -> Limits:
    """Turn the limits that the user gave (one at least) into one end.

    ``done`` is how far the run has come: the last batch of an epoch may have been short, so that steps and samples
    before it do not tell of those to come.
    """
    assert args.global_batch_size is not None
    ends, total_samples = [], None
    if args.max_steps is not None:
        ends.append(args.max_steps)
    if args.max_tokens is not None:
        left = max(0, args.max_tokens - done.tokens)
        ends.append(done.step + math.ceil(left / (args.global_batch_size * tokens_per_row)))
    if args.epochs is not None:
        total_samples = math.ceil(args.epochs * n_rows)
        ends.append(done.step + math.ceil(max(0, total_samples - done.samples) / args.global_batch_size))
    assert ends or args.max_time is not None
    seconds = None if args.max_time is None else args.max_time * 60
    return Limits(min(ends, default=None), total_samples, args.max_tokens, seconds)
