"""Groups of real gloo processes that live through many runs; see rank_worker.py."""

import csv
import functools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import rank_worker

# The processes come from a server that has imported everything once and has done nothing else: real processes that
# start in no time. (The test's own process has, by then, run what must not be forked: autograd, threads.)
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["rank_worker"])


@functools.cache
def start_server() -> None:
    """Let the server find what it is to import: a fork server of Python 3.11 does not get this process's sys.path, and
    says nothing of a module that it cannot find."""
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)):
        forkserver.ensure_running()


@dataclass
class Case:
    """A run: its name, its flags besides those that all share, and over how many nodes the ranks are spread."""

    name: str
    flags: list[str]
    nodes: int = 1
    fault: str | None = None
    """What to break in it; see rank_worker.broken."""
    look_at: str | None = None
    """What else to measure, "collectives" or "memory"."""
    command: str = "pretrain"
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
    listed = [asdict(c) | {"flags": [*shared, *c.flags, "--out_dir", str(folder / (c.out or c.name))]} for c in cases]
    (work / "cases.json").write_text(json.dumps(listed))
    port = free_port()
    environ = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")}
    environ |= {"OMP_NUM_THREADS": "1"} | environment
    if environment:  # what is read when a process starts needs fresh ones
        words = [[str(rank), str(size), str(port), str(work / "cases.json")] for rank in range(size)]
        script = str(Path(__file__).with_name("rank_worker.py"))
        for process in [subprocess.Popen([sys.executable, script, *w], env=environ) for w in words]:
            process.wait()
    else:
        start_server()
        facts = [(rank, size, port, work / "cases.json", environ) for rank in range(size)]
        processes = [SERVER.Process(target=rank_worker.live, args=fact) for fact in facts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    said = "\n".join(path.read_text() for path in sorted(work.glob("*.out")))
    missing = [c.name for c in cases for r in range(size) if not (work / f"{r}-{c.name}.json").exists()]
    assert not missing, f"{missing} did not end:\n{said[-6000:]}"
    results = {c.name: [json.loads((work / f"{r}-{c.name}.json").read_text()) for r in range(size)] for c in cases}
    for case in cases:
        if case.fault is None:
            assert all(seen["exit"] == 0 for seen in results[case.name]), f"{case.name} failed:\n{said[-6000:]}"
    return results


def run_whole_and_killed_twice(words: list[str], folder: Path) -> None:
    """Run a command for 40 steps into ``folder / "whole"``, and again into "killed", with two SIGKILLs on the way."""

    def start(out: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "toolkit", *words, "--train.max_steps", "40", "--train.save_interval", "10"]
        command += ["--out_dir", str(out), "--resume", "auto"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    whole = start(folder / "whole")
    _, errors = whole.communicate()
    assert whole.returncode == 0, errors
    for step in (10, 30):
        process = start(folder / "killed")
        read_until(process, f"saved {folder / 'killed'}/step-{step:08d}")
        process.kill()
        process.communicate()
    last = start(folder / "killed")
    said, errors = last.communicate()
    assert last.returncode == 0, errors
    assert "going on from" in said


def losses(out_dir: Path) -> list[float]:
    with open(out_dir / "logs" / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def read_until(process: subprocess.Popen, text: str) -> None:
    """Read what a process prints up to the first line that has ``text``."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} never came:\n{''.join(seen)}\n{process.stderr.read()}")
