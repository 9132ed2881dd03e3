"""N8 honest-throughput: measure tokens per second, MFU and peak memory. See toolkit.models.flops for FLOPs."""

import resource
import sys

import numpy as np
import torch


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in GB (1e9 bytes): the CUDA allocator's, or the process's resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


class Throughput:
    """Counts tokens and seconds of training steps since the last :meth:`read`.

    Validation and saving are excluded, and logging unless the device waits for it: only the values passed to
    :meth:`add` count.
    """

    def __init__(self, flops_per_token: float | None, peak_flops: float | None) -> None:
        """``peak_flops`` is the total of all devices, in FLOP/s."""
        self._flops_per_token, self._peak = flops_per_token, peak_flops
        self._tokens, self._seconds = 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds

    def read(self) -> dict[str, float]:
        """Return tokens_per_sec, and mfu if the peak is known. Resets the counters."""
        tokens_per_sec = self._tokens / self._seconds if self._seconds else float("nan")
        self._tokens, self._seconds = 0, 0.0
        values = {"tokens_per_sec": tokens_per_sec}
        if self._peak is not None and self._flops_per_token is not None:
            values["mfu"] = self._flops_per_token * tokens_per_sec / self._peak
        return values


class StepTimes:
    """Measures step wall time and the slowest rank since the last :meth:`read`.

    A rank's host time in a step is its callbacks, logging and data loading between the last collective and the step's
    all-reduce. After that, collectives synchronize the ranks, so only a profile (``--profile``) shows a rank that
    computes slowly.
    """

    COLUMNS = ("data_wait_s", "step_s", "slowest_rank", "update_s")

    def __init__(self) -> None:
        self._steps: list[tuple[np.ndarray, float]] = []

    def add(self, microseconds: list[list[int]], seconds: float) -> None:
        """Add a step.

        Args:
            microseconds: For each rank, host time and the part spent on data loading.
            seconds: Seconds from the step's all-reduce to its end.
        """
        self._steps.append((np.array(microseconds).T / 1e6, seconds))

    def read(self) -> dict[str, float]:
        """Return per-step means. Resets the counters.

        step_s is the wall time without validation and saving. slowest_rank is the rank with the most host time, and
        data_wait_s its data loading time. update_s is the time from the step's all-reduce on: without data loading, and
        what an objective does before an update.
        """
        by_rank, rest = (np.array(values) for values in zip(*self._steps, strict=True))
        self._steps = []
        host, data = by_rank.mean(0)
        slowest = int(host.argmax())
        step_s = (by_rank[:, 0].max(1) + rest).mean()
        times = {"data_wait_s": float(data[slowest]), "step_s": float(step_s), "slowest_rank": slowest}
        return times | {"update_s": float(rest.mean())}
