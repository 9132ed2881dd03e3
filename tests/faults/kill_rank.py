"""SIGKILL of one rank at a file-system call: the others end in one named line, and the run resumes."""

import signal
from collections.abc import Iterable
from pathlib import Path

from helpers.processes import Forked

from tests.faults.core import Way
from tests.faults.kill_calls import count_calls
from tests.faults.ranks import end, require_named
from tests.faults.shim import Counter
from tests.faults.states import command, require_intact, require_same_result, run
from toolkit.checkpoints.store import is_complete

KINDS = ("fsdp", "sharded", "async sharded", "pipeline", "tensor parallel", "context parallel")
QUICK = 2


def seeds(kind: str, quick: bool) -> Iterable[int]:
    n_calls = count_calls(kind)
    return range(n_calls // QUICK // 2, n_calls, n_calls // QUICK) if quick else range(0, n_calls, 3)


def trial(kind: str, call: int, folder: Path) -> int:
    out = folder / "out"
    counter = Counter(folder)
    result = end(Forked(command(kind, out), **counter.at(call, "kill-one")))
    assert bool(result.code) == bool(counter.faults), f"code {result.code} after {counter.faults} faults: {result.err}"
    if result.code == -signal.SIGKILL:  # rank 0; rank 1 may have ended before
        assert result.err or is_complete(out / "final"), "rank 1 ended without a line"
        require_named(result._replace(code=1 if result.err else 0), "lost contact with rank 0")
    else:
        require_named(result, "rank 1 was killed by SIGKILL")
    require_intact(out)
    resumed = run(kind, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_result(kind, out)
    return counter.faults


WAY = Way(
    "kill-rank",
    "a rank killed at any file-system call ends the run in one line that names it; it resumes bit-equal",
    "S1, S2",
    lambda: KINDS,
    seeds,
    trial,
)
