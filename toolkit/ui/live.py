"""Live display on a terminal: a progress bar, the numbers at fixed positions, and what the run waits for."""

import os
import sys
from typing import IO, cast

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from toolkit.escape import printable, visible
from toolkit.io.streams import SafeOutput, unescaped
from toolkit.ui.formats import format_seconds
from toolkit.ui.progress import (
    STEP_METRICS,
    Metrics,
    ProgressDisplay,
    capitalized,
    label_values,
    validation_labels,
)

MAX_WIDTH = 79  # four cells per line; wider terminals leave the rest empty


class LiveProgress(ProgressDisplay):
    """Draws the latest state in a separate thread; the training thread only stores numbers."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        # no highlight, markup or emoji: texts contain paths such as "runs/[a]"
        self.console = console or Console(
            file=cast("IO[str]", SafeOutput(unescaped(sys.stdout))),
            force_terminal=True,
            force_interactive=True,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._phase, self._phase_since = "Starting", self._pace.elapsed()
        self._step = 0
        self._metrics: Metrics = {}
        self._validation = Text()
        self._saved: list[tuple[str, str]] = []
        # as wide as "Validating", which keeps the bar in place across phases
        phase = TextColumn("{task.description:10}", style="bold cyan", markup=False)
        bar = BarColumn(None, complete_style="cyan", finished_style="green", pulse_style="cyan")
        self._bar = Progress(phase, bar, TextColumn("{task.fields[done]}"), console=self.console)
        self._task = self._bar.add_task(self._phase, total=None)
        self._live = Live(
            console=self.console, get_renderable=lambda: self, refresh_per_second=4, vertical_overflow="crop"
        )
        self._live.start(refresh=True)
        # A forked child (a data loader worker) has no drawing thread, and may inherit the display's lock in locked
        # state: a worker that prints a warning would deadlock. It gets the plain standard streams.
        os.register_at_fork(after_in_child=self._live._disable_redirect_io)

    def phase(self, text: str) -> None:
        super().phase(text)
        self._phase, self._phase_since = capitalized(visible(text)), self._pace.elapsed()

    def _print(self, text: str) -> None:
        self.console.print(Text(printable(text)))

    def step(self, step: int, metrics: Metrics) -> None:
        super().step(step, metrics)
        self._step, self._metrics = step, metrics

    def validation(self, step: int, metrics: Metrics) -> None:
        labels = visible("   ".join(validation_labels(metrics, self.metric_names)))
        self._validation = Text.assemble((f"step {step:<7,} ", "dim"), ("validation ", "magenta"), labels)
        self.console.print(self._validation)

    def checkpoint(self, step: int, path: object) -> None:
        self._saved = [("saved at", f"{step:,}")]

    def close(self) -> None:
        self._live.stop()

    def __rich__(self) -> RenderableType:
        total, elapsed = self.total_steps, self._pace.elapsed()
        done = format_seconds(elapsed - self._phase_since)
        lines: list[RenderableType] = []
        if self._metrics:
            # never "100%" before the last step is done
            done = f"{self._step:,}/{total:,}  {self._step * 100 // total:>3}%" if total else f"step {self._step:,}"
            cells = [*label_values(self._metrics, STEP_METRICS), ("elapsed", format_seconds(elapsed))]
            if total:
                seconds_left = self.seconds_left(self._step)
                cells.append(("left", "..." if seconds_left is None else format_seconds(seconds_left)))
            lines = [Columns(map(_draw_cell, cells + self._saved), padding=(0, 2)), self._validation]
            lines.append(Text(self._pace.bottleneck(), style="yellow"))
        # without a total (before the first step, or without a step limit), the bar pulses
        total = total if self._metrics else None
        self._bar.update(self._task, description=self._phase, completed=self._step, total=total, done=done)
        # empty line between messages and display
        return Constrain(Padding(Group(self._bar, *(line for line in lines if line)), (1, 0, 0, 1)), MAX_WIDTH)


def _draw_cell(cell: tuple[str, str]) -> Text:
    """Return a cell of 18 characters."""
    label, value = cell
    style = "bold" if label == "loss" else ""
    return Text.assemble((f"{label:<10}", "dim"), (f"{value:>8}", style), no_wrap=True, overflow="crop")
