"""Groups of real gloo processes that execute many runs; see rank_worker.py."""

import functools
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from helpers import rank_worker
from helpers.compare_runs import losses as losses
from toolkit import extension

# A fork server with all imports done starts real processes quickly. The test process itself must not be forked later,
# when it has used autograd and threads.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["helpers.preload"])
SPAWN = forkserver.util.spawnv_passfds


@functools.cache
def start_server() -> None:
    """Start the server; conftest.py does before the first test, when this process has imported what is needed."""
    resource_tracker.ensure_running()
    with mock.patch.object(forkserver.util, "spawnv_passfds", fork_server):
        forkserver.ensure_running()


def fork_server(_: Any, words: list[str], descriptors: list[int]) -> int:
    """Run the code of ``python -c`` in a forked process; return its PID. Python with the same imports takes seconds."""
    if pid := os.fork():
        return pid
    try:
        # A rank may start another server: not with the lock held by the caller, and not forked from its process group.
        forkserver._forkserver._lock = threading.Lock()
        forkserver.util.spawnv_passfds = SPAWN
        alive = descriptors[1]  # the read end of a pipe; the server ends when all write ends are closed
        for descriptor in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):  # of the listing itself
                if descriptor != alive and os.path.sameopenfile(descriptor, alive):
                    os.close(descriptor)
        for handler in (reference() for reference in logging._handlerList):
            if type(handler) is logging.StreamHandler:  # made while pytest captured the output of imports
                handler.setStream(sys.stderr)
        exec(words[-1])
    finally:
        os._exit(0)


def start_ranks(function: Callable, arguments: tuple, n_ranks: int) -> None:
    """Call ``function(rank, *arguments)`` in a process per rank, as torch.multiprocessing.spawn does, but forked."""
    start_server()
    torch.multiprocessing.start_processes(function, arguments, nprocs=n_ranks, start_method="forkserver")


@dataclass
class Case:
    """A run: its name, its flags in addition to the shared ones, and its number of nodes."""

    name: str
    flags: list[str]
    nodes: int = 1
    fault: str | None = None
    """Fault to inject; see rank_worker.broken."""
    look_at: str = ""
    """Additional measurements, words: "collectives", "gradients", "graphs", "memory"."""
    command: str = "pretrain"
    """Words before the flags."""
    out: str | None = None
    """Name of its out_dir in the test's folder, if not its name."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_group(
    folder: Path, size: int, cases: list[Case], shared: list[str], **environment: str
) -> dict[str, list[dict]]:
    """Run all cases in one group of gloo processes and return the results of each rank by case."""
    if not cases:
        return {}
    work = folder / f"group-of-{size}-{len(list(folder.glob('group-*')))}"
    work.mkdir(parents=True)
    listed = [asdict(c) | {"flags": [*shared, *c.flags, "--out_dir", str(folder / (c.out or c.name))]} for c in cases]
    (work / "cases.json").write_text(json.dumps(listed))
    port = free_port()
    environ = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")}
    environ |= {"OMP_NUM_THREADS": "1"} | environment
    if environment:  # variables read at process start need new processes
        words = [[str(rank), str(size), str(port), str(work / "cases.json")] for rank in range(size)]
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "helpers.rank_worker"]
        for process in [subprocess.Popen([*command, *w], env=environ) for w in words]:
            process.wait()
    else:
        start_server()
        arguments = [(rank, size, port, work / "cases.json", environ, extension._installed) for rank in range(size)]
        processes = [SERVER.Process(target=rank_worker.live, args=args) for args in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    output = "\n".join(path.read_text() for path in sorted(work.glob("*.out")))
    missing = [c.name for c in cases for r in range(size) if not (work / f"{r}-{c.name}.json").exists()]
    assert not missing, f"{missing} did not end:\n{output[-6000:]}"
    results = {c.name: [json.loads((work / f"{r}-{c.name}.json").read_text()) for r in range(size)] for c in cases}
    for case in cases:
        if case.fault is None:
            assert all(seen["exit"] == 0 for seen in results[case.name]), f"{case.name} failed:\n{output[-6000:]}"
    return results


def run_uninterrupted_and_killed_twice(words: list[str], folder: Path) -> None:
    """Run a command for 40 steps into ``folder / "uninterrupted"``, and again into "killed" with two SIGKILLs."""

    def start(out: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "toolkit", *words, "--train.max_steps", "40", "--train.save_interval", "10"]
        command += ["--out_dir", str(out), "--resume", "auto"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    uninterrupted = start(folder / "uninterrupted")
    _, errors = uninterrupted.communicate()
    assert uninterrupted.returncode == 0, errors
    for step in (10, 30):
        process = start(folder / "killed")
        read_until(process, f"saved {folder / 'killed'}/step-{step:08d}")
        process.kill()
        process.communicate()
    last = start(folder / "killed")
    output, errors = last.communicate()
    assert last.returncode == 0, errors
    assert "resuming from" in output


def read_until(process: Any, text: str) -> None:
    """Read a process's output up to the first line that contains ``text``."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} never came:\n{''.join(seen)}\n{process.stderr.read()}")
