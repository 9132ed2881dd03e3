"""tutorials/reliability.md: promises, how often they were tried, and what broke."""

from typing import Any

from tests.faults.core import ROOT
from tests.faults.ways import WAYS

PAGE = ROOT / "tutorials" / "reliability.md"
TRIES = 20
"""Rows with fewer tries at the newest commit are counted on the page."""
TITLE = "# Reliability: what was tried, and what held\n\n"
HEAD = """
`make test-faults` tries to break the promises below; `FAULTS=quick make test-faults` is a short form of 15 minutes (on
two cores, 196 trials in 14). It continues where it was stopped, and writes this page. A failure has a seed, which
repeats it (instants of time vary): `python -m tests.faults --only WAY:SUBJECT:SEED`.
"""


def write_page(rows: list[dict[str, Any]]) -> None:
    PAGE.write_text(page(rows))


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page for the rows of faults.json."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    newest = commits[-1] if commits else ""
    recent = [row for row in rows if row["commit"] == newest]
    text = (
        f"{TITLE}Total: {_counts(rows)}, over {len(commits)} commits. Newest commit, `{newest}`: {_counts(recent)}.\n"
    )
    tries = {
        (way.name, subject): _total([r for r in recent if (r["way"], r["subject"]) == (way.name, subject)])
        for way in WAYS.values()
        for subject in {*way.subjects(), *(row["subject"] for row in rows if row["way"] == way.name)}
    }
    few = sum(n < TRIES for n in tries.values())
    text += f"{HEAD}\nA subject's number is of its tries at the newest commit: {few} of {len(tries)} have fewer than "
    text += f"{TRIES}.\n\n| way | promise | tried on | total | failed | newest commit | failed |\n"
    text += "|---|---|---|---:|---:|---:|---:|\n"
    for way in WAYS.values():
        mine, new = ([row for row in group if row["way"] == way.name] for group in (rows, recent))
        subjects = ", ".join(f"{subject} {n}" for (name, subject), n in sorted(tries.items()) if name == way.name)
        cells = [f"{_total(mine):,}", _failed(mine), f"{_total(new):,}", _failed(new)]
        text += f"| {way.name} | {way.promise} ({way.invariants}) | {subjects} | {' | '.join(map(str, cells))} |\n"
    failures = [(row, failure) for row in rows for failure in row["failures"]]
    if failures:
        text += "\n## What failed\n\nSome failures are of the harness. faults.json has the messages of those that held "
        text += "when a later commit tried them.\n\n"
    for row, failure in sorted(failures, key=lambda pair: "held" in pair[1]):
        text += f"- `{row['way']}:{row['subject']}:{failure['seed']}` at `{row['commit']}`"
        message = failure["message"].replace("`", "'")
        text += (f", held at `{failure['held']}`" if "held" in failure else f": `{message}`") + "\n"
    machines = sorted({row["machine"] for row in rows})
    return text + "\n## Machines\n\n" + "".join(f"- {machine}\n" for machine in machines)


def _total(rows: list[dict[str, Any]]) -> int:
    return sum(row["count"] for row in rows)


def _failed(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["failures"]) for row in rows)


def _counts(rows: list[dict[str, Any]]) -> str:
    """Return the numbers of kills and faults, apart from the inputs of fuzzing."""
    n_open = sum("held" not in failure for row in rows for failure in row["failures"])
    faults, inputs = ([r for r in rows if (r["way"] == "fuzz") == is_fuzz] for is_fuzz in (False, True))
    counts = f"{_total(faults):,} kills and faults ({_failed(faults)} failed), {_total(inputs):,} fuzz inputs"
    return f"{counts} ({_failed(inputs)} failed), {n_open} failures open"
