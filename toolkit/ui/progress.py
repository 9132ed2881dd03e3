"""Base class and helpers of progress displays: metric labels, remaining time, safe output."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from toolkit.config.checks import take_notes
from toolkit.errors import one_line
from toolkit.ui.formats import (
    format_count,
    format_learning_rate,
    format_loss,
    format_norm,
    format_perplexity,
)

Metrics = Mapping[str, float | None]
Labels = Mapping[str, tuple[str, Callable[[float], str]]]

STEP_METRICS: Labels = {
    "loss": ("loss", format_loss),
    "reward": ("reward", "{:.3g}".format),
    "learning_rate": ("lr", format_learning_rate),
    "grad_norm": ("grad norm", format_norm),
    "tokens_per_sec": ("tok/s", format_count),
    "tokens": ("tokens", format_count),
    "mfu": ("MFU", lambda mfu: f"{mfu:.1%}"),
    "peak_memory_gb": ("memory", lambda gigabytes: f"{gigabytes:.3g} GB"),
    "accuracy": ("accuracy", "{:.3f}".format),
    "reward_margin": ("margin", "{:.3g}".format),
}
"""Label and format of each metric."""
MIN_SHARE = 0.05
"""Share of the time from which on a part of the run is named, see :meth:`Pace.bottleneck`."""
STDERR = "_stderr"
"""End of the name of a metric's standard error."""
_SOURCE = "val_loss_"
VALIDATION_METRICS: Labels = {
    "val_loss": ("loss", format_loss),
    "val_ppl": ("perplexity", format_perplexity),
    "val_bpb": ("bits per byte", lambda bits: f"{bits:.4f}"),
}


