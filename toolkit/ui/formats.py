"""Human-readable numbers for the progress display and the plots."""

import math


def format_loss(value: float) -> str:
    """Format a loss with four decimals (``3.2145``), or two from 10 on (``10.83``)."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def format_learning_rate(value: float) -> str:
    """Format a learning rate with two significant digits at constant width: ``3.9e-04``."""
    return f"{value:.1e}"


def format_norm(value: float) -> str:
    """Format a norm: ``0.87``, or scientific notation if very small or large."""
    return f"{value:.2f}" if value == 0 or 0.1 <= abs(value) < 1000 or not math.isfinite(value) else f"{value:.1e}"


def format_count(value: float) -> str:
    """Format a count with three significant digits and a unit: ``950``, ``12.3k``, ``5.24M``, ``1.00B``, ``15.0T``."""
    if not 999.5 <= abs(value) < math.inf:
        return f"{value:.0f}"
    units = {1e3: "k", 1e6: "M", 1e9: "B", 1e12: "T"}
    size = next((size for size in units if abs(value) < 999.5 * size), 1e12)
    return f"{value / size:#.3g}".rstrip(".") + units[size]


def format_perplexity(value: float) -> str:
    """Format a perplexity: ``27.14``, or as a count from 1,000 on (``50.3k``)."""
    return f"{value:.2f}" if value < 1000 else format_count(value)


def format_seconds(seconds: float) -> str:
    """Format a duration: ``5s``, ``1m 05s``, ``2h 03m``, ``3d 04h``."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
