"""Read metrics.csv leniently, and reduce its columns to a size that a page can hold."""

import math
from array import array
from contextlib import suppress
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np

from toolkit.ui.progress import STDERR

Columns = dict[str, Any]  # name -> array of floats
Points = tuple[list[Any], ...]  # steps, tokens, seconds, values, and standard errors if there are any

MAX_COLUMNS = 1000
MIN_SMOOTHED = 40  # below, the smoothed line would hide the other
MAX_POINTS_OF_A_LINE = 2000
MAX_POINTS = 50_000  # of all lines of a page; a point takes about 30 bytes
_AXES = ("step", "tokens", "seconds")
_HIDDEN = (*_AXES, "slowest_rank")
_NOT_SMOOTHED = ("val_", "share_", "learning_rate", "peak_")


def parse_metrics(content: bytes) -> tuple[Columns, int]:
    """Return the columns of a metrics.csv by name as float64 arrays, by ascending step, and the number of lost rows.

    Rows with another number of cells, with text, or without a step are lost. Empty cells are NaN, and columns without
    a finite value are left out. Any columns are accepted; the result is empty without a column ``step``, or
    with more than :data:`MAX_COLUMNS`.
    """
    header, *lines = content.decode(errors="replace").replace("\r", "").split("\n")
    names, lines = [name.strip() for name in header.split(",")], [line for line in lines if line]
    if "step" not in names or len(names) > MAX_COLUMNS:
        return {}, len(lines)
    numbers = array("d")
    for line in lines:
        with suppress(ValueError):
            cells = [float(cell or "nan") for cell in line.split(",")]
            numbers.extend(cells if len(cells) == len(names) else ())
    table = np.array(numbers).reshape(-1, len(names))
    step = table[:, names.index("step")]
    table = table[np.isfinite(step) & (step >= 0)]
    table = table[np.argsort(table[:, names.index("step")], kind="stable")]
    columns = {name: table[:, i] for i, name in enumerate(names) if name and np.isfinite(table[:, i]).any()}
    return columns, len(lines) - len(table)


def reduce_lines(columns: Columns, max_points: int) -> dict[str, dict[str, Points]]:
    """Return {column: {"raw": points, "smooth": points}}, each with at most about ``max_points`` points.

    Of longer columns, the smallest and the largest value of each bucket of rows remain, so that no spike is lost.
    ``smooth`` is only of noisy columns with at least :data:`MIN_SMOOTHED` values.
    """
    shown = (name for name in columns if name not in _HIDDEN and not name.endswith(STDERR))
    return {name: _reduce(columns, name, max_points) for name in shown}


def _reduce(columns: Columns, name: str, max_points: int) -> dict[str, Points]:
    rows = np.flatnonzero(np.isfinite(columns[name]))
    missing = np.full(len(columns[name]), math.nan)
    names = [*_AXES, name, *({f"{name}{STDERR}"} & columns.keys())]
    lines = [columns.get(name, missing)[rows] for name in names]
    selected, means, values = np.arange(len(rows)), lines[:4], lines[3]
    if len(rows) > max_points:
        starts = np.linspace(0, len(rows), max_points // 2, endpoint=False).astype(int)
        ends = np.append(starts[1:], len(rows))
        extremes = [(s + values[s:e].argmin(), s + values[s:e].argmax()) for s, e in zip(starts, ends, strict=True)]
        selected = np.unique([0, *np.ravel(extremes), len(rows) - 1])
        means = [np.add.reduceat(line, starts) / (ends - starts) for line in means]
    reduced = {"raw": _points([line[selected] for line in lines])}
    if len(values) >= MIN_SMOOTHED and not name.startswith(_NOT_SMOOTHED):
        reduced["smooth"] = _points([*means[:-1], np.array(smooth(means[-1].tolist()))])
    return reduced


def _points(lines: list[Any]) -> Points:
    """Return numbers for JSON with 6 significant digits, whole numbers in full, null for NaN."""

    def number(value: float) -> float | None:
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")

    return tuple([number(value) for value in line.tolist()] for line in lines)


def smooth(losses: list[float]) -> list[float]:
    """Smooth losses with a running median of five against spikes, then two passes of a running mean.

    The windows are centered; a trailing mean would lag where the loss falls steeply. They cover about a tenth of the
    run. At the end of the run, only the left half of each window remains.
    """
    radius = 2 if len(losses) >= MIN_SMOOTHED else 0
    smoothed = [median(losses[first:end]) for first, end in _windows(len(losses), radius)]
    for _ in range(2):
        sums = list(accumulate(smoothed, initial=0.0))  # prefix sums: constant cost per window
        smoothed = [(sums[end] - sums[i]) / (end - i) for i, end in _windows(len(losses), len(losses) // MIN_SMOOTHED)]
    return smoothed


def _windows(length: int, radius: int) -> list[tuple[int, int]]:
    """Return the window [first, end) around each index, never wider to the right than to the left."""
    return [(i - min(radius, i), min(i + min(radius, i) + 1, length)) for i in range(length)]
