"""One trial of each way of killing, stopping, of failing disks and of resuming; ``make test-faults`` makes many."""

import signal
import subprocess
import sys

import pytest

from tests.faults.core import Trial, Way
from tests.faults.shim import preloaded_processes
from tests.faults.ways import WAYS, make

TRIALS = [
    Trial("kill-calls", "ordinary", 300),
    # up to a dozen kills each, the first of them early
    Trial("kill-random", "ordinary", 2),
    *(Trial("kill-random", "ema sharded", seed) for seed in (3, 9, 11)),
    Trial("kill-commands", "prepare_data streamed", 15),  # a file of the cached tokenizer
    Trial("resume", "LoRA", 0),
    Trial("elastic", "fsdp to ordinary", 3),
    Trial("signals", "ordinary", 0),
    Trial("stop", "ordinary", 0),
    Trial("disks", "ordinary", 1182),  # EIO of an fsync
    Trial("corruption", "ordinary", 74),  # lit_model.pth of the second checkpoint
]


@pytest.fixture(scope="module")
def pool():
    with preloaded_processes(1) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_the_promise_holds(trial, pool):
    line = pool.submit(make, trial).result()
    assert line["failure"] is None and line["count"] > 0


def test_trials_do_not_inherit_ignored_signals(monkeypatch):
    def run(subject, seed, folder):
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler  # in a forked command, as in a new one
        code = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGHUP
        return 1

    monkeypatch.setitem(WAYS, "nohup", Way("nohup", "", "", list, lambda *_: [], run))
    previous = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGHUP, signal.SIGINT)]
    try:
        assert make(Trial("nohup", "", 0))["failure"] is None
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
