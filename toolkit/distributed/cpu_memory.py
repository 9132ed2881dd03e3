"""CPU memory: the limit of this process, and glibc's allocator, which is tuned for training."""

import ctypes
import math
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_NO_LIMIT = 1 << 60  # bytes; cgroup v1 writes "no limit" as a number near 2**63


def memory_limit(root: Path = Path("/")) -> float:
    """Return the cgroup (v1 or v2) memory limit of this process in bytes, including parent groups; infinity if none."""
    limits = []
    with suppress(OSError):
        text = (root / "proc" / "self" / "cgroup").read_text()
        for controllers, path in re.findall(r"^\d+:(|memory):/(.*)$", text, re.MULTILINE):
            folder = root / "sys" / "fs" / "cgroup" / controllers / path
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            for above in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(int((above / file).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=math.inf)


def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None  # musl lacks both


def disable_malloc_trim(accelerator: str) -> None:
    """Let glibc keep large freed blocks instead of returning them to the kernel, for training on the CPU.

    A training step frees and reallocates the same tensors; by default each allocation is a new mmap with page faults.
    The parameters are mallopt(3)'s M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD.
    """
    mallopt = _glibc("mallopt")
    if accelerator == "cpu" and mallopt is not None:
        for parameter, value in ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 1 << 28)):
            mallopt(parameter, value)


def malloc_trim() -> None:
    """Return freed memory to the kernel; glibc would keep fragments that may be too small to reuse."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)
