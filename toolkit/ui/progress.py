"""What a display of a run's progress needs: the interface, names of metrics, remaining time, a safe output."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import IO, Any

from toolkit.ui.formats import (
    format_count,
    format_learning_rate,
    format_loss,
    format_norm,
    format_perplexity,
)

# Metrics of a step: key, label, format.
STEP_METRICS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", format_loss),
    ("learning_rate", "lr", format_learning_rate),
    ("grad_norm", "grad norm", format_norm),
    ("tokens_per_sec", "tok/s", format_count),
    ("tokens", "tokens", format_count),
    ("mfu", "MFU", lambda share: f"{share:.1%}"),
    ("peak_memory_gb", "memory", lambda gigabytes: f"{gigabytes:.3g} GB"),
)
VALIDATION_METRICS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("val_loss", "loss", format_loss),
    ("val_ppl", "perplexity", format_perplexity),
    ("val_bpb", "bits per byte", lambda bits: f"{bits:.4f}"),
)


class Progress:
    """Progress reporter without output, base class of those that print. A context manager that closes itself."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps

    def phase(self, text: str) -> None:
        """Set the current phase, for example "Preparing data" or "Training"."""

    def message(self, text: str) -> None:
        """Print a permanent line."""

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show a completed optimizer step.

        Args:
            step: Number of completed steps, from 1.
            metrics: loss (nats per token), learning_rate, grad_norm, tokens_per_sec, tokens (so far), mfu (0 to 1) and
                peak_memory_gb; each may be missing or ``None``, others are ignored.
        """

    def validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show a validation result: val_loss (nats per token), val_ppl, val_bpb, val_loss_<source> where known."""

    def checkpoint(self, step: int, path: str | PathLike[str]) -> None:
        """Show that a checkpoint is complete on disk."""

    def close(self) -> None:
        """Show the last state and release the terminal. May be called twice."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def labeled(
    table: tuple[tuple[str, str, Callable[[float], str]], ...],
    metrics: Mapping[str, float | None],
    required: str | None = None,
) -> list[str]:
    """Return "label value" for each metric of ``table`` in ``metrics``; ``required`` must be among them."""
    assert required is None or required in metrics, f"{required} is not among {sorted(metrics)}"
    return [f"{label} {write(value)}" for key, label, write in table if (value := metrics.get(key)) is not None]


def validation_labels(metrics: Mapping[str, float | None]) -> list[str]:
    """Return "label value" for the metrics of a validation: of all held-out data, and the loss of each source."""
    prefix = "val_loss_"
    sources = [(key, f"{key.removeprefix(prefix)} loss", format_loss) for key in metrics if key.startswith(prefix)]
    return labeled((*VALIDATION_METRICS, *sources), metrics, required="val_loss")


class Pace:
    """Elapsed time and estimate of the remaining time.

    The time per step is smoothed over about the last half minute. Validation and saving are counted separately, as a
    fraction of the step time, so that one long validation neither distorts the estimate nor is ignored.
    """

    SMOOTHED_OVER_SECONDS = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._phase_since = clock()
        self._phase = self._phase_of_steps = ""
        self._step = 0
        self._step_end: float | None = None  # end of the last step, plus pauses since then
        self._recent_seconds = self._recent_steps = 0.0  # of steps, exponentially decayed
        self._active = self._paused = 0.0  # seconds since the first step

    def elapsed(self) -> float:
        """Seconds since the start of the run."""
        return self._clock() - self._start

    def phase(self, name: str) -> None:
        """Set the current phase. Every phase except that in which steps are reported is a pause."""
        now = self._clock()
        if self._step_end is not None and self._phase != self._phase_of_steps:
            self._paused += now - self._phase_since
            self._step_end += now - self._phase_since
        self._phase, self._phase_since = name, now

    def step(self, step: int) -> None:
        """Record that the steps up to ``step`` are done. Time before the first one (compilation) does not count."""
        now = self._clock()
        self._phase_of_steps = self._phase
        if self._step_end is not None and step > self._step:
            seconds = now - self._step_end
            decay = math.exp(-seconds / self.SMOOTHED_OVER_SECONDS)
            self._recent_seconds = self._recent_seconds * decay + seconds
            self._recent_steps = self._recent_steps * decay + step - self._step
            self._active += seconds
        self._step_end, self._step = now, step

    def seconds_left(self, step: int, total_steps: int | None) -> float | None:
        """Return the seconds from ``step`` to the end of the run, or ``None`` while unknown."""
        if total_steps is None or not self._recent_steps:
            return None
        pauses = self._paused / self._active if self._active > 0 else 0.0
        return max(total_steps - step, 0) * self._recent_seconds / self._recent_steps * (1 + pauses)


class SafeOutput:
    """Standard output whose failure does not stop a training: a closed pipe only silences it."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"  # None: io.StringIO

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
        except UnicodeEncodeError:
            self.write(text.encode(self.encoding, "replace").decode(self.encoding))
        except (OSError, ValueError):  # ValueError: the file is closed
            self._silence()
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except (OSError, ValueError):
            self._silence()

    def _silence(self) -> None:
        # The text is still buffered, and Python would report an error when it flushes at exit: redirect the descriptor
        # to /dev/null, as the Python documentation recommends for a broken pipe.
        with suppress(OSError, ValueError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._file.fileno())
            os.close(devnull)
