"""Describe the energy of a run from its events."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.io.safe_parse import read_bounded
from toolkit.ui.events import EVENTS, parse_events


def energy_of_run(out_dir: Path) -> str:
    """Describe the energy of the run in a folder, see :func:`describe_energy`."""
    try:
        return describe_energy(parse_events(read_bounded(out_dir / EVENTS, "log")))
    except (OSError, ValueError):
        return ""


def describe_energy(events: Iterable[dict[str, Any]]) -> str:
    """Return the energy of all launches of a run in Wh, by kind of device, and its cost if the last launch has a price.

    Empty if nothing could be read. An event has the joules of its launch so far, by kind; null if a device of the kind
    cannot be read.
    """
    launches = {str(event.get("launch")): event for event in events if event["kind"] == "energy"}.values()
    joules: dict[str, float] = {}
    for event in launches:
        for kind in event.keys() & {"GPUs", "CPUs"}:
            joules[kind] = joules.get(kind, 0.0) + _number(event[kind])
    total = sum(filter(math.isfinite, joules.values()))
    if all(map(math.isnan, joules.values())):
        return ""
    price = _number([*launches][-1].get("price"))
    cost = "" if math.isnan(price) else f"; {total / 3.6e6 * price:,.2f} at {price:g} per kWh"
    parts = ", ".join(f"{kind} {_format_wh(joules[kind])}" for kind in sorted(joules, reverse=True))
    return f"{_format_wh(total)} ({parts}){cost}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _format_wh(joules: float) -> str:
    return "not available" if math.isnan(joules) else f"{joules / 3600:,.2f} Wh"
