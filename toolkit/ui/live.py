"""Live display on a terminal: a progress bar and a table with fixed positions."""

import os
import sys
import weakref
from os import PathLike
from typing import IO, cast

from rich.columns import Columns
from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from toolkit.io.streams import SafeOutput
from toolkit.ui.formats import format_seconds
from toolkit.ui.progress import (
    STEP_METRICS,
    VALIDATION_METRICS,
    Metrics,
    ProgressDisplay,
    capitalized,
    label_values,
    validation_labels,
)

MAX_WIDTH = 79  # four cells per line; wider terminals leave the rest empty
PHASE_WIDTH = len("Validating")  # keeps the bar in place across phases

Cell = tuple[str, str]  # label, value
LABELS = {**STEP_METRICS, **VALIDATION_METRICS}
SHORT_LABELS = {"val_loss": "val loss", "val_bpb": "bits/byte"}  # the training loss is in the same column


class LiveProgress(ProgressDisplay):
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
        self._phase, self._phase_since = "Starting", self._pace.elapsed()
        self._step = 0
        self._metrics: Metrics = {}
        self._validation: list[Cell] = []
        self._saved: list[Cell] = []
        self._spinner = Spinner("dots" if self.console.encoding.startswith("utf") else "line", style="cyan")
        self._live = Live(
            console=self.console, get_renderable=lambda: self, refresh_per_second=4, vertical_overflow="crop"
        )
        self._live.start(refresh=True)
        _restore_output_in_children(self._live)

    def phase(self, text: str) -> None:
        self._pace.phase(text)
        self._phase, self._phase_since = capitalized(text), self._pace.elapsed()

    def _print(self, text: str) -> None:
        self.console.print(Text(text))

    def step(self, step: int, metrics: Metrics) -> None:
        self._pace.step(step, metrics)
        self._step, self._metrics = step, metrics

    def validation(self, step: int, metrics: Metrics) -> None:
        self._validation = [*_cells(metrics, "val_loss", "val_ppl", "val_bpb"), ("at step", f"{step:,}")]
        labels = "   ".join(validation_labels(metrics))
        self.console.print(Text.assemble((f"step {step:<7,} ", "dim"), ("validation ", "magenta"), labels))

    def checkpoint(self, step: int, path: str | PathLike[str]) -> None:
        self._saved = [("saved at", f"{step:,}")]

    def close(self) -> None:
        self._live.stop()

    def __rich__(self) -> Constrain:
        rows = [Padding(Columns(map(_draw_cell, row), padding=(0, 2)), (0, 0, 0, 1)) for row in self._rows() if row]
        if bottleneck := self._pace.bottleneck():
            rows.append(Padding(Text(bottleneck, style="yellow"), (0, 0, 0, 1)))
        # empty line between messages and display
        return Constrain(Group("", self._headline(), *rows), MAX_WIDTH)

    def _headline(self) -> Table:
        """Return the phase with a progress bar, or with a spinner before the first step or without a step limit."""
        grid = Table.grid(padding=(0, 1), expand=bool(self.total_steps and self._metrics))
        phase = Text(self._phase, style="bold cyan")
        if self.total_steps and self._metrics:
            for ratio in (None, None, 1, None):
                grid.add_column(ratio=ratio, no_wrap=True)
            phase.pad_right(max(0, PHASE_WIDTH - len(phase)))
            bar = ProgressBar(self.total_steps, self._step, complete_style="cyan", finished_style="green")
            # never "100%" before the last step is done
            percent = self._step * 100 // self.total_steps
            grid.add_row("", phase, bar, f"{self._step:,}/{self.total_steps:,}  {percent:>3}%")
        elif self._metrics:
            grid.add_row("", self._spinner, phase, f"step {self._step:,}")
        else:
            seconds = format_seconds(self._pace.elapsed() - self._phase_since)
            grid.add_row("", self._spinner, phase, Text(seconds, style="dim"))
        return grid

    def _rows(self) -> list[list[Cell]]:
        """Return rows of at most four cells: step, validation, time, hardware; none before the first step."""
        if not self._metrics:
            return []
        seconds_left = self._pace.seconds_left(self._step, self.total_steps)
        times = [("elapsed", format_seconds(self._pace.elapsed()))]
        if self.total_steps:
            times.append(("left", "..." if seconds_left is None else format_seconds(seconds_left)))
        return [
            _cells(self._metrics, "loss", "learning_rate", "grad_norm", "tokens_per_sec"),
            self._validation,
            times + _cells(self._metrics, "tokens") + self._saved,
            _cells(self._metrics, "mfu", "peak_memory_gb"),
        ]


def _cells(metrics: Metrics, *keys: str) -> list[Cell]:
    return label_values(metrics, {key: (SHORT_LABELS.get(key, LABELS[key][0]), LABELS[key][1]) for key in keys})


def _draw_cell(cell: Cell) -> Text:
    """Return a cell of 18 characters."""
    label, value = cell
    style = "bold" if label.endswith("loss") else ""
    return Text.assemble((f"{label:<10}", "dim"), (f"{value:>8}", style), no_wrap=True, overflow="crop")


def _restore_output_in_children(live: Live) -> None:
    """Restore the plain standard streams in forked processes (data loader workers).

    A child has no drawing thread, and may inherit the display's lock in locked state. A worker that prints a warning
    would deadlock.
    """
    reference = weakref.ref(live)

    def restore() -> None:
        if (display := reference()) is not None:
            display._disable_redirect_io()

    os.register_at_fork(after_in_child=restore)
