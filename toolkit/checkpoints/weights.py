"""S4 no-code-from-files: write and read tensor files that load with ``weights_only=True``."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoints.mismatch import find_mismatches, shapes_of
from toolkit.checkpoints.run.host_copy import named_tensors
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.torch_zip import DAMAGED, ZIP_MAGIC, describe_load_error, require_uncompressed_zip
from toolkit.distributed.names import canonical_name
from toolkit.errors import UserError, join_first
from toolkit.io.safe_parse import open_regular
from toolkit.models.config import ModelConfig

Tensors = dict[str, Tensor]
"""Tensors by name."""


def save_weights(state_dict: Tensors, path: Path) -> None:
    """Write the weights to one file, under canonical names; tied weights are stored once."""
    weights = {canonical_name(name): tensor for name, tensor in state_dict.items()}
    assert len(weights) == len(state_dict), "two weights have the same canonical name"
    assert all(type(t) in (Tensor, torch.nn.Parameter) for t in weights.values()), "only plain tensors are weights"
    save_state(_detach(weights), path)


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write a dictionary of tensors, numbers, strings and containers of them, and sync it to disk."""
    with open(path, "wb") as file:  # given a path, torch's writer loses the errno of a failed write
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_weights(checkpoint_dir: Path) -> Tensors:
    """Read the weights of a toolkit or LitGPT checkpoint, in one file or in shards, under canonical names.

    Tensors of one file are memory-mapped and shared by all processes of the machine. Tied weights share their storage.
    """
    path = checkpoint_dir / WEIGHTS
    if path.is_dir():
        from toolkit.checkpoints.run.sharded import read_sharded  # slow to import (1 s)

        return {canonical_name(name): tensor for name, tensor in read_sharded(path).items()}
    state = load_state(path)
    if isinstance(state.get("model"), dict):  # LitGPT's pretrain stores the optimizer in the same file
        state = state["model"]
    return {canonical_name(name): tensor for name, tensor in only_tensors(state, path).items()}


def only_tensors(state: dict[str, Any], path: Path, what: str = "weights") -> Tensors:
    """Return ``state``. Raise UserError unless it is {name: tensor}. Error messages call the tensors ``what``."""
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise UserError(f"{path}: {name!r:.100} is not a plain tensor; the file must hold {what} only")
    return state


def require_compatible(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, what: str) -> None:
    """Raise UserError if names or shapes differ from ``expected``. ``what`` is the file that defines the model."""
    if wrong := find_mismatches(shapes_of(weights), shapes_of(expected)):
        raise UserError(f"{path}: does not match {what}: {join_first(wrong)}")


def load_state(path: Path) -> dict[str, Any]:
    """Read a dictionary that :func:`save_state` or ``torch.save`` wrote, memory-mapped and without running code."""
    _require_zip(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors = named_tensors(state)
        unusable = [name for name, t in tensors if t.layout != torch.strided or t.device.type != "cpu"]
    except Exception as error:  # a hostile file can make the reader raise anything
        raise UserError(f"{path}: {describe_load_error(error)}") from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a dictionary of tensors")
    if unusable:
        raise UserError(f"{path}: {unusable[0]!r:.100} is not a plain tensor: sparse or without values")
    return state


def _require_zip(path: Path) -> None:
    """Reject files that are not in torch's zip format, such as the plain pickles of old versions."""
    try:
        with open_regular(path) as file:
            start = file.read(4)
            if start == ZIP_MAGIC:
                require_uncompressed_zip(file, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a folder that holds this file of tensors") from error
    if not start:
        raise UserError(f"{path}: {DAMAGED}")
    if start != ZIP_MAGIC:
        raise UserError(f"{path}: not written by torch.save of torch >= 1.6; save it again with a newer version")


def _detach(weights: Tensors) -> Tensors:
    """Detach tensors. Copy views of larger storages, because torch.save would write the complete storages."""
    copies: dict[tuple, Tensor] = {}
    for name, tensor in weights.items():
        tensor = tensor.detach()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            tensor = copies.setdefault(key, tensor.clone(memory_format=torch.contiguous_format))
        weights[name] = tensor
    return weights


def exact_dtype(weights: Mapping[str, Tensor], config: ModelConfig) -> torch.dtype | None:
    """Return the dtype that a model's weights need for the quantized values of training; None: their own."""
    if config.qat is None:
        return None
    return torch.promote_types(weights["transformer.wte.weight"].dtype, getattr(torch, config.qat["dtype"]))


def resolve_weight_dtype(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of weight ``name`` in a model of ``dtype``; None keeps the current dtype.

    A router's correction bias is always fp32: 16 bits cannot resolve the differences between its scores. Decay and norm
    of linear attention are not converted to 16 bits, because the published Qwen3.5 has them in fp32.
    """
    if name.endswith((".attn.A_log", ".attn.out_norm.weight")):
        return None if dtype in (torch.bfloat16, torch.float16) else dtype
    return torch.float32 if name.endswith(".mlp.correction") else dtype
