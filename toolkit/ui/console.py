"""Show training progress on standard output: a live display on a terminal, plain lines elsewhere.

No call synchronizes with a device. On a terminal, a thread draws the latest numbers four times a second.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import IO

from toolkit.escape import printable, visible
from toolkit.io.streams import SafeOutput
from toolkit.ui.formats import format_seconds
from toolkit.ui.progress import (
    STEP_METRICS,
    Metrics,
    ProgressDisplay,
    capitalized,
    label_values,
    validation_labels,
)


def make_progress(enabled: bool, file: IO[str] | None = None) -> ProgressDisplay:
    """Create the progress display for standard output.

    Args:
        enabled: True on rank 0; other ranks print nothing.
        file: Write JSON lines here instead.
    """
    if not enabled:
        return ProgressDisplay()
    if file is not None:
        return JSONProgress(file)
    if sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        from toolkit.ui.live import LiveProgress

        return LiveProgress()
    return PlainProgress()


class PlainProgress(ProgressDisplay):
    """Plain lines without color, for pipes, files, and terminals without cursor control.

    Steps are printed at most once per second in the first minute and every ten seconds afterwards, plus the first and
    the last one. Everything else is printed immediately.
    """

    def __init__(self, file: IO[str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._file = SafeOutput(sys.stdout if file is None else file)
        self._printed_at = -math.inf
        self._unprinted: tuple[int, Metrics] | None = None
        self._announced: set[str] = set()

    def phase(self, text: str) -> None:
        super().phase(text)
        # after the first step, phases only alternate, and validation and saving print lines
        if self._printed_at < 0 and text not in self._announced:
            self._print(visible(capitalized(text)))
        self._announced.add(text)

    def _print(self, text: str) -> None:
        print(printable(text), file=self._file, flush=True)

    def step(self, step: int, metrics: Metrics) -> None:
        self._unprinted = step, metrics
        super().step(step, metrics)
        elapsed = self._pace.elapsed()
        if elapsed - self._printed_at >= (1 if elapsed < 60 else 10) or step == self.total_steps:
            self._print_step()

    def validation(self, step: int, metrics: Metrics) -> None:
        self._line(step, "validation " + ", ".join(validation_labels(metrics, self.metric_names)))

    def checkpoint(self, step: int, path: object) -> None:
        self._line(step, f"saved {path}")

    def close(self) -> None:
        if self._unprinted is not None:
            self._print_step()

    def _print_step(self) -> None:
        assert self._unprinted is not None
        step, metrics = self._unprinted
        elapsed, seconds_left = self._pace.elapsed(), self.seconds_left(step)
        labels = [f"{label} {value}" for label, value in label_values(metrics, STEP_METRICS)]
        remaining = f"{format_seconds(seconds_left)} left" if seconds_left else ""
        times = f"elapsed {format_seconds(elapsed)}", remaining, self._pace.bottleneck()
        self._line(step, *labels, *filter(None, times))
        self._printed_at, self._unprinted = elapsed, None

    def _line(self, step: int, *parts: str) -> None:
        total = f"/{self.total_steps}" if self.total_steps else ""
        line = " | ".join([f"{time.strftime('%Y-%m-%d %H:%M:%S')} step {step}{total}", *parts])
        self._print(visible(line))


class JSONProgress(ProgressDisplay):
    """One JSON object per line for programs: the kind of event, Unix time in seconds, and the event's values."""

    def __init__(self, file: IO[str]) -> None:
        super().__init__()
        self._file = SafeOutput(file)
        self._phase = ""

    def event(self, kind: str, **values: object) -> None:
        values = {"event": kind, "time": round(time.time(), 3), **values}
        # JSON has no NaN
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        print(json.dumps(finite, default=str), file=self._file, flush=True)

    def phase(self, text: str) -> None:
        if text != self._phase:
            super().phase(text)
        self._phase = text
