"""Create tensors in memory-mapped temporary files, which the system can page out (M2)."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from toolkit.distributed.cpu_memory import malloc_trim
from toolkit.errors import UserError
from toolkit.io.tempfiles import sweep, temporary_prefix

SMALL_NUMEL = 65_536  # elements; smaller tensors stay in memory


def mmap_empty(size: torch.Size, dtype: torch.dtype, folder: Path) -> Tensor:
    """Return an empty tensor in a temporary file, or in memory if it is small.

    The file is created in the parent of ``folder`` if possible: the system's temporary folder is often in memory.
    """
    if size.numel() < SMALL_NUMEL:
        return torch.empty(size, dtype=dtype)
    nbytes = size.numel() * dtype.itemsize
    for parent in (folder.parent, Path(tempfile.gettempdir())):
        try:
            return _map_file(parent, nbytes).view(dtype).view(size)
        except (OSError, RuntimeError):  # read-only, full, or a file system without mmap
            continue
    raise UserError(
        f"{folder}: needs {nbytes:,} bytes of disk space in its parent folder or in {tempfile.gettempdir()}; free some "
        "space or set TMPDIR to a folder with enough"
    )


def mmap_copy(tensor: Tensor, folder: Path, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy in a temporary file (see :func:`mmap_empty`): torch.save needs all tensors at once."""
    trim_after(tensor.numel())  # frees what the previous tensor was computed from
    return mmap_empty(tensor.shape, dtype or tensor.dtype, folder).copy_(tensor)


def trim_after(numel: int) -> None:
    """Return the memory of a deleted tensor to the system if it was large."""
    if numel >= SMALL_NUMEL:
        malloc_trim()


def _map_file(parent: Path, nbytes: int) -> Tensor:
    sweep(parent)
    with tempfile.NamedTemporaryFile(dir=parent, prefix=temporary_prefix()) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)  # otherwise a full disk kills the process later (SIGBUS)
        return torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)
