"""SIGKILL at the file-system calls of conversions, merging, consolidation and preparation, and again when repeated."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from helpers.processes import Forked, finish

from tests.faults.core import Way
from tests.faults.inputs import cache_flags, data_flags, shared
from tests.faults.shim import Counter
from tests.faults.states import Result, require_one_line, undisturbed
from toolkit.io.tempfiles import TMP

Files = dict[str, bytes]


class Command(NamedTuple):
    """A command that writes files.

    Args:
        words: The command for an output path.
        output: Name of the output path.
        is_folder: Whether the output appears as a whole.
        before: Folder whose copy is there before; the command adds to it.
    """

    words: Callable[[Path], list[str]]
    output: str = "model"
    is_folder: bool = True
    before: Callable[[], Path] | None = None


def convert(name: str, source: Callable[[], Path], *options: str) -> Callable[[Path], list[str]]:
    return lambda out: [name, str(source()), str(out), *options]


def prepare(data: str, *options: str) -> Callable[[Path], list[str]]:
    words = ["--max_seq_length", "32", *options]
    return lambda out: ["prepare_data", *data_flags(data), *cache_flags(data, out), *words]


def base() -> Path:
    return shared()["base"]


def checkpoint(kind: str, name: str = "final") -> Callable[[], Path]:
    return lambda: undisturbed(kind) / name


ADAPTERS, STEPS = checkpoint("adapters"), [checkpoint("ordinary", f"step-0000000{n}") for n in (2, 4)]
COMMANDS = {
    "convert_to_hf": Command(convert("convert_to_hf", base)),
    "convert_to_hf merge": Command(convert("convert_to_hf", ADAPTERS, "--merge", "true")),
    "convert_from_hf": Command(convert("convert_from_hf", lambda: reference("convert_to_hf") / "out" / "model")),
    "convert_to_gguf": Command(convert("convert_to_gguf", base), "model.gguf", False),
    "convert_to_litgpt": Command(convert("convert_to_litgpt", base)),
    "convert_to_peft": Command(convert("convert_to_peft", ADAPTERS)),
    "merge_lora": Command(lambda out: ["merge_lora", str(ADAPTERS()), "--out_dir", str(out)]),
    "merge_lora in place": Command(lambda out: ["merge_lora", str(out)], is_folder=False, before=ADAPTERS),
    "consolidate": Command(convert("consolidate", checkpoint("sharded"))),
    "average": Command(lambda out: ["average", str(out), "--checkpoint_dirs", ",".join(str(step()) for step in STEPS)]),
    "prepare_data text": Command(prepare("text"), "cache", False),
    "prepare_data rows": Command(prepare("rows", "--tokenizer_dir", "{base}"), "cache", False),
    "prepare_data streamed": Command(prepare("streamed", "--workers", "2"), "cache", False),
}


def run(subject: str, folder: Path, **environ: str) -> Result:
    spec = COMMANDS[subject]
    process = Forked([word.format(base=base()) for word in spec.words(folder / "out" / spec.output)], **environ)
    texts = finish(process)
    return Result(process.returncode, *texts)


def begin(subject: str, folder: Path) -> None:
    """Make the folder of the output, with what is there before."""
    spec, out = COMMANDS[subject], folder / "out"
    out.mkdir(parents=True)
    if spec.before is not None:
        shutil.copytree(spec.before(), out / spec.output)


def files(out: Path) -> Files:
    """Return the content of all files, without temporary ones, locks, and what names a process that reads."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.parent.name not in ("locks", "readers")]
    contents = {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}
    return {name: content for name, content in contents.items() if TMP not in name}


@cache
def reference(subject: str) -> Path:
    """Return the folder of an undisturbed command, with its number of calls, which the first process makes."""
    folder = shared()["folder"] / "commands" / subject.replace(" ", "-")
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        begin(subject, new)
        counter = Counter(new)
        result = run(subject, new, **counter.environ)
        assert result.code == 0, result.err
        assert counter.calls > 0, f"no file-system call of {subject} was seen"
        (new / "n_calls").write_text(str(counter.calls))
        try:
            new.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(new)
    return folder


def count_calls(subject: str) -> int:
    return int((reference(subject) / "n_calls").read_text())


def seeds(subject: str, quick: bool) -> Iterable[int]:
    n_calls = count_calls(subject)
    return range(n_calls // 4, n_calls, n_calls // 2) if quick else range(n_calls)


def trial(subject: str, call: int, folder: Path) -> int:
    """Return the number of kills."""
    expected, n_calls, n_kills = files(reference(subject) / "out"), count_calls(subject), 0
    begin(subject, folder)
    before = files(folder / "out")
    again = random.Random(f"{subject}:{call}").randrange(n_calls)
    for at in (call, again):
        counter = Counter(folder)
        result = run(subject, folder, **counter.at(at, "kill"))
        assert counter.faults or result.code != -signal.SIGKILL, "killed by something else"
        n_kills += counter.faults
        require_ended(result, folder, expected)
        require_whole(subject, folder, expected, before)
    require_ended(run(subject, folder), folder, expected)
    assert files(folder / "out") == expected, f"other files: {differences(files(folder / 'out'), expected)}"
    left = [path.name for path in (folder / "out").rglob(f"{TMP}*")]
    assert not left, f"temporary files are left: {left}"
    return n_kills


def require_ended(result: Result, folder: Path, expected: Files) -> None:
    """Require that a command ended well, by the kill, or because its output is complete."""
    if result.code not in (-signal.SIGKILL, 0):
        notes = [line for line in result.err.splitlines(keepends=True) if line.startswith("note: ")]
        require_one_line(result._replace(err=result.err.removeprefix("".join(notes))))
        assert result.code == 2 and files(folder / "out") == expected, f"it cannot be repeated: {result.err}"


def require_whole(subject: str, folder: Path, expected: Files, before: Files) -> None:
    """Require that each file is as before or complete, and that a folder has all of its files."""
    out, spec = folder / "out", COMMANDS[subject]
    seen = files(out)
    torn = [name for name in seen if seen[name] not in (before.get(name), expected.get(name))]
    assert not torn, f"not complete: {torn}"
    assert not spec.is_folder or seen.keys() in (set(), expected.keys()), f"only {len(seen)} of {len(expected)} files"
    if spec.before is not None:
        process = Forked(["verify", str(out / spec.output)])
        texts = finish(process)
        assert process.returncode == 0, f"the folder cannot be used: {texts}"


def differences(seen: Files, expected: Files) -> list[str]:
    return sorted(name for name in seen.keys() | expected.keys() if seen.get(name) != expected.get(name))


WAY = Way(
    "kill-commands",
    "a conversion, merge, consolidation or preparation killed at any file-system call leaves complete files or none; "
    "repeated, it ends with the same bytes",
    "S1, S5",
    lambda: COMMANDS,
    seeds,
    trial,
)
