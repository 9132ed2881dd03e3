"""Law S4: files of tensors, written so that they load with ``weights_only=True``, and read in no other way."""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from toolkit.checkpoints.store import WEIGHTS
from toolkit.errors import UserError
from toolkit.untrusted import open_regular

_ZIP = b"PK\x03\x04"
# The layers that DDP, FSDP, torch.compile, activation checkpointing and Fabric put around a module.
_WRAPPERS = {"module", "_forward_module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """Return the name of a weight without the layers that strategies and compilers put around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def save_weights(state_dict: dict[str, Tensor], path: Path) -> None:
    """Write the weights to one file, under canonical names; tied weights are stored once.

    Raises:
        OSError, RuntimeError: what writing raises; :func:`~toolkit.checkpoints.store.write_checkpoint` explains it.
    """
    weights = {canonical_name(name): tensor for name, tensor in state_dict.items()}
    assert len(weights) == len(state_dict), "two weights have the same canonical name"
    assert all(type(t) in (Tensor, torch.nn.Parameter) for t in weights.values()), "only plain tensors are weights"
    save_state(_compact(weights), path)


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write a dictionary of tensors, numbers, strings and containers of them, and bring it to the disk."""
    with open(path, "wb") as file:  # given a path, torch's own writer loses the reason of a failed write
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_weights(checkpoint_dir: Path, mmap: bool = True) -> dict[str, Tensor]:
    """Read the weights of a checkpoint folder, ours or LitGPT's, in one file or in shards, under canonical names.

    With ``mmap`` a tensor's bytes come into memory when they are touched, shared by all processes of the machine. Tied
    weights share their storage.

    Raises:
        UserError: there is no such file, it is cut short or empty, or holds anything but tensors.
    """
    path = Path(checkpoint_dir) / WEIGHTS
    if path.is_dir():
        from toolkit.checkpoints.sharded import read_sharded  # it needs this file, and a second to import

        return {canonical_name(name): tensor for name, tensor in read_sharded(path).items()}
    state = load_state(path, mmap=mmap)
    if isinstance(state.get("model"), dict):  # as LitGPT's pretrain writes it, beside the optimizer
        state = state["model"]
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise UserError(f"{path}: {name!r} is not a plain tensor; the file must hold weights only")
    return {canonical_name(name): tensor for name, tensor in state.items()}


def require_fit(weights: dict[str, Tensor], wanted: dict[str, Tensor], path: Path, what: str) -> None:
    """Compare names and shapes of the weights in ``path`` with those of a model, which is described by ``what``.

    Raises:
        UserError: weights are missing, extra or of another shape, each named.
    """
    missing = [f"missing {name} {_shape(wanted[name])}" for name in wanted.keys() - weights.keys()]
    extra = [f"unknown {name} {_shape(weights[name])}" for name in weights.keys() - wanted.keys()]
    other = [
        f"{name} is {_shape(weights[name])}, not {_shape(wanted[name])}"
        for name in wanted.keys() & weights.keys()
        if weights[name].shape != wanted[name].shape
    ]
    if wrong := sorted(missing) + sorted(extra) + sorted(other):
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UserError(f"{path}: does not fit {what}: {', '.join(wrong[:5])}{more}")


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def load_state(path: Path, mmap: bool = True) -> dict[str, Any]:
    """Read a dictionary that :func:`save_state` or ``torch.save`` wrote. Nothing in the file is run.

    Raises:
        UserError: there is no such file, it is cut short or empty, carries code, or holds no dictionary.
    """
    path = Path(path)
    _require_zip(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        unusable = [name for name, tensor in named_tensors(state) if not _is_plain(tensor)]
    except Exception as error:  # a hostile file can make the reader raise anything
        raise UserError(f"{path}: {what_is_wrong(error)}") from error
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a dictionary of tensors")
    if unusable:
        raise UserError(f"{path}: {unusable[0]!r:.100} is not a plain tensor: sparse or without values")
    return state


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, by their path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(inner, f"{name} {key}".strip())


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def _require_zip(path: Path) -> None:
    """Refuse what is not torch's zip format: older ones are pickles from the first byte."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; a file of tensors must stand here")
    try:
        with open_regular(path) as file:
            start = file.read(4)
            if start == _ZIP:
                require_stored(file, path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; give a folder that holds one") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not start:
        raise UserError(f"{path}: the file is empty; copy or download it again")
    if start != _ZIP:
        raise UserError(f"{path}: not a file that torch.save of torch >= 1.6 wrote; save it again with it")


def require_stored(file: IO[bytes], path: Path) -> None:
    """Refuse a zip that is larger in memory than on disk, as a zip bomb is (torch.save compresses nothing), or code.

    Raises:
        UserError: entries are compressed or overlap, it is TorchScript, or no zip.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(f"{path}: {what_is_wrong(error)}") from error
    if any(e.filename.endswith("/constants.pkl") for e in entries):
        raise UserError(f"{path}: refused: it holds a program; only files of tensors are read")
    is_stored = all(e.compress_type == zipfile.ZIP_STORED and e.file_size == e.compress_size for e in entries)
    if not is_stored or sum(e.file_size for e in entries) > size:
        raise UserError(f"{path}: refused: its contents are compressed, which torch.save does not do; save it again")


def what_is_wrong(error: Exception) -> str:
    """What a failed ``torch.load`` says of the file, in one line."""
    text = str(error)
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if isinstance(error, pickle.UnpicklingError):
        what = f"{named[1]}, which could run code" if named else "more than tensors and could run code"
        return f"refused: it holds {what}; only files of tensors are read"
    return "the file is damaged or cut short; copy or download it again"


def _compact(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Detach; a view of a larger storage becomes a tensor of its own, or the file would hold the whole storage."""
    copies: dict[tuple, Tensor] = {}
    for name, tensor in weights.items():
        tensor = tensor.detach()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            tensor = copies.setdefault(key, tensor.clone(memory_format=torch.contiguous_format))
        weights[name] = tensor
    return weights


class FileSlice(io.RawIOBase):
    """A part of a file, to read (torch's own view of one goes astray when it seeks from the end)."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
