"""Save a checkpoint in three phases: begin, write, commit. The write can overlap with training."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoints.manifest import read_manifest
from toolkit.checkpoints.run.host_copy import HostCopies
from toolkit.checkpoints.run.sharded import ShardedSave, check_sharded
from toolkit.checkpoints.run.state_dicts import require_complete
from toolkit.checkpoints.store import (
    WEIGHTS,
    begin_checkpoint,
    commit_checkpoint,
    delete_on_error,
    discard,
    file_names,
    prune,
    sync_and_checksum,
)
from toolkit.checkpoints.weights import Tensors
from toolkit.data.base import Report, State
from toolkit.distributed import ranks
from toolkit.errors import GuardError, PeerLostError, join_first
from toolkit.io.checksums import Checksum, Checksums
from toolkit.planning.limits import Progress


@dataclass
class Snapshot:
    """The state to save at one step, without shards."""

    progress: Progress
    rng: list[State]  # by rank
    weights: Tensors
    optimizer: State
    scaler: State | None
    callbacks: State  # states by name

    def copy(self, copies: HostCopies) -> None:
        """Copy weights and optimizer state, which training changes, on rank 0."""
        if ranks.global_rank() == 0:
            self.weights, self.optimizer = (
                copies.copy(self.weights, "weights"),
                copies.copy(self.optimizer, "optimizer"),
            )
        else:
            self.weights, self.optimizer = {}, {}


class PendingSave:
    """A save in progress. Begin and commit are collective; in between, each rank writes its files independently.

    Args:
        folder: The checkpoint folder.
        snapshot: The state to save, except the shards.
        write_files: Writes everything except the shards into the temporary folder; called on rank 0.
        shards: This rank's tensors by subfolder, for sharded checkpoints.
        shapes: Shapes that the saved weights must have, by name; empty does not check.
        search: Finds NaN and Inf in this rank's weights and optimizer state.
        report: Prints a message if a rank takes long to write.
        copies: Buffers for the state if training overlaps with the write. ``search`` then finishes before the write.
        leaders: For each rank, the rank that creates and publishes the folder on its disk, see
            :func:`~toolkit.training.rank_consistency.disk_leaders`. Each folder gets the manifest of all files.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: Snapshot,
        write_files: Callable[[Path, Snapshot], None],
        shards: Mapping[str, Tensors],
        shapes: Mapping[str, torch.Size],
        search: Future[list[str]],
        report: Report,
        copies: HostCopies | None,
        leaders: list[int],
    ) -> None:
        self.folder, self._snapshot, self._write_files, self._copies = folder, snapshot, write_files, copies
        self._shapes = shapes
        self._search: Future[list[str]] | None = search  # None: finished, all values are finite
        self._report = report
        self._tmp: Path | None = None
        self._error: Exception | None = None
        self._checksums: Checksums | OSError = {}  # of this rank's files
        leader, self._has_parts = leaders[ranks.global_rank()], any(leaders)
        self._is_leader = ranks.global_rank() == leader
        with self._raise_on_all_ranks():
            self._tmp = ranks.run_with_heartbeat(
                lambda: begin_checkpoint(folder) if self._is_leader else None, self.wait_reporter()
            )
        self._tmp = tmp = ranks.all_gather_object(self._tmp)[leader]
        assert tmp is not None
        with self._raise_on_all_ranks():
            self._shards = [ShardedSave(tensors, tmp / name) for name, tensors in shards.items()]
        if copies is not None:
            with self._raise_on_all_ranks():
                snapshot.copy(copies)
                for save in self._shards:
                    save.copy(copies)
                copies.end()
            with self._raise_on_all_ranks():
                require_finite(folder, search)
            self._search = None

    @property
    def is_sharded(self) -> bool:
        return bool(self._shards)

    def wait_reporter(self) -> ranks.WaitReporter:
        return ranks.WaitReporter(f"save {self.folder.name}", self._report)

    def write_on_all_ranks(self) -> None:
        """Write the files of all ranks while training waits. Collective."""
        try:
            ranks.run_with_heartbeat(self.write, self.wait_reporter())
        except BaseException:
            self.abandon()
            raise

    def write(self) -> None:
        """Write this rank's files, in any thread. :meth:`commit` raises errors."""
        assert self._tmp is not None
        try:
            if self._copies is not None:
                self._copies.wait()
            if ranks.global_rank() == 0:
                self._write_files(self._tmp, self._snapshot)
            for save in self._shards:
                save.write()
            self._checksums = self._checksum_local(self._tmp)
        except Exception as error:
            self._error = error

    def _checksum_local(self, tmp: Path) -> Checksums | OSError:
        """Return the checksums of this rank's files; other ranks may still be writing."""
        rank = ranks.global_rank()
        names = file_names(tmp) if rank == 0 or self._shards else []
        local = [name for name in names if (f"/__{rank}_" in name if name.endswith(".distcp") else rank == 0)]
        try:
            return sync_and_checksum(tmp, local)
        except OSError as error:
            if self._shards:
                return error  # commit raises it on all ranks
            raise

    def commit(self, keep_last: int) -> Path:
        """Publish the checkpoint after every rank has written, and delete the oldest ones. Collective."""
        with self._raise_on_all_ranks():
            if self._error is not None:
                raise self._error
        with self._raise_on_all_ranks():
            for save in self._shards:
                save.gather_results()
            checksums = self._checksums_of_all()
            if self._search is not None:
                require_finite(self.folder, self._search)
        with self._raise_on_all_ranks():
            ranks.run_with_heartbeat(
                lambda: self._publish(checksums, keep_last) if ranks.global_rank() == 0 else None, self.wait_reporter()
            )
        if self._has_parts:
            files = ranks.broadcast_from_rank0(read_manifest(self.folder) if ranks.global_rank() == 0 else None)
            with self._raise_on_all_ranks():
                if self._is_leader and ranks.global_rank() != 0:
                    assert self._tmp is not None and files is not None
                    commit_checkpoint(self._tmp, self.folder, files)
        return self.folder

    def commit_alone(self, keep_last: int) -> Path:
        """Publish an unsharded checkpoint on rank 0 without the other ranks, because they may have exited."""
        assert self._tmp is not None and not self._shards and ranks.global_rank() == 0 and self._search is None
        with delete_on_error(self._tmp, self.folder):
            if self._error is not None:
                raise self._error
            assert isinstance(self._checksums, dict)
            self._publish(self._checksums, keep_last)
        return self.folder

    def abandon(self) -> None:
        """Delete the temporary folder."""
        if self._tmp is not None and self._is_leader:
            discard(self._tmp)

    def _checksums_of_all(self) -> Checksums:
        """Gather the checksums of all ranks' files. Collective."""
        checksums: Checksums = {}
        for rank, rank_checksums in enumerate(ranks.all_gather_object(self._checksums)):
            if isinstance(rank_checksums, OSError):
                raise RuntimeError(f"rank {rank} could not read {self._tmp}: {rank_checksums}") from rank_checksums
            checksums |= rank_checksums
        return checksums

    def _publish(self, checksums: Mapping[str, Checksum], keep_last: int) -> None:
        assert self._tmp is not None
        saved = {name: value.shape for name, value in self._snapshot.weights.items()}
        for save in self._shards:
            save.finish()
            prefix = f"{save.folder.relative_to(self._tmp).as_posix()}/"
            shapes = check_sharded(save.folder, {k.removeprefix(prefix): v["size"] for k, v in checksums.items()})
            saved = shapes if save.folder.name == WEIGHTS else saved
        if self._shapes:
            require_complete(saved, self._shapes)
        commit_checkpoint(self._tmp, self.folder, checksums)
        prune(self.folder.parent, keep_last)

    @contextmanager
    def _raise_on_all_ranks(self) -> Iterator[None]:
        """Context that raises on all ranks if its block fails on any. All ranks must enter it. The block must not run
        a collective after code that may fail on a single rank."""
        error: Exception | None = None
        try:
            tmp = self._tmp if self._is_leader else None
            with nullcontext() if tmp is None else delete_on_error(tmp, self.folder):
                yield
        except Exception as caught:
            error = caught
        if ranks.all_reduce_sum(failed=int(error is not None))["failed"]:
            self.abandon()
            if error is None or (ranks.global_rank() != 0 and not isinstance(error, GuardError)):
                known_to_all = isinstance(error, RuntimeError) and isinstance(error.__cause__, OSError)
                raise PeerLostError(f"{self.folder} could not be written") from (None if known_to_all else error)
            raise error


def require_finite(folder: Path, search: Future[list[str]]) -> None:
    """Raise a GuardError on all ranks if any rank has found NaN or Inf in weights or optimizer state."""
    error = search.exception()
    nonfinite = [] if error is not None else search.result()
    totals = ranks.all_reduce_sum(failed=int(error is not None), nonfinite=len(nonfinite))
    if totals["failed"]:  # raise after the all-reduce; otherwise the other ranks would hang in it
        raise error if error is not None else PeerLostError(f"{folder} could not be checked for NaN and Inf")
    if totals["nonfinite"]:
        names = sorted({name for names in ranks.all_gather_object(nonfinite) for name in names})
        raise GuardError(
            f"{folder} was not saved: NaN, Inf or too large numbers in {join_first(names)}; lower "
            "--train.learning_rate and resume with --resume auto (continues from the latest checkpoint)"
        )
