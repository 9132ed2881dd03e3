"""N5 sane-schedule-and-decay: the LR schedule, a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.config import AUTO, CommandDefaults, TrainArgs
from toolkit.errors import UserError

WSD_DECAY_FRACTION = 0.2
"""Fraction of a warm-up, stable, decay run in which the learning rate decays."""

WARMUP_WITHOUT_HORIZON = 100
"""Warm-up steps of a run that only max_time limits."""


@dataclass(frozen=True)
class Schedule:
    """The LR schedule over ``total_steps`` optimizer steps (None: unknown end, constant after the warm-up)."""

    shape: str
    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int | None

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0.

        The warm-up is linear from above zero and reaches the peak at its last step. The last step of the run, and steps
        beyond it, have the minimum.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        assert self.total_steps is not None
        start = self.warmup_steps
        if self.shape == "wsd":
            start = max(start, self.total_steps - max(1, round(WSD_DECAY_FRACTION * self.total_steps)))
        progress = min(max(0.0, (step - start) / max(1, self.total_steps - 1 - start)), 1.0)
        factor = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "wsd": 1 - progress}[
            self.shape
        ]
        return self.minimum + (self.peak - self.minimum) * factor


def build_schedule(args: TrainArgs, total_steps: int | None, defaults: CommandDefaults) -> Schedule:
    """Build the LR schedule of a run; ``defaults`` are those of its command.

    ``lr_scaling`` multiplies the learning rates by (global_batch_size / the command's default), or by its square root,
    which suits Adam-like optimizers (Malladi et al. 2022, arXiv 2205.10287).

    Raises:
        UserError: the warm-up is longer than the run, or the shape needs a known end.
    """
    if total_steps is None and args.lr_schedule != "constant":
        raise UserError(
            f"--train.lr_schedule {args.lr_schedule}: needs the length of the run, which --train.max_time alone does "
            "not define; add --train.max_steps, max_tokens or epochs, or use --train.lr_schedule constant"
        )
    ratio = args.global_batch_size / defaults.global_batch_size
    factor = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[args.lr_scaling]
    peak = args.learning_rate * factor
    if args.lr_schedule == "constant" and args.min_lr != AUTO:
        raise UserError(f"--train.min_lr {args.min_lr}: has no effect with --train.lr_schedule constant; leave one out")
    minimum = (args.learning_rate / 10 if args.min_lr == AUTO else args.min_lr) * factor
    if minimum > peak:
        raise UserError(f"--train.min_lr {args.min_lr}: above --train.learning_rate {args.learning_rate}")
    return Schedule(args.lr_schedule, peak, minimum, _warmup_steps(args, total_steps, defaults), total_steps)


def _warmup_steps(args: TrainArgs, total_steps: int | None, defaults: CommandDefaults) -> int:
    if args.lr_warmup_steps != AUTO:
        if total_steps is not None and args.lr_warmup_steps >= total_steps:
            raise UserError(
                f"--train.lr_warmup_steps {args.lr_warmup_steps}: must be less than the {total_steps} steps of the run"
            )
        return args.lr_warmup_steps
    fraction = args.lr_warmup_fraction
    if total_steps is None:
        if fraction:
            raise UserError(
                f"--train.lr_warmup_fraction {fraction}: needs the length of the run, which --train.max_time alone "
                "does not define; use --train.lr_warmup_steps"
            )
        return WARMUP_WITHOUT_HORIZON if fraction is None else 0
    if fraction is not None:
        return int(fraction * total_steps)
    return int(min(defaults.warmup * total_steps, defaults.max_warmup_steps))
