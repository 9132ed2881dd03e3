"""S7 verified-bytes, by all ranks of a run together: they agree on an intact checkpoint to start from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from toolkit.checkpoints.finite import require_finite
from toolkit.checkpoints.manifest import (
    EDITABLE,
    TRAINER_STATE,
    DamagedCheckpointError,
    describe_damage,
    missing_manifest_note,
    read_manifest,
)
from toolkit.checkpoints.store import newest_first
from toolkit.checksums import find_damage
from toolkit.distributed import ranks
from toolkit.errors import UserError
from toolkit.planning.run_args import RunArgs
from toolkit.training.agreement import require_same_manifest
from toolkit.training.state import read_meta

T = TypeVar("T")
Report = Callable[[str], None]


def require_intact_together(folder: Path, is_node_leader: bool, report: Report, model_only: bool = False) -> bool:
    """Compare a folder's files with its manifest; every rank calls this.

    The shards are divided among all ranks; the other files are read once per node, because nodes may have copies.

    Args:
        folder: The same on every rank.
        is_node_leader: Whether this rank is its node's first.
        report: Receives a note if there is no manifest.
        model_only: Skip the trainer state, which may be missing.

    Returns:
        Whether there is a manifest.

    Raises:
        DamagedCheckpointError: on every rank, naming the damaged files.
    """
    manifest = _same_on_all(lambda: read_manifest(folder))
    if manifest is None:
        report(missing_manifest_note(folder))
        return False
    unchecked = (*EDITABLE, TRAINER_STATE) if model_only else EDITABLE
    files = {name for name in manifest if not name.startswith(unchecked)}
    shards = sorted(name for name in files if name.endswith(".distcp"))
    own = set(shards[ranks.global_rank() :: ranks.world_size()])
    if is_node_leader:
        own |= files - set(shards)
    everywhere = ranks.all_gather_object(find_damage(folder, {name: manifest[name] for name in sorted(own)}))
    damage = {
        name: f"{why}, seen by rank {rank}" if rank else why
        for rank, found in reversed(list(enumerate(everywhere)))
        for name, why in found.items()
    }
    if damage:
        raise DamagedCheckpointError(describe_damage(folder, dict(sorted(damage.items()))))
    return True


def find_intact(
    args: RunArgs, resume_from: Path | None, is_node_leader: bool, display: Any
) -> tuple[Path | None, list[Path]]:
    """Return the checkpoint to continue from, and the damaged ones that ``--resume auto`` skipped.

    Only rank 0's ``resume_from`` counts.

    Raises:
        DamagedCheckpointError: it is damaged, or all checkpoints are.
    """
    is_auto = str(args.resume).lower() == "auto"
    candidates = [] if resume_from is None else newest_first(Path(args.out_dir)) if is_auto else [resume_from]
    if resume_from is not None:
        display.phase("verifying the checkpoint")
    return choose_intact(
        candidates, strict=not is_auto, verify=args.verify_checkpoint, is_node_leader=is_node_leader,
        report=display.message,
    )  # fmt: skip


def choose_intact(
    candidates: list[Path], *, strict: bool, verify: bool, is_node_leader: bool, report: Report
) -> tuple[Path | None, list[Path]]:
    """Return the first intact checkpoint and the damaged ones before it, the same on every rank; all ranks call this.

    Args:
        candidates: The newest first; only rank 0's count.
        strict: Reject a damaged one instead of taking the next.
        verify: Whether to read the files; ``trainer/meta.json`` is always checked.
        is_node_leader: See :func:`require_intact_together`.
        report: Receives warnings and notes.

    Raises:
        DamagedCheckpointError: the first one is damaged and ``strict``, or all are; on every rank.
    """
    damaged: list[Path] = []
    candidates = ranks.broadcast_from_rank0(candidates)
    verify = ranks.broadcast_from_rank0(verify)
    for folder in candidates:
        if verify:
            require_same_manifest(folder)  # else another node's checkpoint would be taken for a damaged one
        try:
            if verify and not require_intact_together(folder, is_node_leader, report):
                _same_on_all(partial(require_finite, folder))
            _same_on_all(partial(read_meta, folder))
            return folder, damaged
        except DamagedCheckpointError as error:
            if strict or folder == candidates[-1]:
                raise
            report(f"warning: {error}; taking the next older checkpoint")
            damaged.append(folder)
    return None, []


def _same_on_all(read: Callable[[], T]) -> T:
    """Return what rank 0 reads, or raise its UserError, on every rank."""
    value: T | None = None
    error: UserError | None = None
    if ranks.global_rank() == 0:
        try:
            value = read()
        except UserError as caught:
            error = caught
    error = ranks.broadcast_from_rank0(error)
    if error is not None:
        raise error
    return ranks.broadcast_from_rank0(value)
