"""Plots of a run."""

from __future__ import annotations

import io
import math
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.errors import UserError
from toolkit.io.atomic import write_atomic
from toolkit.ui.formats import format_count, format_perplexity
from toolkit.ui.loggers import read_metrics

RAW, SMOOTH, VALIDATION, QUIET = "#b3c7e0", "#1f5fa8", "#d9480f", "#5f6b7a"
DPI = 150

Point = tuple[float, float]  # tokens, loss in nats per token


def plot_loss(csv_path: str | Path, png_path: str | Path) -> bool:
    """Plot the loss over tokens: each step, smoothed, and validation. The file is written atomically.

    Returns:
        Whether the plot was written. It is not without matplotlib, with fewer than two losses in the file, or if a file
        is not readable or writable: a run does not fail because of its plot.
    """
    try:
        rows = read_metrics(csv_path)
        training = _points(rows, "loss")
        if len(training) < 2:
            return False
        plot = _draw(training, _points(rows, "val_loss"), rows)
        write_atomic(Path(png_path), plot)
    except (ImportError, OSError, UserError):
        return False
    return True


def smooth(losses: list[float]) -> list[float]:
    """Smooth losses: running medians of five, which remove spikes, then running means.

    The windows are centered: a mean of past values would lag where the loss falls steeply. They cover about a tenth of
    the run, and shrink to their left half at its end.
    """
    radius = 2 if len(losses) >= 40 else 0
    without_spikes = [median(losses[first:end]) for first, end in _windows(len(losses), radius)]
    radius = len(losses) // 40
    return _running_means(_running_means(without_spikes, radius), radius)


def _windows(length: int, radius: int) -> list[tuple[int, int]]:
    """Return (first, end) around each index, never wider to the right than to the left."""
    return [(i - min(radius, i), min(i + min(radius, i) + 1, length)) for i in range(length)]


def _running_means(values: list[float], radius: int) -> list[float]:
    sums = list(accumulate(values, initial=0.0))  # prefix sums: constant cost per window
    return [(sums[end] - sums[first]) / (end - first) for first, end in _windows(len(values), radius)]


def loss_limits(losses: list[float], others: list[float]) -> tuple[float, float]:
    """Return the range of the loss axis, clipped so that the first losses do not flatten the rest of the curve.

    Args:
        losses: Training losses, in order.
        others: Losses that must be visible.

    Returns:
        Lowest and highest loss to show. This covers all losses, unless the first twentieth or a few spikes would take
        more than two thirds of the height; these are then cut off at the top.
    """
    rest = sorted(losses[len(losses) // 20 :])
    low = min([rest[0], *others])
    usual = max([rest[math.ceil(len(rest) * 0.99) - 1], *others])
    high = max(losses)
    if high - low > 3 * (usual - low) > 0:
        high = low + 1.5 * (usual - low)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _points(rows: list[dict[str, float]], column: str) -> list[Point]:
    return [(row["tokens"], row[column]) for row in rows if math.isfinite(row["tokens"]) and math.isfinite(row[column])]


def _draw(training: list[Point], validation: list[Point], rows: list[dict[str, float]]) -> bytes:
    """Return the plot as PNG."""
    # without pyplot: no window system and no global state, whatever the user's backend
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(8, 4.5), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens, losses = [t for t, _ in training], [loss for _, loss in training]
    smoothed = smooth(losses)
    axes.plot(tokens, losses, color=RAW, linewidth=0.9, label="training, each step")
    axes.plot(tokens, smoothed, color=SMOOTH, linewidth=2.2, label="training, smoothed")
    if validation:
        style = "o" if len(validation) <= 100 else "-"
        axes.plot(
            *zip(*validation, strict=True),
            style,
            color=VALIDATION,
            markeredgecolor="white",
            zorder=3,
            markersize=7.5 if len(validation) <= 20 else 4.5,
            label="validation",
        )
    low, high = loss_limits(losses, [loss for t, loss in validation if t > 0])
    axes.set_ylim(low, high)
    if losses[0] > high:
        enters = next(t for t, loss in training if loss <= high)
        axes.annotate(
            f"from {losses[0]:.2f}",
            (enters, high),
            xytext=(14, -12),
            textcoords="offset points",
            color=QUIET,
            fontsize=9,
        )
    _style_axes(axes, last_token=max(t for t, _ in [*training, *validation]))
    axes.set_title(_title(tokens[-1], smoothed[-1], rows), fontsize=11, loc="left", pad=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _style_axes(axes: Any, last_token: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(0, last_token * 1.015)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _tick(tokens)))
    axes.set_xlabel("tokens", labelpad=6)
    axes.set_ylabel("loss (nats per token)", labelpad=8)
    axes.grid(color="#e3e7ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab4bf")
    axes.tick_params(color="#aab4bf", labelcolor=QUIET)
    axes.legend(frameon=False, loc="upper right")


def _tick(tokens: float) -> str:
    """``2.50M`` is ``2.5M`` on an axis, ``2.00M`` is ``2M``."""
    text = format_count(tokens)
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def _title(tokens: float, training_loss: float, rows: list[dict[str, float]]) -> str:
    title = f"{format_count(tokens)} tokens: training loss {training_loss:.3f}"
    last = next((row for row in reversed(rows) if math.isfinite(row["val_loss"])), None)
    if last is None:
        return title
    title += f", validation {last['val_loss']:.3f}"
    details = []
    if math.isfinite(last["val_ppl"]):
        details.append(f"perplexity {format_perplexity(last['val_ppl'])}")
    if math.isfinite(last["val_bpb"]):
        details.append(f"{last['val_bpb']:.3f} bits per byte")
    return title + (f" ({', '.join(details)})" if details else "")
