"""A killed run continues with another number of ranks or in another layout, as an undisturbed run would from there."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from helpers.groups import read_until
from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.states import command, require_intact, require_same_run, run, shared, undisturbed
from toolkit.checkpoints.manifest import COMPLETE
from toolkit.checkpoints.store import FINAL, complete_checkpoints, step_of

SUBJECTS = {
    f"{first} to {second}": (first, second)
    for first, second in (
        ("fsdp", "ordinary"),
        ("ordinary", "fsdp"),
        ("sharded", "async"),
        ("tensor parallel", "ordinary"),
        ("context parallel", "ordinary"),
        ("ordinary", "context parallel"),
    )
}
"""Kinds before and after the kill, which train the same model on the same data with other ranks."""


def seeds(name: str, quick: bool) -> Iterable[int]:
    return range(1 if quick else 30)


def trial(name: str, seed: int, folder: Path) -> int:
    """Return 1 if the kill came between two checkpoints; else the other ranks have nothing to load, or to do."""
    first, second = SUBJECTS[name]
    chance, out = random.Random(f"{name}:{seed}"), folder / "out"
    undisturbed(first)
    process = Forked(command(first, out))
    read_until(process, chance.choice(("step-00000002", "step-00000002", "step-00000004")))
    time.sleep(chance.uniform(0, 0.1))  # before it ends
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, err = finish(process)
    assert process.returncode in (-signal.SIGKILL, 0), err[-500:]
    require_intact(out)
    step, is_ended = max(step_of(path) for _, path in complete_checkpoints(out)), (out / FINAL / COMPLETE).exists()
    expected = undisturbed(first) if is_ended else resumed_at(name, step)
    resumed = run(second, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_run(out, expected, saves_more=True)
    return int(not is_ended)


@cache
def resumed_at(name: str, step: int) -> Path:
    """Return the out_dir of an undisturbed run that went on in the second layout after this step."""
    first, second = SUBJECTS[name]
    folder = shared()["folder"] / "runs" / f"{name} at {step}".replace(" ", "-")
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(undisturbed(first), new / "out")
        for _, path in list(complete_checkpoints(new / "out")):
            if path.name == FINAL or step_of(path) > step:
                shutil.rmtree(path)
        result = run(second, new / "out")
        assert result.code == 0, result.err
        with suppress(OSError):  # another process was first
            new.rename(folder)
    return folder / "out"


WAY = Way(
    "elastic",
    "a run killed after a checkpoint continues with other ranks, bit-equal to an undisturbed run that changes there",
    "S2",
    lambda: SUBJECTS,
    seeds,
    trial,
)
