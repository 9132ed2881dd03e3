"""What the C library does with freed memory, where the work is on the CPU. Only glibc is told anything."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable


def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None  # musl has none of them


def keep_freed_memory(accelerator: str) -> None:
    """Have glibc keep large freed blocks instead of handing them back to the kernel, where the work is on the CPU.

    A training step frees and takes the same tensors again and again; by default each goes through mmap and is paged
    in anew. The parameters are mallopt(3)'s M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD.
    """
    mallopt = _glibc("mallopt")
    if accelerator == "cpu" and mallopt is not None:
        for parameter, value in ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 1 << 28)):
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Give freed memory back. glibc would keep the room of each freed tensor, and may find none of it large enough."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)
