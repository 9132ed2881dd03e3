"""One trial of each way of killing, stopping, of failing disks and of resuming; ``make test-faults`` makes many."""

import pytest

from tests.faults.core import Trial
from tests.faults.ways import make

TRIALS = [
    Trial("kill-calls", "ordinary", 300),
    Trial("kill-random", "ordinary", 3),
    Trial("kill-commands", "prepare_data streamed", 15),  # a file of the cached tokenizer
    Trial("resume", "LoRA", 0),
    Trial("elastic", "fsdp to ordinary", 0),
    Trial("signals", "ordinary", 0),
    Trial("stop", "ordinary", 0),
    Trial("disks", "ordinary", 1182),  # EIO of an fsync
    Trial("corruption", "ordinary", 74),  # lit_model.pth of the second checkpoint
]


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_the_promise_holds(trial):
    assert make(trial)["failure"] is None