class ProgressDisplay:
    """Base class of progress displays. Prints nothing, and reports everything as an :meth:`event`.

    As a context manager, it closes on exit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps: int | None = None
        """Optimizer steps of the run, including earlier launches; None if another limit ends it, or not yet known."""
        self.metric_names: list[str] = []
        """Metrics of validations that callbacks and the objective add, see :func:`metric_names`."""
        self.remarks = take_notes()
        """Notes and warnings that were printed, for the report."""
        self._pace = Pace(clock)

    def phase(self, text: str) -> None:
        """Set the current phase, for example "preparing data" or "training"."""
        self._pace.phase(text)
        self.event("phase", phase=text)

    def message(self, text: str) -> None:
        """Print a permanent line. ``remarks`` keeps notes and warnings."""
        if text.startswith(("note: ", "warning: ")):
            self.remarks.append(text)
        self._print(text)

    def _print(self, text: str) -> None:
        """Print a permanent line."""
        self.event("note", text=text)

    def step(self, step: int, metrics: Metrics) -> None:
        """Show a completed optimizer step, counted from 1. :data:`STEP_METRICS` may be missing or None."""
        self._pace.step(step, metrics)
        self.event("step", **{**metrics, "step": step, "total_steps": self.total_steps})

    def seconds_left(self, step: int) -> float | None:
        """Estimate the seconds from ``step`` to the end of the run. Return ``None`` while unknown."""
        return self._pace.seconds_left(step, self.total_steps)

    def validation(self, step: int, metrics: Metrics) -> None:
        """Show a validation: what it has of val_loss, val_ppl, val_bpb, val_loss_<source>, ``metric_names``."""
        self.event("validation", step=step, **metrics)

    def checkpoint(self, step: int, path: object) -> None:
        """Show that a checkpoint is complete on disk."""
        self.event("checkpoint", step=step, path=str(path))

    def event(self, kind: str, **values: object) -> None:
        """Report a change of the run to programs, for example ``event("start", out_dir="out")``."""

    def close(self) -> None:
        """Show the final state and release the terminal. May be called twice."""

    def __enter__(self) -> ProgressDisplay:
        self._show_warning, warnings.showwarning = warnings.showwarning, self._record_warning
        return self

    def __exit__(self, *error: object) -> None:
        warnings.showwarning = self._show_warning
        self.close()

    def _record_warning(self, message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        self.remarks.append(f"{category.__name__}: {one_line(message)}")
        self._show_warning(message, category, *where, **options)


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def label_values(metrics: Metrics, labels: Labels) -> list[tuple[str, str]]:
    """Return (label, formatted value) pairs, without missing metrics."""
    return [(label, write(value)) for key, (label, write) in labels.items() if (value := metrics.get(key)) is not None]


def validation_labels(metrics: Metrics, names: Iterable[str] = ()) -> list[str]:
    """Return "label value" strings of a validation: overall metrics, the loss of each source, ``names``."""
    sources = {k: (f"{k.removeprefix(_SOURCE)} loss", format_loss) for k in metrics if k.startswith(_SOURCE)}
    labels = [f"{label} {value}" for label, value in label_values(metrics, {**VALIDATION_METRICS, **sources})]
    return labels + [f"{metric_label(name)} {format_metric(name, metrics)}" for name in names if name in metrics]


def metric_names(columns: Collection[str]) -> list[str]:
    """Return the columns of metrics.csv that callbacks add to validations, without standard errors.

    Parts of an objective are not among them if they have a column for training, too.
    """
    return [
        name
        for name in columns
        if name.startswith("val_")
        and not name.startswith(_SOURCE)
        and not name.endswith(STDERR)
        and name not in VALIDATION_METRICS
        and name.removeprefix("val_") not in columns
    ]


def metric_label(name: str) -> str:
    return name.removeprefix("val_").replace("_", " ")


def format_metric(name: str, metrics: Metrics) -> str:
    """Return a value with its standard error, if there is one."""
    values = metrics[name], metrics.get(f"{name}{STDERR}")
    return " ± ".join(f"{value:.4g}" for value in values if value is not None)


class Pace:
    """Measures elapsed time and estimates remaining time.

    The time per step is smoothed over about the last half minute. Validation and saving are counted separately, as a
    fraction of the step time; one long validation does not distort the estimate.
    """

    SMOOTHED_OVER_SECONDS = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._phase_since = clock()
        self._phase = self._phase_of_steps = ""
        self._step = 0
        self._step_end: float | None = None  # end of the last step, plus pauses since then
        self._recent_seconds = self._recent_steps = 0.0  # of steps, exponentially decayed
        self._active = 0.0  # seconds of steps since the first one
        self._recent_wait = 0.0  # for data, decayed like the seconds of steps
        self._pauses: dict[str, float] = {}  # seconds since the first step, by phase

    def elapsed(self) -> float:
        """Return the seconds since the start of the run."""
        return self._clock() - self._start

    def phase(self, name: str) -> None:
        """Set the current phase. Every phase except the one in which steps are reported is a pause."""
        now = self._clock()
        if self._step_end is not None and self._phase != self._phase_of_steps:
            seconds = now - self._phase_since
            self._pauses[self._phase] = self._pauses.get(self._phase, 0.0) + seconds
            self._step_end += seconds
        self._phase, self._phase_since = name, now

    def step(self, step: int, metrics: Metrics | None = None) -> None:
        """Record that the steps up to ``step`` are done. Time before the first step (compilation) does not count.

        ``metrics`` may have data_wait_s: the mean seconds per step that the slowest rank waited for data.
        """
        now = self._clock()
        self._phase_of_steps = self._phase
        if self._step_end is not None and step > self._step:
            seconds = now - self._step_end
            decay = math.exp(-seconds / self.SMOOTHED_OVER_SECONDS)
            self._recent_seconds = self._recent_seconds * decay + seconds
            self._recent_steps = self._recent_steps * decay + step - self._step
            wait = ((metrics or {}).get("data_wait_s") or 0.0) * (step - self._step)
            self._recent_wait = self._recent_wait * decay + wait
            self._active += seconds
        self._step_end, self._step = now, step

    def seconds_left(self, step: int, total_steps: int | None) -> float | None:
        """Estimate the seconds from ``step`` to the end of the run. Return ``None`` while unknown."""
        if total_steps is None or not self._recent_steps:
            return None
        pauses = sum(self._pauses.values()) / self._active if self._active > 0 else 0.0
        return max(total_steps - step, 0) * self._recent_seconds / self._recent_steps * (1 + pauses)

    def bottleneck(self) -> str:
        """Describe the part other than computation that takes most time, if it is over 5 %; otherwise return "".

        Waiting for data is measured over about the last half minute, pauses since the first step. Communication is not
        measured: it overlaps with computation.
        """
        pauses = dict(self._pauses)  # the display has a thread
        total = self._active + sum(pauses.values())
        if not self._recent_seconds or total <= 0:
            return ""
        shares = {phase: seconds / total for phase, seconds in pauses.items()}
        shares["waiting for data"] = self._recent_wait / self._recent_seconds * self._active / total
        part = max(shares, key=shares.__getitem__)
        return f"{part}: {100 * shares[part]:.0f} % of the time" if shares[part] > MIN_SHARE else ""
