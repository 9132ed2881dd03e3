"""Distributed checkpoints (torch's DCP): folders of shards that all ranks write and read collectively.

Such a folder holds tensors only. torch's reader unpickles ``.metadata`` and non-tensor items without restriction; here
it gets metadata validated by :mod:`toolkit.checkpoints.run.shard_metadata` (S4).
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from toolkit.checkpoints.mismatch import find_mismatches, shapes_of
from toolkit.checkpoints.run.host_copy import HostCopies
from toolkit.checkpoints.run.shard_metadata import read_metadata, stored_tensors
from toolkit.checkpoints.scratch import mmap_empty, trim_after
from toolkit.checkpoints.torch_zip import FileSlice, describe_load_error, require_uncompressed_zip
from toolkit.distributed.ranks import call_on_all_ranks
from toolkit.errors import UserError, join_first
from toolkit.io.safe_parse import open_regular
from toolkit.private_torch import rank_wrapper


def is_sharded(path: Path) -> bool:
    """Whether the weights or optimizer state at ``path`` are a folder of shards (possibly damaged), not a file."""
    return path.is_dir()


class ShardedSave:
    """Writes tensors, one file of shards per rank, as ``dcp.save`` in four steps.

    ``tensors`` has the same names on every rank. Values are DTensor or plain (equal on all ranks, stored once).
    ``__init__`` and :meth:`gather_results` are collective if a process group is initialized: if a rank fails to write,
    all ranks raise a ``RuntimeError`` with that rank's exception as its cause.
    """

    def __init__(self, tensors: dict[str, Tensor], folder: Path) -> None:
        assert all(isinstance(value, Tensor) for value in tensors.values()), "a folder of shards holds tensors only"
        self.folder, self._tensors = folder, tensors
        self._writer = _Writer(folder, single_file_per_rank=True, sync_files=True)
        self._planner, self._ranks = _Planner(), rank_wrapper()
        self._metadata: Metadata | None = None  # set on rank 0
        self._written: list[WriteResult] | Exception = []
        self._results: list[list[WriteResult]] = []  # by rank; filled on rank 0
        with self._raise_cause():
            plan = self._ranks.reduce_scatter("plan", self._local_plan, self._global_plan)
        self._plan: SavePlan = self._planner.finish_plan(plan)

    def _local_plan(self) -> SavePlan:
        is_coordinator = self._ranks.is_coordinator
        self._planner.set_up_planner(self._tensors, self._writer.storage_meta(), is_coordinator)
        self._writer.set_up_storage_writer(is_coordinator)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def copy(self, copies: HostCopies) -> None:
        """Copy this rank's shards, so that training may change the tensors. Not collective."""
        for item in self._plan.items:
            name = f"{self.folder.name}/{item.index.fqn}/{item.index.offset}"
            self._planner.copies[item.index] = copies.copy(self._planner.lookup_object(item.index), name)
        self._tensors = self._planner.state_dict = {}

    def write(self) -> None:
        """Write this rank's shards. Not collective; :meth:`gather_results` raises a failure on all ranks."""
        try:
            self._written = self._writer.write_data(self._plan, self._planner).value()
        except Exception as error:
            self._written = error

    def gather_results(self) -> None:
        """Gather the locations of all shards on rank 0; collective."""
        with self._raise_cause():
            self._ranks.all_reduce("write", self._result, self._results.extend)

    def finish(self) -> None:
        """Write ``.metadata``. Call on rank 0 only."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, self._results)

    def _result(self) -> list[WriteResult]:
        if isinstance(self._written, Exception):
            raise self._written
        return self._written

    @contextmanager
    def _raise_cause(self) -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:
            rank, cause = _first_failure(error)
            if not isinstance(cause, Exception):
                raise cause from None  # such as KeyboardInterrupt
            raise RuntimeError(f"rank {rank} could not write {self.folder}: {cause}") from cause


def load_sharded(tensors: dict[str, Tensor], folder: Path) -> None:
    """Load shards into ``tensors`` in place. Collective if a process group is initialized.

    All ranks pass the same names. Layout (DTensor or plain), dtype and number of ranks may differ from
    the save. Other tensors in the folder are ignored.
    """
    _read(tensors, folder, call_on_all_ranks(lambda: _require_tensors(tensors, folder)))


def check_sharded(folder: Path, sizes: Mapping[str, int] | None = None) -> dict[str, torch.Size]:
    """Check ``.metadata`` and the files, see :func:`read_metadata`. Return the shapes of the complete tensors."""
    return {name: tensor.size for name, tensor in stored_tensors(read_metadata(folder, sizes)).items()}


def read_sharded(folder: Path) -> dict[str, Tensor]:
    """Read unsharded tensors, one at a time, in this process only (not collective).

    They are memory-mapped from temporary files, which the system can page out: resident memory stays a small multiple
    of the largest tensor (M2). Needs free disk space of the checkpoint's size.
    """
    metadata = read_metadata(folder)
    stored = stored_tensors(metadata).items()
    tensors = {name: mmap_empty(tensor.size, tensor.properties.dtype, folder) for name, tensor in stored}
    _read(tensors, folder, metadata, no_dist=True)
    return tensors


class ShardReader:
    """Reads parts of tensors in this process only. ``tensors`` is {name: (shape, dtype)}."""

    def __init__(self, folder: Path) -> None:
        metadata = read_metadata(folder)
        self._reader, self._stored = _Reader(folder, metadata), stored_tensors(metadata)
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self.tensors = {name: (tensor.size, tensor.properties.dtype) for name, tensor in self._stored.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of a flattened tensor, reading only shards that contain them."""
        shape, dtype = self.tensors[name]
        per_row = max(1, shape[1:].numel())
        first, last = start // per_row, -(-stop // per_row)
        rows = torch.empty((last - first, *shape[1:])[: len(shape)], dtype=dtype)
        place = ChunkStorageMetadata(torch.Size((first, *[0] * len(shape))[: len(shape)]), rows.shape)
        items = create_read_items_for_chunk_list(name, self._stored[name], [place])
        self._reader.read_data(LoadPlan(items), _RowPlanner(rows))
        return rows.flatten()[start - first * per_row : stop - first * per_row]


