"""N5 sane-schedule-and-decay: the LR schedule, a pure function of the step, or of the used share of a time budget."""

import math
from dataclasses import dataclass

from toolkit.config import AUTO, CommandDefaults, TrainArgs
from toolkit.errors import UserError

WSD_DECAY_FRACTION = 0.2
"""Decay phase of a warm-up-stable-decay schedule, as a fraction of the run."""

MIN_WARMUP = 0.01
"""Smallest learning rate of a warm-up over time, as a fraction of the peak: the first step begins at time 0."""


@dataclass(frozen=True)
class Schedule:
    """The LR schedule over ``total_steps`` optimizer steps, or over ``total_seconds`` of training.

    The warm-up is ``warmup_steps``, or ``warmup_fraction`` of the seconds.
    """

    shape: str
    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int | None
    total_seconds: float | None = None
    warmup_fraction: float | None = None

    def __str__(self) -> str:
        fraction = self.warmup_fraction
        warmup = f"{100 * fraction:.4g} % of the time" if fraction else f"{self.warmup_steps:,} steps"
        length = (
            f"{self.total_steps:,} steps" if self.total_seconds is None else f"{self.total_seconds / 60:.4g} minutes"
        )
        shape = self.shape if self.shape == "constant" else f"{self.shape} to {self.minimum:.3g}"
        return f"peak learning rate {self.peak:.3g} after a warm-up of {warmup}, {shape} over {length}"

    def learning_rate(self, step: int, seconds: float = 0.0) -> float:
        """Return the learning rate of update ``step``, counted from 0, which begins after ``seconds`` of training.

        The linear warm-up starts above zero and reaches the peak at its last step. The schedule ends at the minimum.
        """
        if self.total_seconds is not None:
            share = min(seconds / self.total_seconds, 1.0)
            start = fraction = self.warmup_fraction or 0.0
            if self.shape == "wsd":
                start = max(start, 1 - WSD_DECAY_FRACTION)
            warmup = max(MIN_WARMUP, share / fraction) if fraction else (step + 1) / max(1, self.warmup_steps)
            # not one after the other: a warm-up in steps may be longer than the run
            return min(self.peak * min(1.0, warmup), self._decay((share - start) / (1 - start)))
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        assert self.total_steps is not None
        start = self.warmup_steps
        if self.shape == "wsd":
            start = max(start, self.total_steps - max(1, round(WSD_DECAY_FRACTION * self.total_steps)))
        return self._decay((step - start) / max(1, self.total_steps - 1 - start))

    def _decay(self, progress: float) -> float:
        if self.shape == "constant":
            return self.peak
        progress = min(max(0.0, progress), 1.0)
        factor = 0.5 * (1 + math.cos(math.pi * progress)) if self.shape == "cosine" else 1 - progress
        return self.minimum + (self.peak - self.minimum) * factor


@dataclass(frozen=True)
class LRScaling:
    """Scaling of learning rates and warm-up for ``--train.lr_scaling``.

    The schedule was tuned for a batch of ``base`` sequences; the run's batch is ``ratio`` times as large. Learning
    rates are multiplied by ``factor``: the ratio for SGD (Goyal et al. 2017, arXiv 1706.02677), its square root for
    Adam and other adaptive optimizers (Granziol et al. 2022, arXiv 2006.09092; Malladi et al. 2022, arXiv 2205.10287).
    Warm-up steps are divided by the ratio, because each step has more samples. Both rules hold up to the critical
    batch size. Betas and eps, which Malladi et al. also scale, are unchanged.
    """

    base: int
    ratio: float
    factor: float

    def scale_steps(self, steps: int) -> int:
        """Return the steps that process the samples of ``steps`` base batches; at least 1, unless ``steps`` is 0."""
        return 0 if steps == 0 else max(1, round(steps / self.ratio))


def lr_scaling(args: TrainArgs, defaults: CommandDefaults) -> LRScaling:
    """Return the scaling of a run's learning rates and warm-up."""
    base = defaults.global_batch_size if args.lr_base_batch == AUTO else args.lr_base_batch
    ratio = args.global_batch_size / base
    if args.lr_scaling == "none":
        return LRScaling(base, 1.0, 1.0)
    return LRScaling(base, ratio, math.sqrt(ratio) if args.lr_scaling == "sqrt" else ratio)


def describe_scaling(args: TrainArgs, schedule: Schedule, defaults: CommandDefaults) -> str | None:
    """Describe what ``--train.lr_scaling`` changed; None without it."""
    if args.lr_scaling == "none":
        return None
    scaling = lr_scaling(args, defaults)
    samples = schedule.warmup_steps * args.global_batch_size
    warmup = "" if schedule.warmup_fraction else f", warm-up {schedule.warmup_steps} steps ({samples:,} samples)"
    return (
        f"LR scaling {args.lr_scaling}: global batch {args.global_batch_size} / {scaling.base} = {scaling.ratio:.4g}; "
        f"peak learning rate {args.peak_learning_rate:.3g} x {scaling.factor:.4g} = {schedule.peak:.3g}{warmup}"
    )


def build_schedule(args: TrainArgs, total_steps: int | None, defaults: CommandDefaults) -> Schedule:
    """Build a run's LR schedule, scaled to its global batch. ``defaults`` are the command's defaults.

    ``total_steps`` is None if only ``max_time`` limits the run.
    """
    scaling = lr_scaling(args, defaults)
    peak = args.peak_learning_rate * scaling.factor
    minimum = (args.peak_learning_rate / 10 if args.min_lr == AUTO else args.min_lr) * scaling.factor
    if minimum > peak:
        raise UserError(
            f"--train.min_lr {args.min_lr}: must not exceed --train.learning_rate {args.peak_learning_rate}"
        )
    steps, fraction = _warmup(args, scaling, total_steps, defaults)
    return Schedule(args.lr_schedule, peak, minimum, steps, total_steps, args.budget_seconds, fraction)


def _warmup(
    args: TrainArgs, scaling: LRScaling, total_steps: int | None, defaults: CommandDefaults
) -> tuple[int, float | None]:
    """Return the warm-up in steps, and as a fraction of a budget of time."""
    fraction = args.lr_warmup_fraction
    if args.lr_warmup_steps != AUTO:
        steps = scaling.scale_steps(args.lr_warmup_steps)
        if total_steps is not None and steps > total_steps:
            scaled = "" if steps == args.lr_warmup_steps else f" is {steps} at this global batch;"
            raise UserError(
                f"--train.lr_warmup_steps {args.lr_warmup_steps}:{scaled} must be at most the {total_steps} steps of "
                "the run"
            )
        return steps, None
    if total_steps is None:
        return 0, defaults.warmup if fraction is None else fraction
    if fraction is not None:
        return int(fraction * total_steps), None
    return int(min(defaults.warmup * total_steps, defaults.max_warmup_steps / scaling.ratio)), None
