"""One trial of each fault of peers and surroundings; ``make test-faults`` makes many."""

import pytest

from tests.faults.core import Trial
from tests.faults.shim import preloaded_processes
from tests.faults.ways import make

TRIALS = [("ranks", "pipeline", 4), ("two-runs", "ordinary", 0), ("s3", "ordinary", 3), ("clock", "ordinary", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("trial", [Trial(*trial) for trial in TRIALS], ids=str)
def test_the_promise_holds(trial):
    with preloaded_processes(1) as pool:
        line = pool.submit(make, trial).result()
    assert line["failure"] is None and line["count"] > 0
