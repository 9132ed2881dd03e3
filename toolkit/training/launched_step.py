"""A step that the device computes and whose result the host has not read yet."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.distributed import ranks
from toolkit.optim.update import FusedUpdate, Update
from toolkit.training.run import Run, overrides
from toolkit.training.step import StepResult

LATE_ON = {"cuda"}
"""Devices on which the host launches a step before it reads the loss and the norm of the one before."""


@dataclass
class LaunchedStep:
    """A launched step.

    Args:
        totals: Counts and flags of all ranks, see :meth:`toolkit.training.engine.Engine._all_reduce_step`.
        microseconds: Host times of all ranks, from there.
        result: Waits for the step, see :func:`toolkit.training.step.launch_step`.
        started_at: ``time.perf_counter()`` before its data was read.
        start, end: Notes of :class:`Clock`: the end of the step before, or if that was read, before the data was read;
            and after the launch.
        is_last: Whether the run ends with it.
        validates, saves: Whether a validation or a checkpoint is due after it.
        is_read_late: Whether the next step is launched before the result is read.
        seconds: Seconds from its all-reduce to the end of its launch, if the step before was read then.
    """

    totals: dict[str, int]
    microseconds: list[list[int]]
    learning_rate: float
    result: Callable[[], StepResult]
    started_at: float
    start: Any
    end: Any
    is_last: bool
    validates: bool
    saves: bool
    is_read_late: bool
    seconds: float = 0.0


class Clock:
    """Measures the time between two points of a run: on CUDA of the device's work, elsewhere of the host's."""

    def __init__(self, is_on_device: bool) -> None:
        self._is_on_device = is_on_device

    def note(self) -> Any:
        """Note the end of the work that is launched so far."""
        if not self._is_on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Wait for the work before ``end``, and return the seconds between two notes."""
        if not self._is_on_device:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def reads_late(run: Run, update: Update) -> bool:
    """Whether the run reads a step's result after it has launched the next one. Collective.

    The device must be able to refuse a step, the schedule must not depend on the time of the step before, and
    ``on_step_end`` and ``on_log`` of all callbacks must be marked :func:`toolkit.training.run.late`.
    """
    late = run.fabric.device.type in LATE_ON and isinstance(update, FusedUpdate) and run.limits.total_seconds is None
    late = late and not run.objective.makes_batches
    for callback in run.callbacks:
        for hook in ("on_step_end", "on_log"):
            late &= not overrides(callback, hook) or hasattr(getattr(callback, hook), "may_be_late")
    return all(ranks.all_gather_object(late))
