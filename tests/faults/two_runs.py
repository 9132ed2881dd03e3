"""Two runs are started in one folder: one trains, the other is refused in one line."""

import random
import time
from collections.abc import Iterable
from pathlib import Path

from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.states import Result, command, require_one_line, require_same_result, shared

KINDS = ("ordinary", "async", "fsdp")


def seeds(kind: str, quick: bool) -> Iterable[int]:
    return range(3 if quick else 40)


def trial(kind: str, seed: int, folder: Path) -> bool:
    """Return whether the second was started before the first had ended."""
    chance, out = random.Random(f"{kind}:{seed}"), folder / "out"
    shared()
    longest = chance.choice((0.0, 0.5, 4.0))
    processes = []
    for _ in range(2):
        processes.append(Forked(command(kind, out)))
        time.sleep(chance.uniform(0, longest))
    texts = [finish(process) for process in processes]
    results = [Result(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    trained = [result for result in results if "finished after 6 steps" in result.out]
    assert len(trained) == 1 and trained[0].code == 0, f"{len(trained)} of two runs have trained: {results}"
    (other,) = (result for result in results if result is not trained[0])
    if other.code == 0:  # it came when the first had ended
        assert "nothing to do" in other.out and not other.err, other
    else:
        require_one_line(other)
        assert other.code == 2 and "is running there" in other.err, other
    require_same_result(kind, out)
    return other.code != 0


WAY = Way(
    "two-runs",
    "of two runs started in one folder, one trains to the bit-equal result; the other is refused in one line",
    "S1, S2",
    lambda: KINDS,
    seeds,
    trial,
)