class _RowPlanner(DefaultLoadPlanner):
    """Reads into ``rows``."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._rows


class _Planner(DefaultSavePlanner):
    """torch's planner. Writes the copies from :meth:`ShardedSave.copy` instead of the tensors, if there are any."""

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)  # of values that all ranks have
        self.copies: dict[MetadataIndex, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.copies[index] if index in self.copies else super().lookup_object(index)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, with exceptions that keep their cause when sent to other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # The OSError is the context of the zip writer's error; pickling would drop it.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


class _Reader(dcp.FileSystemReader):
    """torch's reader, with validated metadata, errors that name the file, and one chunk in memory at a time."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._checked_metadata = folder, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._checked_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with _translate_errors(self._folder / name), open_regular(self._folder / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read_chunk(file, item))
                    planner.commit_tensor(item, target)
                    trim_after(item.lengths.numel())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, file: IO[bytes], item: ReadItem) -> Tensor:
        place: Any = self.storage_data[item.storage_index]
        part = FileSlice(file, place.offset, place.length)
        require_uncompressed_zip(part, self._folder / place.relative_path)
        part.seek(0)
        chunk = torch.load(cast(IO[bytes], part), map_location="cpu", weights_only=True)
        if type(chunk) is not Tensor or chunk.layout != torch.strided or chunk.shape != place.shape:
            raise ValueError(f"{item.storage_index} does not match the metadata")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        return chunk


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except Exception as error:  # a hostile file can make the reader raise anything
        raise UserError(f"{path}: {describe_load_error(error)}") from error


def _read(tensors: dict[str, Tensor], folder: Path, metadata: Metadata, no_dist: bool = False) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=_Reader(folder, metadata), no_dist=no_dist)
    except CheckpointException as error:
        raise _first_failure(error)[1] from None


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the most informative (rank, exception): an OSError or UserError, else the first."""
    failures = [(rank, failure) for rank, (failure, _) in sorted(error.failures.items())]
    return next((one for one in failures if isinstance(one[1], (OSError, UserError))), failures[0])


def _require_tensors(tensors: dict[str, Tensor], folder: Path) -> Metadata:
    metadata = read_metadata(folder)
    saved = {name: tensor.size for name, tensor in stored_tensors(metadata).items() if name in tensors}
    if wrong := find_mismatches(saved, shapes_of(tensors)):
        raise UserError(f"{folder}: does not match the model: {join_first(wrong)}")
    return metadata
