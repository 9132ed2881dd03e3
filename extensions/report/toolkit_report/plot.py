"""``loss.png``: the report's loss curves and figures as a picture."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.io.atomic import write_atomic
from toolkit_report.run import RunFacts
from toolkit_report.series import MAX_POINTS_OF_A_LINE, Points, reduce_lines
from toolkit_report.text import figures

PLOT = "loss.png"
_TITLE = ("tokens", "reward", "training loss", "validation loss", "perplexity", "bits per byte")


def plot_loss(run: RunFacts, path: Path) -> bool:
    """Plot training loss (each step and smoothed) and validation loss over tokens, or the reward if the run has one.

    Return whether it was written.

    Return False without matplotlib, or with fewer than two losses.
    """
    if not {"tokens", "loss"} <= run.columns.keys():
        return False
    has_tokens = np.isfinite(run.columns["tokens"])
    shown = "reward" if "reward" in run.columns else "loss"
    names = ("step", "tokens", shown, f"val_{shown}")
    columns = {name: column[has_tokens] for name, column in run.columns.items() if name in names}
    lines = reduce_lines(columns, MAX_POINTS_OF_A_LINE)
    if len(lines[shown]["raw"][-1]) < 2:
        return False
    values = figures(run)
    title = ", ".join(f"{label} {values[label]}" for label in _TITLE if label in values)
    ylabel = shown if run.settings.get("objective") else "loss (nats per token)"
    try:
        write_atomic(path, _draw(title, ylabel, *lines.values()))
    except ModuleNotFoundError:
        return False
    return True


def loss_limits(losses: list[float], validation_losses: list[float]) -> tuple[float, float]:
    """Return the y-axis limits for training losses in step order and ``validation_losses``, which stay visible.

    The range covers all losses, unless the first twentieth or a few spikes would take more than two thirds of the
    height. These are cut off at the top.
    """
    rest = [*losses[len(losses) // 20 :], *validation_losses]
    low, high = min(rest), max(losses)
    usual = max([np.quantile(rest, 0.99), *validation_losses])
    if high - low > 3 * (usual - low) > 0:
        high = low + 1.5 * (usual - low)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _draw(title: str, ylabel: str, loss: dict[str, Points], val_loss: dict[str, Points] | None = None) -> bytes:
    """Draw the plot and return PNG bytes."""
    # without pyplot: no window system and no global state, for any backend
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    _, tokens, _, losses = loss["raw"]
    _, val_tokens, _, val_losses = val_loss["raw"] if val_loss else ([], [], [], [])
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    limit = max(tokens + val_tokens) * 1.015
    axes: Any = figure.add_subplot(xlabel="tokens", ylabel=ylabel, xlim=(0, limit))
    rises = ylabel == "reward"  # from the first validation, which is far above the others if it is a loss
    low, high = loss_limits(losses, [loss for t, loss in zip(val_tokens, val_losses, strict=True) if t > 0 or rises])
    start = f", from {losses[0]:.2f}" if losses[0] > high else ""
    light, dark = {"color": "#b3c7e0", "linewidth": 0.9}, {"color": "#1f5fa8", "linewidth": 2.2}
    if len(losses) <= 100:  # the smoothed line would hide it
        light |= {"marker": ".", "zorder": 2.5}
    axes.plot(tokens, losses, **(light if "smooth" in loss else dark), label=f"training, each step{start}")
    if "smooth" in loss:
        axes.plot(*loss["smooth"][1::2], **dark, label="training, smoothed")
    if val_losses:
        size = 0 if len(val_losses) > 100 else 5
        axes.plot(val_tokens, val_losses, "o-", color="#d9480f", markersize=size, label="validation")
    axes.set_ylim(low, high)
    ticks = EngFormatter(sep="")
    ticks.ENG_PREFIXES = EngFormatter.ENG_PREFIXES | {9: "B"}
    axes.xaxis.set_major_formatter(ticks)
    axes.grid(color="#e3e7ec", linewidth=0.8)
    axes.legend(frameon=False, loc="lower right" if rises else "upper right")
    axes.set_title(title, fontsize=10, loc="left", pad=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
