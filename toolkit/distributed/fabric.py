"""Where a run happens: the one place that builds Lightning's Fabric."""

from __future__ import annotations

import ctypes
import sys

from lightning.fabric import Fabric

from toolkit.args import Precision
from toolkit.distributed.device import Accelerator, pick_accelerator, pick_precision


def build_fabric(accelerator: Accelerator, precision: Precision | None) -> tuple[Fabric, Precision]:
    """Build and launch Fabric on one device; return it with the precision it runs in."""
    device = pick_accelerator(accelerator)
    chosen = pick_precision(precision, device)
    if device == "cpu":
        keep_freed_memory()
    fabric = Fabric(accelerator=device, devices=1, precision=chosen)
    fabric.launch()
    return fabric, chosen


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks instead of handing them back to the kernel.

    A training step frees and takes the same tensors again and again; by default each goes through mmap and is paged
    in anew. The parameters are mallopt(3)'s M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for parameter, value in ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 1 << 28)):
            mallopt(parameter, value)
