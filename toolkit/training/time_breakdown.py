"""Compute a time breakdown of profiled steps from torch.profiler's Chrome traces."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

DATA_WAIT, FORWARD, BACKWARD = "toolkit::data_wait", "toolkit::forward", "toolkit::backward"
BEGIN_STEP, VALIDATE, SAVE = "toolkit::begin_step", "toolkit::validate", "toolkit::save"
"""Names of the ranges that the training loop adds to a trace."""

MAX_TRACE_BYTES = 50_000_000  # compressed; 10 to 20 times larger as text, more as Python objects
_DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}  # trace categories
_COLLECTIVES = ("gloo:", "nccl")  # name prefixes of Gloo operations and NCCL kernels
_NO_COMPUTE = ("c10d::", "autograd::", "torch::autograd::")  # operator namespaces; the last two contain FSDP's hooks

Event = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Time breakdown of the profiled steps on one rank, in fractions. The first four add up to 1.

    Time outside validation and saving counts for the first category that applies:

    Args:
        compute: A kernel or copy runs on the GPU. Without a GPU: an operator other than a collective runs on the CPU.
        communication: A collective runs or waits for other ranks.
        data_wait: The training loop waits for the next batch.
        host: Everything else: Python, kernel launches, callbacks, logging.
        hidden_communication: Collectives that overlap with compute; part of ``compute``.
        begin_step: What the objective does before an update, such as rollouts; part of the first four.
        garbage_collection: Python's garbage collections after the first step, of the run's time since then.
        step_s: Seconds per step.
    """

    compute: float
    communication: float
    data_wait: float
    host: float
    hidden_communication: float
    begin_step: float
    garbage_collection: float
    step_s: float


def read_shares(path: Path, n_steps: int, garbage_collection: float) -> Shares:
    """Read a trace and return the time breakdown of its first ``n_steps`` steps."""
    if path.stat().st_size > MAX_TRACE_BYTES:
        raise ValueError(f"{path} is too large to be read during the run; open it in ui.perfetto.dev")
    with gzip.open(path) as file:
        return compute_shares(json.load(file)["traceEvents"], n_steps, garbage_collection)


def compute_shares(events: Iterable[Event], n_steps: int, garbage_collection: float = 0.0) -> Shares:
    """Return the time breakdown of the first ``n_steps`` steps from trace events."""
    ranges = [event for event in events if event.get("ph") == "X"]
    named = [event for event in ranges if _category(event) == "user_annotation"]
    steps = sorted(_interval(event) for event in named if event["name"].startswith("ProfilerStep#"))[:n_steps]
    if len(steps) < n_steps or not steps:
        raise ValueError(f"the trace has {len(steps)} steps instead of {n_steps}")
    start, end = steps[0][0], steps[-1][1]

    def total(*groups: list[Event]) -> float:
        return _union_length(map(_interval, chain(*groups)), start, end)

    pauses = [event for event in named if event["name"] in (VALIDATE, SAVE)]
    blocking, compute = _find_compute(ranges)
    collectives = [event for event in ranges if event["name"].startswith(_COLLECTIVES)]
    data, begins = ([event for event in named if event["name"] == name] for name in (DATA_WAIT, BEGIN_STEP))

    groups = pauses, blocking, compute, collectives, data
    paused, blocked, computed, busy, used = (total(*groups[:n]) for n in range(1, 6))
    in_collectives = total(pauses, blocking, collectives)
    seconds = end - start - paused
    return Shares(
        compute=(computed - blocked) / seconds,
        communication=(blocked - paused + busy - computed) / seconds,
        data_wait=(used - busy) / seconds,
        host=(end - start - used) / seconds,
        hidden_communication=(computed + in_collectives - busy - blocked) / seconds,
        begin_step=(total(pauses, begins) - paused) / seconds,
        garbage_collection=garbage_collection,
        step_s=seconds / n_steps / 1e6,
    )


def _find_compute(ranges: list[Event]) -> tuple[list[Event], list[Event]]:
    """Return (blocking CPU collectives, compute events). The first list is empty with a GPU."""
    if work := [e for e in ranges if _category(e) in _DEVICE_WORK and not e["name"].startswith(_COLLECTIVES)]:
        return [], work
    operators = [e for e in ranges if _category(e) == "cpu_op"]
    compute = [e for e in operators if "::" in e["name"] and not e["name"].startswith(_NO_COMPUTE)]
    compiled = [e for e in operators if e["name"].startswith("CompiledFunction")]
    return [e for e in operators if e["name"].startswith("c10d::")], compute + compiled


def _category(event: Event) -> str:
    return str(event.get("cat", "")).lower()


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]  # microseconds


def _union_length(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Return the length of the union of intervals between ``start`` and ``end``."""
    covered, reached = 0.0, start
    for first, last in sorted(intervals):
        last = min(last, end)
        covered += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return covered
