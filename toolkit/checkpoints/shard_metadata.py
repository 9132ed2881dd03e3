"""S4: the ``.metadata`` of a folder of shards, a pickle, becomes plain values, and those are checked."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from toolkit.errors import UserError
from toolkit.untrusted import open_regular

_METADATA = ".metadata"


class _Record:
    """Stands in for an object in the file: its fields, and nothing that runs."""

    fields: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.fields = state


_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # their home in Python 3.13
}  # fmt: skip
# All that a .metadata may name, and what it becomes here.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(module, name): type(name, (_Record,), {}) for module, names in _RECORDS.items() for name in names},
}


class _Unpickler(pickle.Unpickler):
    """Makes numbers, strings, containers, dtypes and records, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(f"refused: its {_METADATA} holds {f'{module}.{name}'!r:.100}, which could run code")
        return _ALLOWED[module, name]


def read_metadata(folder: Path) -> Metadata:
    """Read and check a folder's ``.metadata``; nothing in it is run.

    Raises:
        UserError: see :func:`toolkit.checkpoints.sharded.check_sharded`.
    """
    try:
        with open_regular(folder / _METADATA) as file:
            metadata = _metadata(_Unpickler(file).load())
        ends = _ends(metadata)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except FileNotFoundError:
        what = f"holds no {_METADATA}: not a sharded checkpoint, or one that was not written or copied to its end"
        raise UserError(f"{folder}: {what if folder.exists() else 'no such folder'}") from None
    except OSError as error:
        raise UserError(f"{folder / _METADATA}: {error.strerror}") from error
    except Exception as error:  # a hostile file can make the reader raise anything
        raise UserError(f"{folder}: its {_METADATA} is damaged or cut short; copy it again") from error
    for name, end in ends.items():
        _check_file(folder, name, end)
    return metadata


def _metadata(record: _Record) -> Metadata:
    """Make torch's metadata of the record's values."""
    tensors = {str(name): _tensor(name, value) for name, value in record.fields["state_dict_metadata"].items()}
    places = {}
    for index, info in record.fields["storage_data"].items():
        if info.fields.get("transform_descriptors"):
            raise UserError("its tensors are compressed; only plain ones are read")
        place = {name: info.fields[name] for name in ("relative_path", "offset", "length")}
        key = MetadataIndex(index.fields["fqn"], index.fields["offset"])
        places[key] = SimpleNamespace(**place, transform_descriptors=None)
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _tensor(name: str, record: _Record) -> TensorStorageMetadata:
    if type(record).__name__ != "TensorStorageMetadata":
        raise UserError(f"refused: {name!r:.100} is not a tensor; only folders of tensors are read")
    dtype, size = record.fields["properties"].fields[0], torch.Size(record.fields["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} is not a dtype")
    chunks = [(torch.Size(c.fields["offsets"]), torch.Size(c.fields["sizes"])) for c in record.fields["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype), size, [ChunkStorageMetadata(*chunk) for chunk in chunks])


def _ends(metadata: Metadata) -> dict[str, int]:
    """Check that the chunks fill their tensors; return {file: the bytes that it must have}."""
    ends: dict[str, int] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            place.shape = chunk.sizes  # of what is there, to compare with when it is read
            inside = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            if not all(0 <= offset <= offset + size <= whole for offset, size, whole in inside):
                raise ValueError(f"a chunk outside {name}")
            if place.offset < 0 or place.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
                raise ValueError(f"a chunk of {name} that cannot hold its numbers")
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
            raise ValueError(f"two chunks in one place of {name}")
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise UserError(f"its {_METADATA} has only a part of {name!r:.100}; copy it again")
    return ends


def _check_file(folder: Path, name: str, end: int) -> None:
    shown = f"{name!r:.100}"  # it is a stranger's: of any length, with any character
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise UserError(f"{folder}: refused: its {_METADATA} names {shown}, which is not a file of this folder")
    try:
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        size = None
    if size is None:
        raise UserError(f"{folder}: its shard {shown} is missing; copy the whole folder again")
    if size < end:
        raise UserError(f"{folder}: its shard {shown} is cut short, {size:,} of {end:,} bytes; copy it again")
