"""Live display on a terminal: a progress bar and a table with fixed positions."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Mapping
from os import PathLike
from typing import IO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from toolkit.ui.formats import format_count, format_seconds
from toolkit.ui.progress import (
    STEP_METRICS,
    VALIDATION_METRICS,
    Pace,
    Progress,
    SafeOutput,
    capitalized,
    validation_labels,
)

REFRESHES_PER_SECOND = 4

LABEL_WIDTH, VALUE_WIDTH, GAP = 10, 8, 2
CELL_WIDTH = LABEL_WIDTH + VALUE_WIDTH + GAP
MAX_WIDTH = 1 + 4 * CELL_WIDTH - GAP  # 79: four cells per line; wider terminals leave the rest empty

Cell = tuple[str, str]  # label, value
FORMATS = {key: (label, write) for key, label, write in (*STEP_METRICS, *VALIDATION_METRICS)}
# the training loss is in the same column, so the validation loss needs another name; labels must be short
SHORT_LABELS = {"val_loss": "val loss", "val_bpb": "bits/byte"}


class LiveProgress(Progress):
    """Draws the latest state in a separate thread; the training thread only stores numbers."""

    def __init__(self, total_steps: int | None, console: Console | None = None) -> None:
        super().__init__(total_steps)
        # no highlight, markup or emoji: texts contain paths such as "runs/[a]"
        self.console = console or Console(
            file=cast("IO[str]", SafeOutput(sys.stdout)),
            force_terminal=True,
            force_interactive=True,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._pace = Pace()
        self._phase = "Starting"
        self._phase_since = time.monotonic()
        self._step = 0
        self._metrics: Mapping[str, float | None] = {}
        self._validation: list[Cell] = []
        self._saved: int | None = None
        self._spinner = Spinner("dots" if _can_print("⠋", self.console.encoding) else "line", style="cyan")
        self._live = Live(
            console=self.console,
            get_renderable=lambda: self,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)
        _restore_output_in_children(self._live)

    def phase(self, text: str) -> None:
        self._pace.phase(text)
        self._phase, self._phase_since = capitalized(text), time.monotonic()

    def message(self, text: str) -> None:
        self.console.print(Text(text))

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._pace.step(step)
        self._step, self._metrics = step, metrics

    def validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        line = Text(f"step {step:<7,} ", style="dim")
        line.append("validation ", style="not dim magenta")
        line.append("   ".join(validation_labels(metrics)), style="not dim")
        self._validation = [*_cells(("val_loss", "val_ppl", "val_bpb"), metrics), ("at step", f"{step:,}")]
        self.console.print(line)

    def checkpoint(self, step: int, path: str | PathLike[str]) -> None:
        self._saved = step

    def close(self) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH)
        yield Text()  # empty line between messages and display
        yield self._headline(width)
        if self._metrics:
            yield from _table(self._rows(), width)

    def _headline(self, width: int) -> Table | Text:
        """Return the phase with a bar, or with a spinner before the first step or without a known end."""
        grid = Table.grid(padding=(0, 1))
        phase = Text(self._phase, style="bold cyan")
        if not self.total_steps or not self._metrics:
            detail = f"step {self._step:,}" if self._metrics else format_seconds(time.monotonic() - self._phase_since)
            grid.add_row("", self._spinner, phase, Text(detail, style="" if self._metrics else "dim"))
            return grid
        # never "100%" before the last step is done
        count = f"{self._step:,}/{self.total_steps:,}  {self._step * 100 // self.total_steps:>3}%"
        bar_width = width - len(count) - max(len(self._phase), len("Validating")) - 4
        if bar_width < 4:
            return Text.assemble(" ", phase, " ", count)
        bar = ProgressBar(self.total_steps, self._step, width=bar_width, complete_style="cyan", finished_style="green")
        phase.pad_right(max(0, len("Validating") - len(phase)))
        grid.add_row("", phase, bar, count)
        return grid

    def _rows(self) -> list[list[Cell]]:
        """Return rows of at most four cells: step, validation, time, hardware."""
        left = self._pace.seconds_left(self._step, self.total_steps)
        times = [("elapsed", format_seconds(self._pace.elapsed()))]
        if self.total_steps:
            times.append(("left", "..." if left is None else format_seconds(left)))
        if (tokens := self._metrics.get("tokens")) is not None:
            times.append(("tokens", format_count(tokens)))
        if self._saved is not None:
            times.append(("saved at", f"{self._saved:,}"))
        hardware = _cells(("mfu", "peak_memory_gb"), self._metrics)
        step = _cells(("loss", "learning_rate", "grad_norm", "tokens_per_sec"), self._metrics)
        return [row for row in (step, self._validation, times, hardware) if row]


def _cells(keys: tuple[str, ...], metrics: Mapping[str, float | None]) -> list[Cell]:
    known = [(key, value, *FORMATS[key]) for key in keys if (value := metrics.get(key)) is not None]
    return [(SHORT_LABELS.get(key, label), write(value)) for key, value, label, write in known]


def _table(rows: list[list[Cell]], width: int) -> RenderResult:
    """Yield lines of equal cells, four, two or one per line, so that rows stay aligned at any width."""
    fitting = (width - 1 + GAP) // CELL_WIDTH
    per_line = 4 if fitting >= 4 else 2 if fitting >= 2 else 1
    for row in rows:
        for start in range(0, len(row), per_line):
            line = Text(" ", no_wrap=True, overflow="crop")
            for label, value in row[start : start + per_line]:
                line.append(f"{label:<{LABEL_WIDTH}}", style="dim")
                line.append(f"{value:>{VALUE_WIDTH}}{' ' * GAP}", style="bold" if label.endswith("loss") else "")
            line.rstrip()
            yield line


def _can_print(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _restore_output_in_children(live: Live) -> None:
    """Restore the plain standard streams in forked processes (data loader workers).

    A child has no drawing thread, and it may have inherited the display's lock while locked: a worker that prints a
    warning would wait forever.
    """
    reference = weakref.ref(live)

    def restore() -> None:
        display = reference()
        if display is not None:
            display._disable_redirect_io()

    os.register_at_fork(after_in_child=restore)
