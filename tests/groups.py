"""Groups of real gloo processes that live through many runs; see distributed/worker.py."""

import csv
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).parent / "distributed" / "worker.py"


@dataclass
class Case:
    """A run: its name, its flags besides those that all share, and over how many nodes the ranks are spread."""

    name: str
    flags: list[str]
    nodes: int = 1
    fault: str | None = None
    out: str | None = None
    """Its out_dir below the folder of the test, where that is not its name."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_group(
    folder: Path, size: int, cases: list[Case], shared: list[str], **environment: str
) -> dict[str, list[dict]]:
    """Start one group of gloo processes, take it through all cases, and return by case what each rank saw."""
    if not cases:
        return {}
    work = folder / f"group-of-{size}-{len(list(folder.glob('group-*')))}"
    work.mkdir(parents=True)
    listed = [
        {"name": c.name, "flags": [*shared, *c.flags, "--out_dir", str(folder / (c.out or c.name))], "nodes": c.nodes}
        | ({"break": c.fault} if c.fault else {})
        for c in cases
    ]
    (work / "cases.json").write_text(json.dumps(listed))
    port = free_port()
    environ = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")}
    environ |= {"OMP_NUM_THREADS": "1"} | environment
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            out = stack.enter_context(open(work / f"{rank}.out", "w"))
            command = [sys.executable, str(WORKER), str(rank), str(size), str(port), str(work / "cases.json")]
            processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ))
        for process in processes:
            process.wait()
    said = "\n".join(path.read_text() for path in sorted(work.glob("*.out")))
    missing = [c.name for c in cases for r in range(size) if not (work / f"{r}-{c.name}.json").exists()]
    assert not missing, f"{missing} did not end:\n{said[-6000:]}"
    results = {c.name: [json.loads((work / f"{r}-{c.name}.json").read_text()) for r in range(size)] for c in cases}
    for case in cases:
        if case.fault is None:
            assert all(seen["exit"] == 0 for seen in results[case.name]), f"{case.name} failed:\n{said[-6000:]}"
    return results


def losses(out_dir: Path) -> list[float]:
    with open(out_dir / "logs" / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
