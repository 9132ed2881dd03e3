"""Pictures of a run."""

from __future__ import annotations

import importlib.util
import io
import math
from pathlib import Path

from toolkit.ui.files import write_whole
from toolkit.ui.loggers import read_metrics

RAW, SMOOTH, HELD_OUT = "#9db7d5", "#1f5fa8", "#d9480f"


def plot_loss(csv_path: str | Path, png_path: str | Path) -> bool:
    """Draw loss over tokens: raw and smoothed training loss, and the validation points.

    Returns:
        Whether a picture was drawn: not without matplotlib, nor with fewer than two rows.
    """
    rows = [row for row in read_metrics(csv_path) if row["tokens"] > 0]
    trained = [(row["tokens"], row["loss"]) for row in rows if math.isfinite(row["loss"])]
    validated = [(row["tokens"], row["val_loss"]) for row in rows if math.isfinite(row["val_loss"])]
    if len(trained) < 2 or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens, losses = zip(*trained, strict=True)
    smoothed = smooth(list(losses))
    axes.plot(tokens, losses, color=RAW, linewidth=0.8, label="training, each step")
    axes.plot(tokens, smoothed, color=SMOOTH, linewidth=2, label="training, smoothed")
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color=HELD_OUT, markersize=5, linewidth=1, label="validation")
    title = f"training loss {smoothed[-1]:.3f}"
    if validated:
        title += f", validation loss {validated[-1][1]:.3f}"
    axes.set_title(title + f" after {EngFormatter(places=2, sep=' ')(tokens[-1])} tokens")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlim(left=0, right=tokens[-1] * 1.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_whole(Path(png_path), picture.getvalue())
    return True


def smooth(values: list[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the run, corrected for its start (as Adam's moments are)."""
    keep = 1 - 1 / max(2.0, len(values) / 50)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed
