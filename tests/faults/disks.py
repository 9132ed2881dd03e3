"""A disk that is full or fails at any call that writes: the run ends in one line, and continues when it is repaired."""

import errno
import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from tests.faults.core import Way
from tests.faults.kill_calls import count_calls
from tests.faults.shim import Counter
from tests.faults.states import KINDS, require_intact, require_named_line, require_same_result, run

FOREVER = 10**9
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
FAULTS = (*product(ERRORS, (False, True)), (None, False), (None, True))
"""An errno, or a short write, each once or from then on."""
QUICK = 5


def seeds(kind: str, quick: bool) -> Iterable[int]:
    """Number the pairs of a call and a fault; the short form has each fault once, over the length of the run."""
    n = count_calls(kind, FAULT_WRITES="1") * len(FAULTS)
    return range(n // QUICK // 2, n, n // QUICK) if quick else range(n)


def trial(kind: str, seed: int, folder: Path) -> bool:
    call, fault = divmod(seed, len(FAULTS))
    number, is_forever = FAULTS[fault]
    counter, out = Counter(folder), folder / "out"
    what = "short" if number is None else str(number)
    failed = run(kind, out, FAULT_WRITES="1", **counter.at(call, what, FOREVER if is_forever else None))
    if number is None:
        assert failed.code == 0, f"a short write ended the run: {failed.err[-600:]}"
        require_same_result(kind, out)
        return counter.faults > 0
    assert counter.faults or not failed.code, f"it failed without a fault: {failed.err[-600:]}"
    if failed.code:
        require_named_line(failed, str(out))
        reasons = (os.strerror(number), "No space left on device, or the disk failed")  # torch loses the errno
        assert any(reason in failed.err for reason in reasons), f"{failed.err.strip()} does not say {reasons[0]}"
    require_intact(out)
    resumed = run(kind, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_result(kind, out)
    return counter.faults > 0


WAY = Way(
    "disks",
    "a write that fails (disk full, I/O error, read-only, quota) or is short, once or from then on, ends the run in "
    "one line that names the path, or does no harm; it resumes bit-equal",
    "S1, S2",
    lambda: KINDS,
    seeds,
    trial,
)
