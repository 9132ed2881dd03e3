"""S4 no-code-from-files: read the pickled ``.metadata`` of a sharded folder as plain values and validate them."""

import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from toolkit.errors import UserError
from toolkit.io.safe_parse import open_regular

_METADATA = ".metadata"


class _Record:
    """Placeholder for an object in the file: stores its fields and runs no code."""

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
    "pathlib._local": ("PosixPath", "WindowsPath"),  # Python 3.13
    "builtins": ("getattr",),  # Python 3.11.0 to 3.11.3 write members of enumerations with it
}  # fmt: skip
# Every global that a .metadata may name, and its replacement.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(module, name): type(name, (_Record,), {}) for module, names in _RECORDS.items() for name in names},
}


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Unpickler restricted to numbers, strings, containers, dtypes and records.

    In Python, because the one in C allocates up to 64 GiB for a large memo index in a file of a few bytes.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(f"refused: its {_METADATA} holds {f'{module}.{name}'!r:.100}, which could run code")
        return _ALLOWED[module, name]


def read_metadata(folder: Path, sizes: Mapping[str, int] | None = None) -> Metadata:
    """Read and validate a folder's ``.metadata`` without running code.

    ``sizes`` are the bytes of the folder's files, of which other machines may have some; by default those on disk.
    """
    try:
        with open_regular(folder / _METADATA) as file:
            metadata = _metadata(_Unpickler(file).load())
        required_sizes = _required_sizes(metadata)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except FileNotFoundError:
        reason = f"holds no {_METADATA}: not a sharded checkpoint, or an incomplete one"
        raise UserError(f"{folder}: {reason if folder.exists() else 'no such folder'}") from None
    except OSError as error:
        raise UserError(f"{folder / _METADATA}: {error.strerror}") from error
    except Exception as error:  # a hostile file can make the reader raise anything
        raise UserError(f"{folder}: its {_METADATA} is damaged or truncated; copy it again") from error
    for name, end in required_sizes.items():
        _check_file(folder, name, end, sizes)
    return metadata


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return shape, dtype and chunks of each tensor. :func:`read_metadata` rejects all other entries."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _metadata(record: _Record) -> Metadata:
    """Convert the record to torch's ``Metadata``."""
    tensors: dict[str, STORAGE_TYPES] = {
        str(name): _tensor(name, value) for name, value in record.fields["state_dict_metadata"].items()
    }
    storage = {}
    for index, info in record.fields["storage_data"].items():
        if info.fields.get("transform_descriptors"):
            raise UserError("its tensors are compressed; only plain ones are read")
        location = {name: info.fields[name] for name in ("relative_path", "offset", "length")}
        key = MetadataIndex(index.fields["fqn"], index.fields["offset"])
        storage[key] = SimpleNamespace(**location, transform_descriptors=None)
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())


def _tensor(name: str, record: _Record) -> TensorStorageMetadata:
    if type(record).__name__ != "TensorStorageMetadata":
        raise UserError(
            f"its {_METADATA} lists {name!r:.100}, which is not a tensor; only sharded checkpoints that hold "
            "nothing but tensors can be read; use another checkpoint"
        )
    dtype, size = record.fields["properties"].fields[0], torch.Size(record.fields["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} is not a dtype")
    chunks = [(torch.Size(c.fields["offsets"]), torch.Size(c.fields["sizes"])) for c in record.fields["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype), size, [ChunkStorageMetadata(*chunk) for chunk in chunks])


def _required_sizes(metadata: Metadata) -> dict[str, int]:
    """Check that the chunks cover their tensors; return {file: minimum size in bytes}."""
    required_sizes: dict[str, int] = {}
    for name, tensor in stored_tensors(metadata).items():
        for chunk in tensor.chunks:
            location = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            location.shape = chunk.sizes  # expected shape, compared on reading
            bounds = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            if not all(0 <= offset <= offset + size <= dim for offset, size, dim in bounds):
                raise ValueError(f"a chunk outside {name}")
            if location.offset < 0 or location.length < chunk.sizes.numel() * tensor.properties.dtype.itemsize:
                raise ValueError(f"a chunk of {name} that is too short")
            end, file = location.offset + location.length, location.relative_path
            required_sizes[file] = max(required_sizes.get(file, 0), end)
        if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
            raise ValueError(f"overlapping chunks of {name}")
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise UserError(f"its {_METADATA} covers only a part of {name!r:.100}; copy it again")
    return required_sizes


def _check_file(folder: Path, name: str, end: int, sizes: Mapping[str, int] | None) -> None:
    shown = f"{name!r:.100}"  # untrusted: any length, any character
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise UserError(f"{folder}: refused: its {_METADATA} names {shown}, which is not a file of this folder")
    size = None if sizes is None else sizes.get(name)
    with suppress(OSError, ValueError):  # too long a name, or a NUL in it
        if sizes is None and (folder / name).is_file():
            size = (folder / name).stat().st_size
    if size is None:
        raise UserError(f"{folder}: its shard {shown} is missing; copy the complete folder again")
    if size < end:
        raise UserError(f"{folder}: its shard {shown} is truncated, {size:,} of {end:,} bytes; copy it again")
