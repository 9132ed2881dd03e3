"""Memory that the system can write out: tensors in files without a name (M2)."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.leftovers import sweep, temporary_prefix

_sweep_once = functools.cache(sweep)  # per folder: there are many tensors
SMALL = 65_536  # numbers; fewer are not worth a file of their own


def empty_on_disk(size: torch.Size, dtype: torch.dtype, folder: Path) -> Tensor:
    """Return an empty tensor in a file that has no name any more, or in memory if it is small.

    Args:
        size: Of the tensor.
        dtype: Of the tensor.
        folder: What is read or written; its disk is tried first, which has room for such files, while the system's
            folder for temporary files is often in memory.

    Raises:
        UserError: there is no room for the file.
    """
    if size.numel() < SMALL:
        return torch.empty(size, dtype=dtype)
    nbytes = size.numel() * dtype.itemsize
    for place in (folder.parent, Path(tempfile.gettempdir())):
        try:
            return _mapped(place, nbytes).view(dtype).view(size)
        except (OSError, RuntimeError):  # read-only, full, or a file system that maps no files
            continue
    raise UserError(
        f"{folder}: no {nbytes:,} bytes of disk to read into, neither beside it nor in {tempfile.gettempdir()}; free "
        "some space or set TMPDIR to a folder with room"
    )


def _mapped(place: Path, nbytes: int) -> Tensor:
    _sweep_once(place)
    with tempfile.NamedTemporaryFile(dir=place, prefix=temporary_prefix()) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a disk that is full later would kill the process
        return torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)
