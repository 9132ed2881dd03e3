"""The table of all ways, in the order of the page."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.faults import fuzz, kill_calls, ranks
from tests.faults.core import Trial, Way, attempt

WAYS: dict[str, Way] = {way.name: way for way in (kill_calls.WAY, ranks.WAY, fuzz.WAY)}


def make(trial: Trial) -> dict[str, Any]:
    """Make a trial in a temporary folder; return its line in the ledger."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        return attempt(WAYS[trial.way], trial.subject, trial.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
