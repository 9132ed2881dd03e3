"""One trial of each fault of peers and surroundings; ``make test-faults`` makes many."""

import pytest

from tests.faults.core import Trial
from tests.faults.ways import make

TRIALS = [("ranks", "fsdp", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("trial", [Trial(*trial) for trial in TRIALS], ids=str)
def test_the_promise_holds(trial):
    assert make(trial)["failure"] is None
