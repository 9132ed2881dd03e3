"""The live display on a terminal: a bar and a small table of numbers that stand still while their values change."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Mapping
from os import PathLike

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from toolkit.ui.formats import format_count, format_seconds
from toolkit.ui.progress import STEP_METRICS, VALIDATION_METRICS, Pace, Progress, SafeOutput, capitalised, labelled

REFRESHES_PER_SECOND = 4

LABEL_WIDTH, VALUE_WIDTH, GAP = 10, 8, 2
CELL_WIDTH = LABEL_WIDTH + VALUE_WIDTH + GAP
MAX_WIDTH = 1 + 4 * CELL_WIDTH - GAP  # 79: four cells beside each other; wider terminals keep the rest empty

Cell = tuple[str, str]  # label, value
WRITTEN = {key: (label, write) for key, label, write in (*STEP_METRICS, *VALIDATION_METRICS)}
# the step's loss stands above it in the same column, so the validation's needs another name; and labels must be short
SHORT_LABELS = {"val_loss": "val loss", "val_bpb": "bits/byte"}


class LiveProgress(Progress):
    """Draws the newest state in a thread of its own; the training thread only stores numbers."""

    def __init__(self, total_steps: int | None, console: Console | None = None) -> None:
        super().__init__(total_steps)
        # highlight, markup and emoji are off: texts hold paths such as "runs/[a]", which must come out as they are
        self.console = console or Console(
            file=SafeOutput(sys.stdout), force_terminal=True, force_interactive=True,
            highlight=False, markup=False, emoji=False,
        )  # fmt: skip
        self._pace = Pace()
        self._phase = "Starting"
        self._phase_since = time.monotonic()
        self._step = 0
        self._metrics: Mapping[str, float | None] = {}
        self._validation: list[Cell] = []
        self._saved: int | None = None
        self._spinner = Spinner("dots" if _can_print("⠋", self.console.encoding) else "line", style="cyan")
        self._live = Live(
            console=self.console, get_renderable=lambda: self, refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )  # fmt: skip
        self._live.start(refresh=True)
        _leave_output_alone_in_children(self._live)

    def phase(self, text: str) -> None:
        self._pace.phase(text)
        self._phase, self._phase_since = capitalised(text), time.monotonic()

    def message(self, text: str) -> None:
        self.console.print(Text(text))

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._pace.step(step)
        self._step, self._metrics = step, metrics

    def validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        line = Text(f"step {step:<7,} ", style="dim")
        line.append("validation ", style="not dim magenta")
        line.append("   ".join(labelled(VALIDATION_METRICS, metrics, required="val_loss")), style="not dim")
        self._validation = [*_cells(("val_loss", "val_ppl", "val_bpb"), metrics), ("at step", f"{step:,}")]
        self.console.print(line)

    def checkpoint(self, step: int, path: str | PathLike[str]) -> None:
        self._saved = step

    def close(self) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH)
        yield Text()  # some air between the messages and the display
        yield self._headline(width)
        if self._metrics:
            yield from _table(self._rows(), width)

    def _headline(self, width: int) -> Table | Text:
        """The phase with a bar; before the first step, and where the end is unknown, with a spinner."""
        grid = Table.grid(padding=(0, 1))
        phase = Text(self._phase, style="bold cyan")
        if not self.total_steps or not self._metrics:
            detail = f"step {self._step:,}" if self._metrics else format_seconds(time.monotonic() - self._phase_since)
            grid.add_row("", self._spinner, phase, Text(detail, style="" if self._metrics else "dim"))
            return grid
        # never "100%" before the last step is done
        count = f"{self._step:,}/{self.total_steps:,}  {self._step * 100 // self.total_steps:>3}%"
        room = width - len(count) - max(len(self._phase), len("Validating")) - 4
        if room < 4:
            return Text.assemble(" ", phase, " ", count)
        bar = ProgressBar(self.total_steps, self._step, width=room, complete_style="cyan", finished_style="green")
        phase.pad_right(max(0, len("Validating") - len(phase)))
        grid.add_row("", phase, bar, count)
        return grid

    def _rows(self) -> list[list[Cell]]:
        """Rows of at most four cells: the step, the validation, the time, the machine."""
        left = self._pace.seconds_left(self._step, self.total_steps)
        times = [("elapsed", format_seconds(self._pace.elapsed()))]
        if self.total_steps:
            times.append(("left", "..." if left is None else format_seconds(left)))
        if self._metrics.get("tokens") is not None:
            times.append(("tokens", format_count(self._metrics["tokens"])))
        if self._saved is not None:
            times.append(("saved at", f"{self._saved:,}"))
        machine = _cells(("mfu", "peak_memory_gb"), self._metrics)
        step = _cells(("loss", "learning_rate", "grad_norm", "tokens_per_sec"), self._metrics)
        return [row for row in (step, self._validation, times, machine) if row]


def _cells(keys: tuple[str, ...], metrics: Mapping[str, float | None]) -> list[Cell]:
    known = [(key, *WRITTEN[key]) for key in keys if metrics.get(key) is not None]
    return [(SHORT_LABELS.get(key, label), write(metrics[key])) for key, label, write in known]


def _table(rows: list[list[Cell]], width: int) -> RenderResult:
    """Yield lines of equal cells, four, two or one beside each other, so that rows keep together on any width."""
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


def _leave_output_alone_in_children(live: Live) -> None:
    """Give forked processes (the workers of a data loader) the plain standard streams back.

    In a child there is no thread that draws, and the display's lock may have been copied while it was held:
    a worker that prints a warning would wait for it forever.
    """
    reference = weakref.ref(live)

    def restore() -> None:
        display = reference()
        if display is not None:
            display._disable_redirect_io()

    os.register_at_fork(after_in_child=restore)
