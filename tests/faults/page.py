"""tutorials/reliability.md: promises, how often they were tried, and what broke."""

from typing import Any

from tests.faults.core import ROOT
from tests.faults.ways import WAYS

PAGE = ROOT / "tutorials" / "reliability.md"
TITLE = "# Reliability: what was tried, and what held\n\n"
HEAD = """
All of it ran on CPUs: no GPU, no NCCL, no storage of a cloud. Hosts are network namespaces of one machine, and S3 is a
server that misbehaves. Bit-equal means the same weights, state and metrics as an undisturbed run.

```bash
make test-faults                                  # hours; a second start continues; writes this page
FAULTS=quick make test-faults                     # 15 minutes, 196 tries on two cores
python -m tests.faults --only WAY:SUBJECT:SEED    # repeats a failure; instants of time vary
```

| way | promise | tries | failed | of these open |
|---|---|---:|---:|---:|
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
    text += HEAD
    for way in WAYS.values():
        mine = [row for row in rows if row["way"] == way.name]
        cells = [f"{_total(mine):,}", _failed(mine), len(_open(mine))]
        text += f"| {way.name} | {way.promise} ({way.invariants}) | {' | '.join(map(str, cells))} |\n"
    pairs = {(way.name, subject) for way in WAYS.values() for subject in way.subjects()}
    tried, tried_again = ({(row["way"], row["subject"]) for row in some if row["count"]} for some in (rows, recent))
    never = {way: ", ".join(sorted(s for s in WAYS[way].subjects() if (way, s) not in tried)) for way in WAYS}
    text += "\n## What was not tried\n\nEach way has subjects: kinds of runs, commands or files. "
    text += f"{len(pairs & tried)} of {len(pairs)} were tried,\n{len(pairs & tried_again)} of them again at the newest "
    text += "commit. Never tried:\n\n"
    for subjects in dict.fromkeys(filter(None, never.values())):
        text += f"- {', '.join(way for way in WAYS if never[way] == subjects)}: {subjects}\n"
    failures = _open(rows)
    text += f"\n## Open failures\n\n{_failed(rows) - len(failures)} others held when a later commit tried them; some "
    text += "were of the harness. tests/faults/faults.json has their messages.\n\n"
    for row, failure in failures:
        message = failure["message"].replace("`", "'")
        message = message if len(message) < 120 else f"{message[:50]} ... {message[-60:]}"
        text += f"- `{row['way']}:{row['subject']}:{failure['seed']}` at `{row['commit']}`: `{message}`\n"
    machines = sorted({row["machine"] for row in rows})
    return text + "\n## Machines\n\n" + "".join(f"- {machine}\n" for machine in machines)


def _total(rows: list[dict[str, Any]]) -> int:
    return sum(row["count"] for row in rows)


def _failed(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["failures"]) for row in rows)


def _open(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the failures that no later commit repeated without a failure, each with its row."""
    return [(row, failure) for row in rows for failure in row["failures"] if "held" not in failure]


def _counts(rows: list[dict[str, Any]]) -> str:
    """Return the numbers of kills and faults, apart from the inputs of fuzzing."""
    n_open = len(_open(rows))
    faults, inputs = ([r for r in rows if (r["way"] == "fuzz") == is_fuzz] for is_fuzz in (False, True))
    counts = f"{_total(faults):,} kills and faults ({_failed(faults)} failed), {_total(inputs):,} fuzz inputs"
    return f"{counts} ({_failed(inputs)} failed), {n_open} failures open"
