"""Read the weights of a Hugging Face folder one at a time: safetensors, or pickles restricted to tensors."""

import re
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoints.hf import fp8, mxfp4
from toolkit.checkpoints.hf.files import DTYPE_NAMES, DTYPES_BY_NAME, QUANTIZED, StoredTensor, Weight, list_weights
from toolkit.checkpoints.store import WEIGHTS
from toolkit.errors import UserError
from toolkit.io.safe_parse import read_json_object

CONFIG = "config.json"
ADAPTER = "adapter_model.safetensors"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Causal masks and RoPE tables that older versions of transformers saved with GPT-2, GPT-NeoX and Llama.
_BUFFERS = re.compile(r"(.+\.)?(attn|attention)\.(masked_)?bias|(.+\.)?rotary_emb\.inv_freq")


def find_weights(hf_dir: Path) -> dict[str, Weight]:
    """Return a folder's weights by name, without reading them. Prefers safetensors over pickles.

    A quantized weight and its scales become one 16-bit weight. Call :func:`~.files.close` afterwards.
    """
    where: dict[str, Any] = {}
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (hf_dir / single).is_file():
            files = [single]
            break
        if (hf_dir / index).is_file():
            where = read_index(hf_dir / index)
            files = sorted(set(where.values()))
            break
    else:
        raise UserError(f"hf_dir {hf_dir}: {_missing_weights_hint(hf_dir)}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, shape, dtype in list_weights(hf_dir / file):
            if (name in tensors and where.get(name) != file) or _BUFFERS.fullmatch(name):
                continue
            if dtype not in DTYPES_BY_NAME:
                raise _unsupported_dtype(hf_dir / file, name, dtype)
            tensors[name] = StoredTensor(hf_dir / file, name, shape, DTYPES_BY_NAME[dtype])
    joined: dict[str, Weight] = {**mxfp4.join_blocks(tensors)}
    if (block := fp8.block_size(read_json_object(hf_dir / CONFIG))) is not None:
        joined |= fp8.join_scales(tensors, block)
    for name, stored in tensors.items():
        if stored.dtype == torch.float8_e4m3fn and block is not None:
            reason = fp8.describe_load_error(name, tensors, block)
            raise UserError(f"{stored.file}: {reason}; copy or download it again")
        if stored.dtype in QUANTIZED.values():
            raise _unsupported_dtype(stored.file, name, DTYPE_NAMES[stored.dtype])
    return tensors | joined


def _unsupported_dtype(file: Path, name: str, dtype: str) -> UserError:
    return UserError(f"{file}: {name} has unsupported dtype {dtype}; get the 16-bit model")


def quantized_bits(config_json: dict[str, Any]) -> float | None:
    """Return bits per weight from ``config.json``; None if unquantized or in an unsupported format."""
    match config_json:
        case {"quantization_config": {"quant_method": "mxfp4"}}:
            return mxfp4.BITS
    return None if fp8.block_size(config_json) is None else fp8.BITS


def require_supported_format(hf_dir: Path) -> dict[str, Any]:
    """Return the content of ``config.json``. Raise UserError if the weights have an unsupported quantized format."""
    values = read_json_object(hf_dir / CONFIG)
    if (quantization := values.get("quantization_config")) and quantized_bits(values) is None:
        method = quantization.get("quant_method", quantization) if isinstance(quantization, dict) else quantization
        is_packed = method == "compressed-tensors"  # has no dequantize() in transformers
        load = "load it with CompressedTensorsConfig(dequantize=True)" if is_packed else "load it, dequantize()"
        raise UserError(
            f"{hf_dir / CONFIG}: quantization_config: weights quantized by {method!r} are not supported, only 'mxfp4', "
            "and 'fp8' with a weight_block_size; get the 16-bit model, or convert it with transformers: "
            f"{load}, save_pretrained()"
        )
    return values


def read_index(path: Path) -> dict[str, str]:
    """Read a weight index: {tensor name: file in the same folder}."""
    where = read_json_object(path).get("weight_map")
    if not (isinstance(where, dict) and where and all(isinstance(file, str) for file in where.values())):
        raise UserError(f"{path}: holds no weight_map of names to files; copy or download it again")
    kind = "safetensors" if path.name == INDEX else "bin"
    # Only names are checked: in the hub's cache, the files are links to blobs in another folder.
    if outside := sorted(file for file in where.values() if not re.fullmatch(rf"[^/\\:\0]+\.{kind}", file)):
        raise UserError(f"{path}: points to {outside[0]!r:.200}, which is not a {kind} file next to it")
    return where


def _missing_weights_hint(hf_dir: Path) -> str:
    if (hf_dir / WEIGHTS).exists():
        return f"is already a checkpoint folder (it has {WEIGHTS}); use it directly as checkpoint_dir"
    return no_weights_hint((hf_dir / ADAPTER).exists())


def no_weights_hint(is_adapter: bool) -> str:
    if is_adapter:
        return "holds an adapter, not a complete model; give its base model"
    return f"holds neither {SINGLE} nor {INDEX}; give a Hugging Face model"
