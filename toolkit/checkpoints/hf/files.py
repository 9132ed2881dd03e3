"""Open and write the weight files of a Hugging Face folder: safetensors, or, to read, pickles restricted to tensors."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toolkit.checkpoints.finite import nonfinite_tensors
from toolkit.checkpoints.scratch import trim_after
from toolkit.checkpoints.weights import Tensors, load_state, only_tensors
from toolkit.errors import UserError
from toolkit.io.safe_parse import open_regular

# Dtype names in the safetensors format.
FORMAT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_INTEGERS = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64"}  # written only
QUANTIZED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
DTYPES_BY_NAME = {name: dtype for dtype, name in FORMAT_NAMES.items()} | QUANTIZED
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}


class StoredTensor(NamedTuple):
    """Name, shape and dtype of a tensor in a weight file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Return the memory-mapped tensor."""
        opened = open_weights(self.file)
        return opened[self.name].contiguous() if isinstance(opened, dict) else opened.get_tensor(self.name)


class Dequantized(NamedTuple):
    """A weight that ``dequantize`` computes from stored tensors when it is read, by default in bfloat16."""

    shape: tuple[int, ...]
    parts: tuple["Weight", ...]
    dequantize: Callable[..., Tensor]
    dtype: torch.dtype = torch.bfloat16

    def read(self) -> Tensor:
        return self.dequantize(*(part.read() for part in self.parts))


Weight = StoredTensor | Dequantized  # read on demand


def close() -> None:
    """Close all open weight files."""
    open_weights.cache_clear()


def list_weights(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (name, shape, safetensors dtype name) of each tensor in a file."""
    opened = open_weights(path)
    if isinstance(opened, dict):
        yield from ((name, tuple(t.shape), DTYPE_NAMES.get(t.dtype, str(t.dtype))) for name, t in opened.items())
    else:
        parts = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 (not a dictionary)
        yield from ((name, tuple(part.get_shape()), part.get_dtype()) for name, part in parts)


@functools.cache
def open_weights(path: Path) -> Any:
    """Open a weight file until :func:`close`. Return a ``safe_open`` handle, or {name: tensor} for a pickle."""
    try:
        with open_regular(path) as file:
            if file.read(24).startswith(b"version https://git-lfs"):
                raise UserError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        return safe_open(path, "pt") if path.suffix == ".safetensors" else only_tensors(load_state(path), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; copy or download it again") from error
    except SafetensorError as error:
        raise UserError(f"{path}: the file is damaged or truncated ({error}); copy or download it again") from error


def write_safetensors(
    path: Path, expected: Tensors, tensors: Iterator[tuple[str, Tensor]], metadata: Mapping[str, str] = {}
) -> list[str]:
    """Stream tensors to a safetensors file. Return the names of tensors that contain NaN or Inf.

    ``expected`` has the names, shapes and dtypes of the next items of ``tensors``. safetensors' ``save_file`` needs all
    tensors in memory and loses the errno of a full disk.

    Format (https://huggingface.co/docs/safetensors): header length (8 bytes, little-endian), JSON header (dtype, shape
    and offsets of each tensor), tensor data in C order without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in expected.items():
        offsets = [end, end := end + tensor.nbytes]
        header[name] = {
            "dtype": (FORMAT_NAMES | _INTEGERS)[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the tensors to 8 bytes
    nonfinite: list[str] = []
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for key in expected:
            name, tensor = next(tensors)
            meta = expected[key]
            assert (name, tensor.shape, tensor.dtype) == (key, meta.shape, meta.dtype), f"{name} is not {key}"
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            nonfinite += nonfinite_tensors({name: tensor})
            numel = tensor.numel()
            del tensor
            trim_after(numel)
    return nonfinite
