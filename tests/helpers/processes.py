"""Commands as real processes, with several ranks and nodes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PRETRAIN = ["-m", "toolkit", "pretrain", "pico-llama", "--accelerator", "cpu"]
TRAIN = {"global_batch_size": 8, "micro_batch_size": 2, "max_seq_length": 32, "max_steps": 100_000}
LAUNCHERS = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TOOLKIT_PARENT_PID")


def flags_for(corpus: Path, out: Path, **train) -> list[str]:
    flags = ["--data", "TextFiles", "--data.train_data_path", str(corpus), "--data.vocab_size", "300"]
    return flags + common_flags(out, **train)


def common_flags(out: Path, **train) -> list[str]:
    flags = ["--out_dir", str(out), "--resume", "auto", "--eval.interval", "0", "--eval.final_validation", "false"]
    return flags + [part for name, value in (TRAIN | train).items() for part in (f"--train.{name}", str(value))]


def failing(out: Path, rank: int, how: str) -> list[str]:
    data = ["--data", "helpers.failing_data.Fails", "--data.rank", str(rank), "--data.how", how]
    return [*data, "--data.vocab_size", "300", *common_flags(out)]


def start(*arguments: str, **environ: str) -> subprocess.Popen:
    """Start Python in a process group of its own, as a terminal would."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])  # tests/
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environ
    return subprocess.Popen([sys.executable, *arguments], env=environment, **pipes)


def pretrain(*flags: str, **environ: str) -> subprocess.Popen:
    return start(*PRETRAIN, *flags, **environ)


def group_members(process: subprocess.Popen) -> list[int]:
    """Return the running processes of the group that a process leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, leader = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has exited in the meantime
            continue
        if int(leader) == process.pid and state != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def child_of(process: subprocess.Popen) -> int:
    (child,) = set(group_members(process)) - {process.pid}
    return child


def finish(process: subprocess.Popen, seconds: float = 300) -> tuple[str, str]:
    """Wait until all processes have ended; return their stdout and stderr.

    The limit ends a hang and nothing else: on a busy machine, two processes need more than a minute to start.
    """
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        left = group_members(process)
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{left} did not end: {process.communicate()}") from None
    closed = time.monotonic()
    # the pipes close shortly before the last of them ends
    while group_members(process) and time.monotonic() - closed < 10:
        time.sleep(0.05)
    assert group_members(process) == []
    return out, err


def ended(process: subprocess.Popen, code: int, *texts: str, within: float = 60) -> str:
    """Check the exit code and that stderr is one line with the texts; return stdout."""
    out, err = finish(process, within)
    assert process.returncode == code, err
    assert len(err.splitlines()) == 1 and err.startswith("toolkit pretrain: "), err
    for text in texts:
        assert text in err
    return out


def folders(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if (path / "COMPLETE").exists()}
