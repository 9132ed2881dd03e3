"""Compare runs after the same time, tokens or steps, and over seeds."""

import json
import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import numpy as np

from toolkit.ui.progress import STDERR
from toolkit_report.run import RunFacts

AXES = {"step": "steps", "tokens": "tokens", "seconds": "seconds of training"}
TOLERANCE = 0.02
"""Relative difference of what counts as equal. A run with a budget of time ends within a step of it."""
_NOT_COMPARED = ("seed", "out_dir", "staging_dir")


def compare(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Compare runs on the axis where they end most nearly together, at the end of the shortest one.

    Runs with budgets of time are compared over time. Runs that differ in their seed only are a group. Returns the
    values that tutorials/experiments.md describes.
    """
    ends = {axis: [last(run, axis) for run in runs] for axis in AXES}
    spreads = {axis: 1 - min(values) / max(values) for axis, values in ends.items() if all(v > 0 for v in values)}
    axis = min(spreads, key=spreads.__getitem__, default="step")  # the first one of equal spreads
    if "seconds" in spreads and all(time_budget(run) < math.inf for run in runs):
        axis = "seconds"
    end = min(ends[axis])
    groups: dict[str, list[tuple[RunFacts, dict[str, float]]]] = {}
    for number, run in enumerate(runs):
        settings = {name: value for name, value in run.settings.items() if name not in _NOT_COMPARED}
        key = json.dumps(settings or number, sort_keys=True, default=str)
        groups.setdefault(key, []).append((run, _values_at(run, axis, end)))
    first, members = next(iter(groups.values())), list(groups.values())
    heads = [group[0][0].settings for group in members]
    names = dict.fromkeys(name for values in heads for name in values if name not in _NOT_COMPARED)
    different = [name for name in names if any(values.get(name) != heads[0].get(name) for values in heads)]
    return {
        "title": f"Report: {', '.join(run.name for run in runs)}",
        "axis": axis,
        "end": end if spreads else None,
        "is_equal": axis in spreads and spreads[axis] <= TOLERANCE,
        "groups": [
            {
                "name": group[0][0].name,
                "settings": {name: group[0][0].settings.get(name) for name in different},
                "metrics": {
                    name: estimate([v[name] for _, v in group], None if group is first else [v[name] for _, v in first])
                    for name in group[0][1]
                    if all(name in values for _, values in [*group, *first])
                },
                "runs": [
                    {"name": run.name, "place": run.place, "status": run.status, "seed": run.settings.get("seed"),
                     "metrics": values, "command": run.command}
                    for run, values in group
                ],
            }
            for group in members
        ],
    }  # fmt: skip


def render_json(runs: Sequence[RunFacts]) -> str:
    """Return the comparison as JSON."""
    return json.dumps(compare(runs), indent=2, default=str) + "\n"


def estimate(values: Sequence[float], baseline: Sequence[float] | None = None) -> dict[str, float | None]:
    """Return mean and difference from the mean of ``baseline``, with standard errors; None with one value."""
    errors: list[Any] = [stdev(v) / math.sqrt(len(v)) if len(v) > 1 else None for v in (values, baseline or ())]
    return {
        "mean": mean(values),
        "stderr": errors[0],
        "difference": None if baseline is None else mean(values) - mean(baseline),
        "difference_stderr": None if None in errors else math.hypot(*errors),
    }


def finite(run: RunFacts, column: str) -> Any:
    """Return the finite values of a column."""
    values = _column(run, column)
    return values[np.isfinite(values)]


def _column(run: RunFacts, column: str) -> Any:
    """Return a column. The last step of a budget of time may end after it, and counts as at its end."""
    values = run.columns.get(column, np.array(math.nan))
    return np.minimum(values, time_budget(run)) if column == "seconds" else values


def time_budget(run: RunFacts) -> float:
    """Return the seconds of a run's budget of time; infinity without one."""
    minutes, limits = run.settings.get("train.max_time"), ("max_steps", "max_tokens", "epochs")
    has_limit = any(run.settings.get(f"train.{name}") is not None for name in limits)
    return 60 * minutes if isinstance(minutes, int | float) and not has_limit else math.inf


def last(run: RunFacts, column: str) -> float:
    """Return the last finite value of a column; NaN without one."""
    values = finite(run, column)
    return float(values[-1]) if len(values) else math.nan


def _values_at(run: RunFacts, axis: str, end: float) -> dict[str, float]:
    """Return the axes, the losses and the other metrics of validations at ``end``, and the median tokens/s."""
    values = {}
    rows = _column(run, axis) <= end * (1 + TOLERANCE)
    for name, column in run.columns.items():
        if name in (*AXES, "loss", "tokens_per_sec") or (name.startswith("val_") and not name.endswith(STDERR)):
            column = column[np.isfinite(column) & rows]
            if len(column):
                values[name] = float(np.median(column) if name == "tokens_per_sec" else column[-1])
    return values
