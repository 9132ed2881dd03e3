"""A signal at a random instant: the run saves, says so in one line, and resumes to the same result."""

import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from helpers.groups import read_until
from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.states import (
    KINDS,
    Result,
    command,
    require_intact,
    require_one_line,
    require_same_result,
    run,
    undisturbed,
)
from toolkit.checkpoints.store import complete_checkpoints

PHASES = ("", "Preparing data", "Training", "step 1/6", "step 2/6", "step 3/6", "step 4/6")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


def seeds(kind: str, quick: bool) -> Iterable[int]:
    return range(len(SIGNALS) * (1 if quick else 10))


def trial(kind: str, seed: int, folder: Path) -> bool:
    chance, out = random.Random(f"{kind}:{seed}"), folder / "out"
    number = getattr(signal, SIGNALS[seed % len(SIGNALS)])
    undisturbed(kind)  # the reference is made before
    process = Forked(command(kind, out))
    deadline = time.monotonic() + 60
    while process.poll() is None and not any(folder.glob("out*/.lock")) and time.monotonic() < deadline:
        time.sleep(0.01)  # before, the interpreter itself may be interrupted
    if phase := chance.choice(PHASES):
        read_until(process, phase)
    time.sleep(chance.uniform(0, 0.5))
    is_early = process.poll() is None and not any(complete_checkpoints(out))
    with suppress(ProcessLookupError):
        process.send_signal(number)
    out_text, err = finish(process)
    result = Result(process.returncode, out_text, err)
    assert result.code or not is_early, f"{SIGNALS[seed % len(SIGNALS)]} before the first checkpoint had no effect"
    if result.code == -number:  # before the run handles it, the signal has its default effect
        assert not any(complete_checkpoints(out)) and not err, (
            f"killed by signal {number} with checkpoints: {err[-500:]}"
        )
    elif result.code != 0:
        assert result.code == 128 + number, f"exit code {result.code}: {err[-500:]}"
        require_one_line(result)
        assert "before training began" in err or "interrupted" in err or any(complete_checkpoints(out)), (
            f"no checkpoint: {err}"
        )
    require_intact(out)
    resumed = run(kind, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_result(kind, out, saves_more=True)
    return result.code != 0


WAY = Way(
    "signals",
    "SIGTERM, SIGINT, SIGHUP or SIGUSR1 at any instant ends the run with a checkpoint, in one line and with code 128 + "
    "its number; it resumes bit-equal",
    "S3",
    lambda: KINDS,
    seeds,
    trial,
)
