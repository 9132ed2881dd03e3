"""SIGKILL at each file-system call that a run makes in its folder, and again in the resume: the result is the same."""

import os
import random
import signal
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.faults.core import Way
from tests.faults.shim import Counter
from tests.faults.states import KINDS, require_intact, require_same_result, run, shared

QUICK = 5


@cache
def count_calls(kind: str, **options: str) -> int:
    """Return the number of file-system calls of an undisturbed run; threads may add or save a few.

    ``options`` select calls, see shim.c.
    """
    path = shared()["folder"] / f"calls-{'-'.join([kind.replace(' ', '-'), *options])}"
    if not path.exists():
        folder = path.with_suffix(f".run{os.getpid()}")
        folder.mkdir()
        counter = Counter(folder)
        result = run(kind, folder / "out", **options, **counter.environ)
        assert result.code == 0, result.err
        assert counter.calls > 0, f"no file-system call of {kind} was seen"
        path.write_text(str(counter.calls))
    return int(path.read_text())


def seeds(kind: str, quick: bool) -> Iterable[int]:
    n_calls = count_calls(kind)
    return range(n_calls // QUICK // 2, n_calls, max(1, n_calls // QUICK)) if quick else range(n_calls)


def trial(kind: str, call: int, folder: Path) -> int:
    """Return the number of kills."""
    out, n_calls, n_kills = folder / "out", count_calls(kind), 0
    again = random.Random(f"{kind}:{call}").randrange(max(n_calls - call, n_calls // 4))  # a resume has fewer calls
    for at in (call, again):
        counter = Counter(folder)
        killed = run(kind, out, **counter.at(at, "kill"))
        # a worker of the data is in another process group: without it, the run goes on
        assert killed.code == 0 or (killed.code == -signal.SIGKILL and counter.faults), killed.err
        require_intact(out)
        n_kills += counter.faults
    resumed = run(kind, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_result(kind, out)
    return n_kills


WAY = Way(
    "kill-calls",
    "a run killed at any file-system call, and again in its resume, ends bit-equal",
    "S1, S2",
    lambda: KINDS,
    seeds,
    trial,
)
