"""A run under load: memory, threads and open files stay flat after the warm-up."""

import os
import statistics
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from helpers import small_segments
from helpers.processes import Forked, finish, group_members

from tests.faults.core import Way
from tests.faults.states import shared

MINUTES = {0: 1.0, 1: 30.0}
"""Length of the run, by the seed."""
MAX_SLOPE = {0: 5.0, 1: 1.0}
"""MiB of resident memory per minute, summed over the processes of the run; a short one has the allocators' noise."""
END_S = 5
"""Seconds at the end of a run that are not compared: the last checkpoint and the report need memory."""
MIB_OF_PAGE = os.sysconf("SC_PAGE_SIZE") / 2**20


class Sample(NamedTuple):
    minutes: float
    mib: float
    threads: int
    files: int


def trial(subject: str, seed: int, folder: Path, *more: str) -> int:
    process = Forked(command(folder, MINUTES[seed], *more), script=Path(small_segments.__file__))
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=0)  # begins to read its output, which fills the pipe
    samples, started_at = [], time.monotonic()
    while process.poll() is None:
        samples.append(sample(process, started_at))
        time.sleep(MINUTES[seed] / 10)
    _, err = finish(process)
    assert (process.returncode, err) == (0, ""), f"code {process.returncode}: {err[-500:]}"
    lasted = samples[-1].minutes
    assert 0.9 * MINUTES[seed] < lasted < MINUTES[seed] + 5, f"ended after {lasted:.1f} minutes"
    require_flat([s for s in samples if s.minutes < lasted - END_S / 60], MAX_SLOPE[seed])
    return 1


def command(folder: Path, minutes: float, *more: str) -> list[str]:
    """Return a run with streamed text, workers, validations, samples and checkpoints written by a thread."""
    data = {"path": shared()["text"], "vocab_size": 300, "cache_dir": folder / "cache", "max_cache_gb": 1e-4}
    data |= {"num_workers": 1, "prepare_workers": 1}
    train = {"global_batch_size": 8, "micro_batch_size": 4, "max_seq_length": 32, "max_time": minutes}
    train |= {"save_interval": 100, "keep_last": 2, "async_save": "true", "log_interval": 1, "lr_schedule": "constant"}
    groups = {"data": data, "train": train, "eval": {"interval": 50, "max_new_tokens": 16}}
    flags = [part for group, values in groups.items() for k, v in values.items() for part in (f"--{group}.{k}", str(v))]
    where = ["--out_dir", str(folder / "out"), "--accelerator", "cpu"]
    return ["pretrain", "pico-llama", "--data", "HuggingFaceText", *flags, *where, *more]


def sample(process: Forked, started_at: float) -> Sample:
    """Sum what all processes of the run hold."""
    pages = threads = files = 0
    for pid in group_members(process):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            threads += len(os.listdir(f"/proc/{pid}/task"))
            files += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # it has exited in the meantime
            continue
    return Sample((time.monotonic() - started_at) / 60, pages * MIB_OF_PAGE, threads, files)


def require_flat(samples: list[Sample], max_slope: float) -> None:
    """Compare the samples after the warm-up, a third of the run.

    A checkpoint or a segment in work, or a worker that starts, changes threads and files for a moment: their medians
    are compared. A leak at each checkpoint or segment would add far more than 2.
    """
    after = samples[len(samples) // 3 :]
    first, second = after[: len(after) // 2], after[len(after) // 2 :]
    slope = slope_of(after)
    assert slope < max_slope, f"memory grows by {slope:.2f} MiB per minute, from {after[0].mib:.0f} MiB"
    for name in ("threads", "files"):
        medians = [statistics.median(getattr(s, name) for s in half) for half in (first, second)]
        assert medians[1] <= medians[0] + 2, f"{name} grow from {medians[0]} to {medians[1]}"


def slope_of(samples: list[Sample]) -> float:
    """Return the growth of memory in MiB per minute, by least squares."""
    mean = [sum(values) / len(samples) for values in list(zip(*samples, strict=True))[:2]]
    over = sum((s.minutes - mean[0]) * (s.mib - mean[1]) for s in samples)
    return over / sum((s.minutes - mean[0]) ** 2 for s in samples)


def seeds(subject: str, quick: bool) -> Iterable[int]:
    return (0,) if quick else (1,)


WAY = Way(
    "soak",
    "a run of 30 minutes (quick: 1) with streamed data, workers, validations, samples and checkpoints has flat memory, "
    "threads and open files after its warm-up",
    "S1",
    lambda: ("streamed",),
    seeds,
    trial,
)
