"""What a way of trying to break toolkit is, and the ledger of what was tried."""

import json
import os
import platform
import subprocess
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TRIALS = ROOT / "build" / "faults" / "trials.jsonl"
SUMMARY = Path(__file__).with_name("faults.json")
WRITTEN = ("tests/faults/faults.json", "tutorials/reliability.md")


class Trial(NamedTuple):
    way: str
    subject: str
    seed: int

    def __str__(self) -> str:
        return f"{self.way}:{self.subject}:{self.seed}"


@dataclass(frozen=True)
class Way:
    """A way of trying to break a promise.

    Args:
        name: Short name, as on the command line.
        promise: What must hold, in one sentence.
        invariants: Their names, such as "S1, S2".
        subjects: What it is tried on, such as kinds of runs or files.
        seeds: Seeds of a subject's trials, with whether the short form is asked for. The same trial does the same.
        run: Makes one trial in a new folder, with subject and seed. AssertionError means that the promise was broken.
            Returns the number of faults that happened: 0 if the run had ended before. Such a trial does not count.
    """

    name: str
    promise: str
    invariants: str
    subjects: Callable[[], Iterable[str]]
    seeds: Callable[[str, bool], Iterable[int]]
    run: Callable[[str, int, Path], int]


def commit() -> str:
    """Return the commit, with a mark if the checkout has changes other than the files that trials write."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in WRITTEN))
    return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changes else "")


def machine() -> str:
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cores = len(os.sched_getaffinity(0))
    return f"{platform.system()}, {cores} cores{gpu}, Python {platform.python_version()}, torch {torch.__version__}"


def attempt(way: Way, subject: str, seed: int, folder: Path) -> dict[str, Any]:
    """Make one trial; return its line in the ledger."""
    line: dict[str, Any] = {"way": way.name, "subject": subject, "seed": seed, "count": 1, "failure": None}
    try:
        line["count"] = int(way.run(subject, seed, folder))
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        line["failure"] = shorten(str(error), folder) or f"{frames[-1].name}: {frames[-1].line}"
    except Exception as error:  # the trial itself failed: it counts as a failure, never as a success
        line["failure"] = f"the trial failed: {type(error).__name__}: {shorten(str(error), folder)}"
    return line


def shorten(text: str, folder: Path) -> str:
    """Return the begin and the end of a message in one line, without the paths of this machine."""
    text = " ".join(text.replace(str(folder), "FOLDER").replace(f"{ROOT}/", "").split())
    return text if len(text) <= 400 else f"{text[:150]} ... {text[-245:]}"


def read_trials(path: Path = TRIALS) -> list[dict[str, Any]]:
    """Return the lines of the ledger. The last may be torn."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def read_rows() -> list[dict[str, Any]]:
    """Return the rows of faults.json."""
    return json.loads(SUMMARY.read_text()) if SUMMARY.exists() else []


def summarize(trials: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with one for each way, subject, commit and machine of the trials; new counts replace old ones.

    A failure whose trial held at a later commit gets that commit as "held".
    """
    keys = ("way", "subject", "commit", "machine")
    found: dict[tuple, dict[str, Any]] = {}
    for trial in {tuple(t[k] for k in (*keys, "seed")): t for t in trials}.values():
        key = tuple(trial[k] for k in keys)
        row = found.setdefault(key, dict(zip(keys, key, strict=True)) | {"count": 0, "failures": [], "date": ""})
        row["count"] += trial["count"]
        row["date"] = max(row["date"], trial["date"])
        if trial["failure"]:
            row["failures"].append({"seed": trial["seed"], "message": trial["failure"]})
    rows = [row for row in rows if tuple(row[k] for k in keys) not in found] + list(found.values())
    held = {(t["way"], t["subject"], t["seed"]): t for t in trials if t["count"] and not t["failure"]}
    for row in rows:
        for failure in row["failures"]:
            trial = held.get((row["way"], row["subject"], failure["seed"]))
            if trial and trial["date"] > row["date"] and trial["commit"] != row["commit"]:
                failure["held"] = trial["commit"]
    return sorted(rows, key=lambda row: (row["date"], *(row[k] for k in keys)))
