"""Measure what a failure costs: the seconds and the steps until a run is where it was.

    python scripts/benchmark_recovery.py --rounds 3

A run of two processes on the CPU is hurt at a step halfway between two saves, and started again with `--resume auto`.
Reported per kind of failure, as medians: the seconds from the failure to the end of all processes; from there to the
first new step of the next run, which starts at once; and the steps that it repeats. With `--max_restarts` the command
itself starts it.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

SAVE_INTERVAL, AT = 50, 75
KINDS = {  # signal, which processes
    "SIGKILL of one process": (signal.SIGKILL, "one"),
    "the same, --max_restarts 1": (signal.SIGKILL, "last"),
    "SIGKILL of all (a machine is lost)": (signal.SIGKILL, "all"),
    "SIGTERM (a spot machine's notice)": (signal.SIGTERM, "first"),
    "Ctrl-C": (signal.SIGINT, "all"),
}


def start(model: str, out_dir: Path, restarts: int = 0) -> subprocess.Popen:
    words = (
        f"pretrain {model} --data SyntheticTokens --accelerator cpu --devices 2 --train.max_seq_length 64 "
        f"--train.global_batch_size 4 --train.max_steps 100000 --train.save_interval {SAVE_INTERVAL} "
        "--train.log_interval 1 --eval.interval 0 --eval.final_validation false --resume auto "
        f"--max_restarts {restarts}"
    )
    command = [sys.executable, "-m", "toolkit", *words.split(), "--out_dir", str(out_dir)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)


def step_of(out_dir: Path) -> int:
    """Return the last step in the log; 0 before the first."""
    try:
        with open(out_dir / "logs" / "metrics.csv", newline="") as file:
            return max((int(row["step"]) for row in csv.DictReader(file) if row["loss"]), default=0)
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # the last line may be incomplete
        return 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"the run ended with exit code {process.returncode}")
        time.sleep(0.02)


def measure(model: str, kind: str, out_dir: Path) -> tuple[float, float, int]:
    number, which = KINDS[kind]
    process = start(model, out_dir, restarts=int(which == "last"))
    wait_until(lambda: step_of(out_dir) >= AT, process)
    group = members(process.pid)
    began = time.monotonic()
    if which == "all":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if which == "first" else group[-1], number)
    if which == "last":
        wait_until(lambda: not set(group[1:]) & set(members(process.pid)), process)
    else:
        process.wait()
    ended, reached = time.monotonic() - began, step_of(out_dir)
    saved = max(int(path.name.split("-")[1]) for path in out_dir.glob("step-*") if (path / "COMPLETE").exists())
    if which != "last":
        process = start(model, out_dir)
    wait_until(lambda: step_of(out_dir) != reached, process)  # a resumed run first cuts its log after the checkpoint
    wait_until(lambda: step_of(out_dir) > saved, process)
    started = time.monotonic() - began - ended
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return ended, started, reached - saved


def members(leader: int) -> list[int]:
    """Return the running processes of a process group, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pico-llama", help="a named architecture (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="per kind of failure (%(default)s)")
    args = parser.parse_args()
    print("| failure | until all have ended | until the next step | steps repeated |\n|---|---:|---:|---:|")
    for kind in KINDS:
        with TemporaryDirectory() as folder:
            rounds = [measure(args.model, kind, Path(folder) / str(i)) for i in range(args.rounds)]
        ended, started, steps = (median(column) for column in zip(*rounds, strict=True))
        print(f"| {kind} | {ended:.1f} s | {started:.1f} s | {steps:.0f} |", flush=True)


if __name__ == "__main__":
    main()
