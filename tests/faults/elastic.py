"""A killed run goes on with another number of ranks or in another layout, as an undisturbed run would from there."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.shim import load
from tests.faults.states import command, require_intact, require_same_run, run, seconds, shared, undisturbed
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


def trial(name: str, seed: int, folder: Path) -> None:
    first, second = SUBJECTS[name]
    chance, out = random.Random(f"{name}:{seed}"), folder / "out"
    whole = seconds(first)
    load()
    process = Forked(command(first, out))
    deadline = time.monotonic() + chance.uniform(0.3, 1) * whole
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, err = finish(process)
    assert process.returncode in (-signal.SIGKILL, 0), err[-500:]
    step = 0
    if out.exists():
        require_intact(out)
        step = max((step_of(path) for _, path in complete_checkpoints(out)), default=0)
    expected = resumed_at(name, step, is_ended=(out / FINAL / "COMPLETE").exists())
    resumed = run(second, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_run(out, expected, saves_more=True)


@cache
def resumed_at(name: str, step: int, is_ended: bool) -> Path:
    """Return the out_dir of an undisturbed run that went on in the second layout after this step."""
    first, second = SUBJECTS[name]
    if is_ended:
        return undisturbed(first)
    if step == 0:
        return undisturbed(second)
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
    "a run killed at a random instant goes on with other ranks, bit-equal to an undisturbed run that changes there",
    "S2",
    lambda: SUBJECTS,
    seeds,
    trial,
)
