"""The weights in the files of a Hugging Face folder, one at a time: safetensors, or pickles that can run no code."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toolkit import untrusted
from toolkit.checkpoints import fp8, mxfp4
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.weights import load_state
from toolkit.errors import UserError

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# What the safetensors format calls the types that a model's weights can have.
FORMAT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_QUANTISED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_TYPES = {name: dtype for dtype, name in FORMAT_NAMES.items()} | _QUANTISED
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
# Causal masks and rotary tables that older versions of transformers saved with GPT-2, GPT-NeoX and Llama.
_BUFFERS = re.compile(r"(.+\.)?(attn|attention)\.(masked_)?bias|(.+\.)?rotary_emb\.inv_freq")


class Stored(NamedTuple):
    """A tensor in a file, under the name that it has there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The tensor, whose bytes come into memory when they are touched and can be given back."""
        return _open(self.file).get_tensor(self.name)


Weight = Stored | mxfp4.Packed | fp8.Scaled


def find_weights(hf_dir: Path) -> dict[str, Weight]:
    """Read what the files of a folder say of their tensors; safetensors win over pickles. Call :func:`close` later.

    A quantised weight and its scales are one weight in 16 bits.

    Raises:
        UserError: there are none, an index points outside the folder (S4), or a file is missing or damaged.
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
        raise UserError(f"hf_dir {hf_dir}: {_instead_of_weights(hf_dir)}")
    found: dict[str, Stored] = {}
    for file in files:
        opened = _open(hf_dir / file)
        for name in opened.keys():  # noqa: SIM118 (not a dictionary)
            if name in found and where.get(name) != file or _BUFFERS.fullmatch(name):
                continue
            part = opened.get_slice(name)
            kind = part.get_dtype()
            if kind not in _TYPES:
                raise _no_weight(hf_dir / file, name, kind)
            found[name] = Stored(hf_dir / file, name, tuple(part.get_shape()), _TYPES[kind])
    weights = mxfp4.joined(found)
    if (block := fp8.block_size(read_json(hf_dir / CONFIG))) is not None:
        weights = fp8.joined(weights, block)
    for name, stored in weights.items():
        if stored.dtype == torch.float8_e4m3fn and block is not None:
            raise UserError(
                f"{stored.file}: {fp8.describe_load_error(name, weights, block)}; copy or download it again"
            )
        if stored.dtype in _QUANTISED.values():
            raise _no_weight(stored.file, name, _NAMES[stored.dtype])
    return weights


def _no_weight(file: Path, name: str, kind: str) -> UserError:
    return UserError(f"{file}: {name} is of type {kind}, no weight's; get the 16-bit model")


def quantised_bits(config_json: dict[str, Any]) -> float | None:
    """The bits of each weight, by what a ``config.json`` says; None where they are not quantised, or cannot be read."""
    if mxfp4.is_packed(config_json):
        return mxfp4.BITS
    return None if fp8.block_size(config_json) is None else fp8.BITS


def close() -> None:
    """Let go of the files."""
    _open.cache_clear()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: it is none.
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
    # A plain name may still be a link: the hub's cache keeps the contents elsewhere.
    if outside := sorted(file for file in where.values() if not re.fullmatch(rf"[^/\\:\0]+\.{kind}", file)):
        raise UserError(f"{path}: points to {outside[0]!r:.200}, which is no {kind} file beside it")
    return where


def _instead_of_weights(hf_dir: Path) -> str:
    if (hf_dir / WEIGHTS).exists():
        return f"is a checkpoint folder already ({WEIGHTS} is there): every command takes it"
    if (hf_dir / "adapter_model.safetensors").exists():
        return "holds an adapter, not a whole model; give the folder of its base model"
    return f"holds neither {SINGLE} nor {INDEX}; give the folder of a Hugging Face model"


@functools.cache
def _open(path: Path) -> Any:
    try:
        with untrusted.open_regular(path) as file:
            if file.read(24).startswith(b"version https://git-lfs"):
                raise UserError(f"{path}: only stands for the weights; run `git lfs pull` in its folder")
        return safe_open(path, "pt") if path.suffix == ".safetensors" else _Pickled(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; copy or download it again") from error
    except SafetensorError as error:
        raise UserError(f"{path}: the file is damaged or cut short ({error}); copy or download it again") from error


class _Pickled:
    """A file of ``torch.save``, read with weights_only and mapped into memory, with the methods of safetensors'."""

    def __init__(self, path: Path) -> None:
        self._tensors = load_state(path)
        for name, value in self._tensors.items():
            if not isinstance(value, Tensor):
                raise UserError(f"{path}: {name} is a {type(value).__name__}, no tensor")
            if not (isinstance(name, str) and value.layout == torch.strided and value.device.type == "cpu"):
                raise UserError(f"{path}: {name!r} is not a plain tensor; the file must hold weights only")

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> _Facts:
        return _Facts(self._tensors[name])


class _Facts:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self._tensor.dtype, str(self._tensor.dtype))
