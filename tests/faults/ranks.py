"""A rank is killed, frozen or slow in each phase of a run: the others end in one named line, and the run resumes."""

import os
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path

from helpers.groups import read_until
from helpers.processes import Forked, Process, finish, group_members, start

from tests.faults.core import Way
from tests.faults.states import Result, command, require_intact, require_same_result, run, shared

KINDS = ("fsdp", "sharded", "pipeline", "tensor parallel")
PHASES = ("start", "Preparing data", "Building the model", "Training", "step 1/6", "step 2/6", "step 4/6", "finished")
FAULTS = ("killed", "frozen", "slow")
CASES = list(product(FAULTS, PHASES, (0, 1)))
random.Random(0).shuffle(CASES)
LIMIT_S = 120  # with 3 s of --timeout, one minute for a start, and 30 s until a hanging process is killed


def seeds(kind: str, quick: bool) -> Iterable[int]:
    return range(4 if quick else 2 * len(CASES))


def trial(kind: str, seed: int, folder: Path) -> bool:
    fault, phase, rank = CASES[seed % len(CASES)]
    chance, out = random.Random(f"{kind}:{seed}"), folder / "out"
    shared()
    words = command(kind, out, *(("--timeout", "0.05") if fault == "frozen" else ()))
    if phase == "start":  # a forked rank would wait for its environment
        process = start("-m", "toolkit", *words)
        while rank == 1 and not others_of(process):
            time.sleep(0.1)
        time.sleep(chance.uniform(0, 8))
    else:
        process = Forked(words)
        read_until(process, phase)
        time.sleep(chance.uniform(0, 0.6))
    has_met = DO[fault](process, chance, rank)
    if fault != "slow":
        require_intact(out)
    resumed = run(kind, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_result(kind, out)
    return has_met


def kill(process: Process, chance: random.Random, rank: int) -> bool:
    """Return whether the run had not ended before."""
    send(process, rank, signal.SIGKILL)
    result = end(process)
    if rank == 1:
        require_named(result, "rank 1 was killed by SIGKILL")
    else:
        assert result.code in (-signal.SIGKILL, 0), result
        require_named(result._replace(code=0 if not result.err else 1), "lost contact with rank 0")
    return result.code != 0


def freeze(process: Process, chance: random.Random, rank: int) -> bool:
    """Return whether the run had not ended before."""
    send(process, rank, signal.SIGSTOP)
    if rank == 1:
        result = end(process)
        require_named(result, "rank 1")
        return result.code != 0
    deadline = time.monotonic() + LIMIT_S
    while (left := group_members(process)) not in ([process.pid], []):
        assert time.monotonic() < deadline, f"{left} did not end while rank 0 was frozen"
        time.sleep(0.1)
    send(process, 0, signal.SIGCONT)
    result = end(process)
    first, _, second = result.err.partition("\n")
    require_named(result._replace(err=first), "rank 0", "rank 1")
    require_named(result._replace(err=second, code=1 if second else 0), "rank 1 exited with code")
    return result.code != 0


def slow_down(process: Process, chance: random.Random, rank: int) -> bool:
    """Stop and continue a rank in pulses; it gets a third of the time. Return whether it was there."""
    deadline, has_met = time.monotonic() + 8, False
    while process.poll() is None and time.monotonic() < deadline:
        has_met |= send(process, rank, signal.SIGSTOP)
        time.sleep(chance.uniform(0.05, 0.4))
        send(process, rank, signal.SIGCONT)
        time.sleep(chance.uniform(0.02, 0.2))
    result = end(process)
    assert (result.code, result.err) == (0, ""), result
    return has_met


DO = {"killed": kill, "frozen": freeze, "slow": slow_down}


def send(process: Process, rank: int, number: int) -> bool:
    """Send a signal to a rank, if it is there; return whether it is."""
    with suppress(ProcessLookupError, IndexError):
        os.kill(process.pid if rank == 0 else others_of(process)[0], number)
        return True
    return False


def others_of(process: Process) -> list[int]:
    return [pid for pid in group_members(process) if pid != process.pid]


def end(process: Process) -> Result:
    """Wait until no process is left. A flag of the kind itself that is given twice is no news."""
    out, err = finish(process, LIMIT_S)
    lines = [line for line in err.splitlines() if line and "given 2 times" not in line]
    return Result(process.returncode, out, "\n".join(lines))


def require_named(result: Result, *texts: str) -> None:
    """Require one line with one of the texts and a code of failure, or that the run had ended before the fault."""
    if result.code == 0:
        assert not result.err, result.err
        return
    lines = result.err.splitlines()
    assert result.code in (1, 2), result
    assert len(lines) == 1 and lines[0].startswith("toolkit"), f"stderr is not one line: {result.err[-600:]}"
    assert any(text in lines[0] for text in texts), f"{lines[0]} names none of {texts}"


WAY = Way(
    "ranks",
    "a rank that is killed, frozen or slow ends the run in one line or delays it, and it resumes bit-equal",
    "S2",
    lambda: KINDS,
    seeds,
    trial,
)
