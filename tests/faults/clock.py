"""The clock jumps by hours, and files are dated wrong: a run ends the same, and resumes from the newest checkpoint."""

import os
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from helpers.groups import read_until
from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.shim import Counter
from tests.faults.states import command, require_intact, require_same_result, run, seconds
from toolkit.checkpoints.store import complete_checkpoints

KINDS = ("ordinary", "async", "adapters", "fsdp")
HOUR = 3600
YEAR = 365 * 24 * HOUR


def seeds(kind: str, quick: bool) -> Iterable[int]:
    return range(3 if quick else 40)


def trial(kind: str, seed: int, folder: Path) -> int:
    """Return 1 if the clock has jumped while the run was there, or its files were dated wrong."""
    chance, out = random.Random(f"{kind}:{seed}"), folder / "out"
    whole, counter = seconds(kind), Counter(folder)
    process = Forked(command(kind, out), **counter.environ, **jump(chance, whole))
    if seed % 2 == 0:  # it ends by itself
        _, err = finish(process)
        assert (process.returncode, err) == (0, ""), err
        require_same_result(kind, out)
        return counter.faults > 0
    read_until(process, chance.choice(("step-00000002", "step-00000004", "step-00000004")))
    time.sleep(chance.uniform(0, 0.1))  # before it ends
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    finish(process)
    require_intact(out)
    names = {name for name, _ in complete_checkpoints(out)}
    said = "nothing to do" if "final" in names else f"resuming from {out / max(names)}" if names else ""
    for path in [out, *out.rglob("*")]:
        dated = time.time() + chance.uniform(-YEAR, YEAR)
        os.utime(path, (dated, dated), follow_symlinks=False)
    resumed = run(kind, out, **jump(chance, whole))
    assert (resumed.code, resumed.err) == (0, ""), f"the resume failed: {resumed.err}"
    assert said in resumed.out, f"not {said!r}: {resumed.out[:600]}"
    require_same_result(kind, out)
    return 1


def jump(chance: random.Random, whole: float) -> dict[str, str]:
    """Return the environment of a command of ``whole`` seconds whose clock jumps forward or back; see shim.c."""
    by = chance.choice((-1, 1)) * chance.uniform(1, 48) * HOUR
    return {"CLOCK_JUMP": str(int(by)), "CLOCK_JUMP_AT": str(int(time.time() + chance.uniform(0, whole)))}


WAY = Way(
    "clock",
    "a run whose clock jumps by hours, or whose files are dated wrong, ends the same and resumes bit-equal",
    "S2",
    lambda: KINDS,
    seeds,
    trial,
)
