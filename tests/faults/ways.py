"""The table of all ways, in the order of the page."""

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from tests.faults import (
    attacks,
    clock,
    corruption,
    disks,
    elastic,
    fuzz,
    kill_calls,
    kill_commands,
    kill_random,
    kill_rank,
    network,
    ranks,
    resume,
    s3,
    signals,
    soak,
    stop,
    two_runs,
)
from tests.faults.core import Trial, Way, attempt

_MODULES = (
    kill_calls,
    kill_random,
    kill_commands,
    kill_rank,
    resume,
    elastic,
    signals,
    stop,
    disks,
    corruption,
    ranks,
    network,
    s3,
    two_runs,
    clock,
    soak,
    attacks,
    fuzz,
)
WAYS: dict[str, Way] = {module.WAY.name: module.WAY for module in _MODULES}


def seeds_of(way: str, subject: str, quick: bool) -> list[int]:
    return list(WAYS[way].seeds(subject, quick))


def make(trial: Trial) -> dict[str, Any]:
    """Make a trial in a temporary folder; return its line in the ledger."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    # nohup and a shell's & ignore them, which children inherit
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    try:
        return attempt(WAYS[trial.way], trial.subject, trial.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
