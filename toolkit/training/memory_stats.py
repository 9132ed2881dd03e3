"""Report the memory use of all ranks."""

import os
from pathlib import Path
from typing import Any

import torch

from toolkit.distributed import ranks
from toolkit.training.throughput import peak_memory_gb


def memory_stats() -> list[dict[str, Any]]:
    """Return the memory use of each rank in GB (1e9 bytes). Every rank must call it.

    Keys: rank, device, rss_gb and peak_rss_gb (process memory on the CPU). With CUDA also allocated_gb, reserved_gb and
    peak_gb (peak allocated).
    """
    stats: dict[str, Any] = {"rank": ranks.global_rank(), "device": "cpu"}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stats["device"] = f"cuda:{torch.cuda.current_device()}"
        stats["allocated_gb"] = torch.cuda.memory_allocated() / 1e9
        stats["reserved_gb"] = torch.cuda.memory_reserved() / 1e9
        stats["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    stats |= {"rss_gb": _resident_gb(), "peak_rss_gb": peak_memory_gb(torch.device("cpu"))}
    return ranks.all_gather_object(stats)


def _resident_gb() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # Linux only
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9
