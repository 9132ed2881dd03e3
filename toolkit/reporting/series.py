"""Read metrics.csv leniently, and reduce its columns to a size that a page can hold."""

from __future__ import annotations

import math
import warnings
from typing import Any

from toolkit.ui.plots import smooth

AXES = ("step", "tokens")
MAX_POINTS = 60_000  # of all lines of a page; a point takes about 25 bytes
_NOISY = ("loss", "grad_norm", "tokens_per_sec", "mfu", "data_wait_s", "step_s")
Columns = dict[str, Any]  # name -> array of floats


def parse_metrics(content: bytes) -> tuple[Columns, int]:
    """Return the columns of a metrics.csv by name as float64 arrays, by ascending step, and the number of lost rows.

    Rows with another number of cells, with text, or without a step are lost. Empty cells are NaN. Any columns are
    accepted; the result is empty without a column ``step``.
    """
    import numpy as np

    header, _, body = content.decode(errors="replace").replace("\r", "").partition("\n")
    names = [name.strip() for name in header.split(",")]
    if "step" not in names:
        return {}, body.count("\n")
    lines = [line for line in body.split("\n") if line]
    whole = [line for line in lines if line.count(",") == len(names) - 1]
    table = _parse(whole, len(names))
    if table is None:
        rows = [row for line in whole if (row := _parse([line], len(names))) is not None]
        table = np.concatenate(rows) if rows else np.empty((0, len(names)))
    step = table[:, names.index("step")]
    table = table[np.isfinite(step) & (step >= 0)]
    table = table[np.argsort(table[:, names.index("step")], kind="stable")]
    columns = {name: table[:, i] for i, name in enumerate(names) if name}
    return {name: column for name, column in columns.items() if np.isfinite(column).any()}, len(lines) - len(table)


def _parse(lines: list[str], n_columns: int) -> Any:
    """Return an array (rows, columns); None if a cell is not a number."""
    import numpy as np

    text = ",".join(lines).replace(",,", ",nan,").replace(",,", ",nan,")
    text = ("nan" if text.startswith(",") else "") + text + ("nan" if text.endswith(",") else "")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # of a cell that is not a number
        try:
            values = np.fromstring(text, dtype=np.float64, sep=",")
        except (DeprecationWarning, ValueError):
            return None
    return values.reshape(-1, n_columns) if values.size == len(lines) * n_columns else None


def reduce_lines(columns: Columns, max_points: int) -> dict[str, dict[str, list[list[float]]]]:
    """Return {column: {"raw": points, "smooth": points}}, each column with at most ``max_points`` raw points.

    Points are three lists: steps, tokens, values. Of longer columns, the smallest and the largest value of each bucket
    of rows remain, so that no spike is lost. ``smooth`` is only of noisy columns.
    """
    lines = {}
    for name, column in columns.items():
        if name not in (*AXES, "seconds", "slowest_rank"):
            lines[name] = _reduce(columns, name, column, max_points)
    return lines


def _reduce(columns: Columns, name: str, column: Any, max_points: int) -> dict[str, list[list[float]]]:
    import numpy as np

    rows = np.flatnonzero(np.isfinite(column))
    values = column[rows]
    axes = [columns[axis][rows] if axis in columns else np.full(len(rows), math.nan) for axis in AXES]
    n_buckets = max(1, max_points // 2)
    is_noisy = name in _NOISY or (not name.startswith(("val_", "share_", "learning_rate", "peak_")))
    if len(rows) <= 2 * n_buckets:
        kept, means = np.arange(len(rows)), [*axes, values]
    else:
        starts = np.linspace(0, len(rows), n_buckets, endpoint=False).astype(int)
        ends = np.append(starts[1:], len(rows))
        pairs = zip(starts, ends, strict=True)
        extremes = [(s + values[s:e].argmin(), s + values[s:e].argmax()) for s, e in pairs]
        kept = np.unique([0, *np.ravel(extremes), len(rows) - 1])
        means = [np.add.reduceat(line, starts) / (ends - starts) for line in (*axes, values)]
    reduced = {"raw": [_plain(line[kept]) for line in (*axes, values)]}
    if is_noisy and len(means[2]) >= 8:
        smoothed = smooth(means[2].tolist())
        reduced["smooth"] = [_plain(means[0]), _plain(means[1]), _plain(np.array(smoothed))]
    return reduced


def _plain(values: Any) -> list[Any]:
    """Return numbers for JSON with 6 significant digits, counts in full; null for NaN."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")
