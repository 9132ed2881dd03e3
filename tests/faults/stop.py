"""A file STOP or SAVE_NOW in a run's folder, and SIGKILL at any call in between: the run resumes to the same result."""

import json
import random
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from tests.faults.core import Way
from tests.faults.kill_calls import count_calls
from tests.faults.shim import Counter
from tests.faults.states import KINDS, require_intact, require_one_line, require_same_result, run
from toolkit.checkpoints.store import SAVE_NOW, STOP

FILES = ((STOP, 3), (SAVE_NOW, 2), (STOP, 1), (SAVE_NOW, 4), (STOP, 5))
"""Each after a step; SAVE_NOW saves after the next one, which is not saved otherwise."""
CASES = [(name, step, is_killed) for is_killed in (False, True) for name, step in FILES]


def seeds(kind: str, quick: bool) -> Iterable[int]:
    return range(2 if quick else 4 * len(CASES))


def trial(kind: str, seed: int, folder: Path) -> int:
    name, step, is_killed = CASES[seed % len(CASES)]
    out = folder / "out"
    touch = {"class_path": "helpers.faulty_callbacks.Touch", "init_args": {"name": name, "step": step}}
    call = random.Random(f"{kind}:{seed}").randrange(count_calls(kind)) if is_killed else 0
    counter = Counter(folder)
    fault = counter.at(call, "kill") if is_killed else {}
    seen = run(kind, out, "--callbacks", json.dumps([touch]), **fault)
    is_hit = seen.code == -signal.SIGKILL and counter.faults
    assert seen.code == 0 or is_hit, f"exit code {seen.code}: {seen.err[-500:]}"
    if seen.code == 0:
        if name == STOP:
            require_one_line(seen)
            assert f"stopped after step {step}" in seen.err, seen.err
        assert is_killed or not (out / name).exists(), f"{name} is still there"
        saved = step + (name == SAVE_NOW)
        assert re.search(rf"saved.*/step-{saved:08d}\b", seen.out + seen.err), f"not saved: {seen.out[-500:]}"
    require_intact(out)
    (out / name).unlink(missing_ok=True)  # a kill came before it was obeyed
    resumed = run(kind, out)
    assert resumed.code == 0, f"the resume failed: {resumed.err}"
    require_same_result(kind, out, saves_more=True)
    return 1


WAY = Way(
    "stop",
    "a file STOP ends a run with a checkpoint, in one line and with code 0, and SAVE_NOW saves one; killed at any "
    "call in between or not, it resumes bit-equal",
    "S1, S2, S3",
    lambda: KINDS,
    seeds,
    trial,
)
