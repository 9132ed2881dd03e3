"""A flipped bit in each file of a finished run, or a lost end: it is named, refused, repaired or harmless."""

import random
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.inputs import cache_flags
from tests.faults.readers import GREEDY, readers_of, run_forked
from tests.faults.states import (
    KINDS,
    Result,
    cache_of,
    require_one_line,
    require_same_result,
    run,
    undisturbed,
)
from toolkit.checkpoints.manifest import COMPLETE, EDITABLE, TRAINER_STATE

ROUNDS = 5
"""Each file is damaged so often in both ways."""


def files_of(kind: str) -> list[str]:
    """Return the paths of a finished run's files and of its data cache, relative to the folder of both."""
    out, cache = undisturbed(kind), cache_of(kind, undisturbed(kind))
    names = [f"out/{path.relative_to(out)}" for path in out.rglob("*") if has_content(path)]
    names += [f"cache/{path.relative_to(cache)}" for path in cache.rglob("*") if has_content(path)]
    return sorted(names)


def has_content(path: Path) -> bool:
    return path.is_file() and path.name != ".lock" and path.stat().st_size > 0


def seeds(kind: str, quick: bool) -> Iterable[int]:
    n = 2 * len(files_of(kind))
    return range(0, n, 9) if quick else range(ROUNDS * n)


def damage(path: Path, chance: random.Random, is_cut: bool) -> None:
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    if is_cut:
        content = content[:at]
    else:
        content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def trial(kind: str, seed: int, folder: Path) -> int:
    names, chance = files_of(kind), random.Random(f"{kind}:{seed}")
    name, out, cache = names[seed // 2 % len(names)], folder / "out", folder / "cache"
    shutil.copytree(undisturbed(kind), out)
    shutil.copytree(cache_of(kind, undisturbed(kind)), cache)
    damage(folder / name, chance, bool(seed % 2))
    if name.startswith("cache/"):
        shutil.rmtree(out)
        check_run(kind, out, folder / name, *cache_flags(KINDS[kind].data, cache))
        return 1
    checkpoint = out / name.split("/")[1]
    if (undisturbed(kind) / checkpoint.name / "COMPLETE").exists():
        check_readers(checkpoint, undisturbed(kind) / checkpoint.name, folder / name)
    if checkpoint.name != "final":
        shutil.rmtree(out / "final")
    check_run(kind, out, folder / name)
    return 1


def check_readers(checkpoint: Path, intact: Path, damaged: Path) -> None:
    """Verify names the file. All that read the model refuse it in one line that names it; other files do no harm."""
    verified = toolkit("verify", str(checkpoint))
    assert verified.code == 2, f"verify finds {damaged.name} intact: {verified.out}"
    named = verified.out + verified.err
    assert damaged.name in named or "COMPLETE" in named, f"verify does not name {damaged.name}: {named}"
    if is_of_model(damaged.relative_to(checkpoint).as_posix()):
        require_refused(checkpoint, damaged)
    else:
        require_harmless(checkpoint, intact)


def is_of_model(name: str) -> bool:
    """Whether a file of a checkpoint belongs to the model, and may not be edited."""
    return not name.startswith((*EDITABLE, TRAINER_STATE, COMPLETE))


def require_refused(checkpoint: Path, damaged: Path) -> None:
    """Each command that reads a model ends with code 2 and a line that names the damaged file."""
    outputs = checkpoint.parent.with_name("outputs")
    outputs.mkdir(exist_ok=True)
    commands = {name: words(str(checkpoint), str(outputs)) for name, words in readers_of(checkpoint).items()}
    *others, last = commands.values()
    for name, (code, _, err) in zip(commands, chain.from_iterable(map(run_forked, (others, [last]))), strict=True):
        assert code == 2, f"{name} reads a damaged {damaged.name}: code {code}: {err[-300:]}"
        assert damaged.name in err.splitlines()[-1], f"{name} does not name {damaged.name}: {err[-300:]}"
    assert not any(outputs.iterdir()), f"written from damaged files: {sorted(p.name for p in outputs.iterdir())}"


def require_harmless(checkpoint: Path, intact: Path) -> None:
    """Generate refuses the checkpoint in one line, or does what it did before."""
    seen, expected = run_forked([["generate", str(folder), *GREEDY] for folder in (checkpoint, intact)])
    if seen[0]:
        assert seen[0] == 2, f"generate ended with code {seen[0]}: {seen[2][-600:]}"
        require_one_line(Result(*seen))
        assert checkpoint.name in seen[2], f"generate does not name the checkpoint: {seen[2]}"
    else:
        assert seen[1] == expected[1], "generate has used damaged files"


def check_run(kind: str, out: Path, damaged: Path, *more: str) -> None:
    """The run resumes from what is intact, or refuses in one line that names the file."""
    result = run(kind, out, *more)
    if result.code:
        assert result.code in (2, 3), f"exit code {result.code}: {result.err[-600:]}"
        assert damaged.name in result.err, f"the line does not name {damaged.name}: {result.err[-600:]}"
        return require_one_line(result)
    require_same_result(kind, out, saves_more=True, has_log=damaged.name != "metrics.csv")


def toolkit(*words: str) -> Result:
    process = Forked(list(words))
    out, err = finish(process)
    return Result(process.returncode, out, err)


WAY = Way(
    "corruption",
    "a flipped bit or a lost end of any file of a run or of its data is named or does no harm; commands that read a "
    "damaged model end with code 2",
    "S1, S4",
    lambda: KINDS,
    seeds,
    trial,
)
