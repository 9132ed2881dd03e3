"""Open the weights files of a Hugging Face folder: safetensors, or pickles restricted to tensors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toolkit import untrusted
from toolkit.checkpoints.weights import load_state
from toolkit.errors import UserError

# Names of dtypes in the safetensors format.
FORMAT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
QUANTIZED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
DTYPES = {name: dtype for dtype, name in FORMAT_NAMES.items()} | QUANTIZED
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Weight(Protocol):
    """A weight that is read on demand: one stored tensor, or a quantized one with its scales."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> Tensor: ...


class StoredTensor(NamedTuple):
    """A tensor in a file, under its name in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def format_name(self) -> str:
        """The dtype's name in the safetensors format."""
        return _NAMES[self.dtype]

    def read(self) -> Tensor:
        """Return the tensor, memory-mapped."""
        return open_weights(self.file).get_tensor(self.name)


def close() -> None:
    """Close the files."""
    open_weights.cache_clear()


@functools.cache
def open_weights(path: Path) -> Any:
    """Open a file, with the interface of ``safe_open``; it stays open until :func:`close`."""
    try:
        with untrusted.open_regular(path) as file:
            if file.read(24).startswith(b"version https://git-lfs"):
                raise UserError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        return safe_open(path, "pt") if path.suffix == ".safetensors" else _PickleFile(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; copy or download it again") from error
    except SafetensorError as error:
        raise UserError(f"{path}: the file is damaged or cut short ({error}); copy or download it again") from error


class _PickleFile:
    """A ``torch.save`` file, read with weights_only and memory-mapped, with the interface of ``safe_open``."""

    def __init__(self, path: Path) -> None:
        self._tensors = load_state(path)
        for name, value in self._tensors.items():
            if not isinstance(value, Tensor):
                raise UserError(f"{path}: {name} is a {type(value).__name__}, not a tensor")
            if not (isinstance(name, str) and value.layout == torch.strided and value.device.type == "cpu"):
                raise UserError(f"{path}: {name!r} is not a plain tensor; the file must hold weights only")

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> _TensorInfo:
        return _TensorInfo(self._tensors[name])


class _TensorInfo:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self._tensor.dtype, str(self._tensor.dtype))
