"""Tune glibc's allocator for CPU training. A no-op with other C libraries."""

import ctypes
import sys
from collections.abc import Callable


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
