"""Read the weights of a Hugging Face folder one at a time: safetensors, or pickles restricted to tensors."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toolkit import untrusted
from toolkit.checkpoints.hf import fp8, mxfp4
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.weights import load_state
from toolkit.errors import UserError

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Names of dtypes in the safetensors format.
FORMAT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_QUANTIZED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_TYPES = {name: dtype for dtype, name in FORMAT_NAMES.items()} | _QUANTIZED
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
# Causal masks and RoPE tables that older versions of transformers saved with GPT-2, GPT-NeoX and Llama.
_BUFFERS = re.compile(r"(.+\.)?(attn|attention)\.(masked_)?bias|(.+\.)?rotary_emb\.inv_freq")


class StoredTensor(NamedTuple):
    """A tensor in a file, under its name in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Return the tensor, memory-mapped."""
        return _open(self.file).get_tensor(self.name)


Weight = StoredTensor | mxfp4.Packed | fp8.Scaled


def find_weights(hf_dir: Path) -> dict[str, Weight]:
    """List the tensors in a folder's files, preferring safetensors over pickles. Call :func:`close` afterwards.

    A quantized weight and its scales are listed as one 16-bit weight.

    Raises:
        UserError: there are no weights, an index points outside the folder (S4), or a file is missing or damaged.
    """
    where: dict[str, Any] = {}
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (hf_dir / single).is_file():
            files = [single]
            break
        if (hf_dir / index).is_file():
            where = _read_index(hf_dir / index)
            files = sorted(set(where.values()))
            break
    else:
        raise UserError(f"hf_dir {hf_dir}: {_missing_weights_hint(hf_dir)}")
    found: dict[str, StoredTensor] = {}
    for file in files:
        opened = _open(hf_dir / file)
        for name in opened.keys():  # noqa: SIM118 (not a dictionary)
            if (name in found and where.get(name) != file) or _BUFFERS.fullmatch(name):
                continue
            info = opened.get_slice(name)
            dtype = info.get_dtype()
            if dtype not in _TYPES:
                raise _unsupported_dtype(hf_dir / file, name, dtype)
            found[name] = StoredTensor(hf_dir / file, name, tuple(info.get_shape()), _TYPES[dtype])
    weights = mxfp4.join_blocks(found)
    if (block := fp8.block_size(read_json(hf_dir / CONFIG))) is not None:
        weights = fp8.join_scales(weights, block)
    for name, stored in weights.items():
        if stored.dtype == torch.float8_e4m3fn and block is not None:
            raise UserError(
                f"{stored.file}: {fp8.describe_load_error(name, weights, block)}; copy or download it again"
            )
        if stored.dtype in _QUANTIZED.values():
            raise _unsupported_dtype(stored.file, name, _NAMES[stored.dtype])
    return weights


def _unsupported_dtype(file: Path, name: str, dtype: str) -> UserError:
    return UserError(f"{file}: {name} has unsupported dtype {dtype}; get the 16-bit model")


def quantized_bits(config_json: dict[str, Any]) -> float | None:
    """Return bits per weight as specified by ``config.json``; None if not quantized, or in an unsupported format."""
    if mxfp4.is_packed(config_json):
        return mxfp4.BITS
    return None if fp8.block_size(config_json) is None else fp8.BITS


def close() -> None:
    """Close the files."""
    _open.cache_clear()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file cannot be read or does not hold one.
    """
    try:
        values = untrusted.read_json(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {' '.join(str(error).split())}; copy or download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object; copy or download it again")
    return values


def _read_index(path: Path) -> dict[str, str]:
    where = read_json(path).get("weight_map")
    if not (isinstance(where, dict) and where and all(isinstance(file, str) for file in where.values())):
        raise UserError(f"{path}: holds no weight_map of names to files; copy or download it again")
    kind = "safetensors" if path.name == INDEX else "bin"
    # The file itself may be a symbolic link: the hub's cache stores its blobs elsewhere.
    if outside := sorted(file for file in where.values() if not re.fullmatch(rf"[^/\\:\0]+\.{kind}", file)):
        raise UserError(f"{path}: points to {outside[0]!r:.200}, which is not a {kind} file beside it")
    return where


def _missing_weights_hint(hf_dir: Path) -> str:
    if (hf_dir / WEIGHTS).exists():
        return f"is already a checkpoint folder (it has {WEIGHTS}); use it directly as checkpoint_dir"
    if (hf_dir / "adapter_model.safetensors").exists():
        return "holds an adapter, not a complete model; give the folder of its base model"
    return f"holds neither {SINGLE} nor {INDEX}; give the folder of a Hugging Face model"


@functools.cache
def _open(path: Path) -> Any:
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
