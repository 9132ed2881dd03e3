"""SIGKILL of all processes of a run at random instants, until it ends: its result is the same."""

import os
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.states import KINDS, command, require_intact, require_same_result, seconds

MOST = 12
"""Kills of a trial; the next launch runs to its end."""


def seeds(kind: str, quick: bool) -> Iterable[int]:
    return range(1 if quick else 30)


def trial(kind: str, seed: int, folder: Path) -> int:
    """Return the number of kills."""
    chance, out = random.Random(f"{kind}:{seed}"), folder / "out"
    whole = seconds(kind)
    for n_kills in range(MOST + 1):
        process = Forked(command(kind, out))
        if n_kills < MOST:
            deadline = time.monotonic() + chance.uniform(0.1, 1) * whole
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _, err = finish(process)
        if process.returncode != -signal.SIGKILL:
            break
        if out.exists():
            require_intact(out)
    assert process.returncode == 0, f"after {n_kills} kills: {err[-500:]}"
    require_same_result(kind, out)
    return n_kills


WAY = Way(
    "kill-random",
    "a run killed at random instants, again and again, ends bit-equal",
    "S1, S2",
    lambda: KINDS,
    seeds,
    trial,
)
