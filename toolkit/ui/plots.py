"""Plot the loss of a run."""

import io
import math
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.errors import UserError
from toolkit.io.atomic import write_atomic
from toolkit.ui.formats import format_count, format_loss, format_perplexity
from toolkit.ui.loggers import read_metrics

Point = tuple[float, float]  # tokens, loss in nats per token


def plot_loss(csv_path: str | Path, png_path: str | Path) -> bool:
    """Plot training loss (each step and smoothed) and validation loss over tokens. Return whether it was written.

    Return False without matplotlib, with fewer than two losses, or if a file is not readable or writable. A run must
    not fail because of a plot.
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
    """Smooth losses with a running median of five against spikes, then two passes of a running mean.

    The windows are centered; a trailing mean would lag where the loss falls steeply. They cover about a tenth of the
    run. At the end of the run, only the left half of each window remains.
    """
    smoothed = [median(losses[first:end]) for first, end in _windows(len(losses), 2 if len(losses) >= 40 else 0)]
    for _ in range(2):
        sums = list(accumulate(smoothed, initial=0.0))  # prefix sums: constant cost per window
        smoothed = [(sums[end] - sums[i]) / (end - i) for i, end in _windows(len(losses), len(losses) // 40)]
    return smoothed


def _windows(length: int, radius: int) -> list[tuple[int, int]]:
    """Return the window [first, end) around each index, never wider to the right than to the left."""
    return [(i - min(radius, i), min(i + min(radius, i) + 1, length)) for i in range(length)]


def loss_limits(losses: list[float], validation_losses: list[float]) -> tuple[float, float]:
    """Return the y-axis limits for training losses in step order and ``validation_losses``, which stay visible.

    The range covers all losses, unless the first twentieth or a few spikes would take more than two thirds of the
    height. These are cut off at the top.
    """
    rest = sorted(losses[len(losses) // 20 :])
    low = min([rest[0], *validation_losses])
    usual = max([rest[math.ceil(len(rest) * 0.99) - 1], *validation_losses])
    high = max(losses)
    if high - low > 3 * (usual - low) > 0:
        high = low + 1.5 * (usual - low)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _points(rows: list[dict[str, float]], column: str) -> list[Point]:
    return [(row["tokens"], row[column]) for row in rows if math.isfinite(row["tokens"]) and math.isfinite(row[column])]


def _draw(training: list[Point], validation: list[Point], rows: list[dict[str, float]]) -> bytes:
    """Draw the plot and return PNG bytes."""
    # without pyplot: no window system and no global state, for any backend
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    tokens, losses = (list(values) for values in zip(*training, strict=True))
    last_token = max([*tokens, *(t for t, _ in validation)])
    smoothed = smooth(losses)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes: Any = figure.add_subplot(xlabel="tokens", ylabel="loss (nats per token)", xlim=(0, last_token * 1.015))
    axes.plot(tokens, losses, color="#b3c7e0", linewidth=0.9, label="training, each step")
    axes.plot(tokens, smoothed, color="#1f5fa8", linewidth=2.2, label="training, smoothed")
    if validation:
        style, size = "-" if len(validation) > 100 else "o", 4.5 if len(validation) > 20 else 7.5
        points = zip(*validation, strict=True)
        axes.plot(*points, style, color="#d9480f", markeredgecolor="white", markersize=size, label="validation")
    low, high = loss_limits(losses, [loss for t, loss in validation if t > 0])
    axes.set_ylim(low, high)
    if losses[0] > high:
        place = next(t for t, loss in training if loss <= high), high
        axes.annotate(f"from {losses[0]:.2f}", place, (14, -12), textcoords="offset points", fontsize=9)
    ticks = EngFormatter(sep="")
    ticks.ENG_PREFIXES = EngFormatter.ENG_PREFIXES | {9: "B"}
    axes.xaxis.set_major_formatter(ticks)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(color="#e3e7ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    axes.set_title(_title(tokens[-1], losses[-1], rows), fontsize=11, loc="left", pad=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _title(tokens: float, training_loss: float, rows: list[dict[str, float]]) -> str:
    title = f"{format_count(tokens)} tokens: training loss {format_loss(training_loss)}"
    validation_rows = [row for row in rows if math.isfinite(row["val_loss"])]
    if not validation_rows:
        return title
    loss, ppl, bpb = (validation_rows[-1][name] for name in ("val_loss", "val_ppl", "val_bpb"))
    details = [f"perplexity {format_perplexity(ppl)}"] if math.isfinite(ppl) else []
    details += [f"{bpb:.4f} bits per byte"] if math.isfinite(bpb) else []
    return f"{title}, validation {format_loss(loss)}" + (f" ({', '.join(details)})" if details else "")
