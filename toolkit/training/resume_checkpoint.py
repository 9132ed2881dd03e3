"""S7 verified-bytes: verify checkpoints on all ranks and choose the one to resume."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.manifest import (
    EDITABLE,
    TRAINER_STATE,
    DamagedCheckpointError,
    describe_damage,
    manifest_bytes,
    missing_manifest_note,
    read_manifest,
)
from toolkit.checkpoints.remote.access import local_folder
from toolkit.checkpoints.store import newest_first
from toolkit.data.base import Report
from toolkit.distributed import ranks
from toolkit.distributed.world import WorldInfo
from toolkit.io.checksums import find_damage
from toolkit.io.paths import is_url
from toolkit.planning.run_args import RunArgs
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.rank_consistency import require_same_manifest

if TYPE_CHECKING:
    from toolkit.checkpoints.remote.remote_run import RemoteRun


def require_intact_on_all_ranks(folder: Path, is_node_leader: bool, report: Report, model_only: bool = False) -> None:
    """Verify a folder's files against its manifest, if it has one. Collective.

    Shards are divided among all ranks. Other files are read once per node, because nodes may have copies.
    ``is_node_leader`` is true on the first rank of a node. With ``model_only`` the trainer state may be missing.
    """
    manifest = ranks.result_of_rank0(partial(read_manifest, folder))
    if manifest is None:
        report(missing_manifest_note(folder))
        return
    unchecked = (*EDITABLE, TRAINER_STATE) if model_only else EDITABLE
    files = {name for name in manifest if not name.startswith(unchecked)}
    shards = sorted(name for name in files if name.endswith(".distcp"))
    rank_files = set(shards[ranks.global_rank() :: ranks.world_size()])
    if is_node_leader:
        rank_files |= files - set(shards)
    everywhere = ranks.all_gather_object(find_damage(folder, {name: manifest[name] for name in sorted(rank_files)}))
    damage = {
        name: f"{why}, seen by rank {rank}" if rank else why
        for rank, damaged_files in reversed(list(enumerate(everywhere)))
        for name, why in damaged_files.items()
    }
    if damage:
        raise DamagedCheckpointError(describe_damage(folder, dict(sorted(damage.items()))))


def fetch_on_other_nodes(
    remote: "RemoteRun | None", resume: bool | str, resume_from: Path | None, world: WorldInfo
) -> None:
    """Download the checkpoint to resume on the first rank of each other node. Collective.

    Only rank 0's ``resume_from`` counts.
    """
    if world.num_nodes == 1 or not (remote is not None or is_url(resume)):
        return
    is_in_run_folder = remote is not None and resume_from is not None and resume_from.parent == remote.out_dir
    manifest = manifest_bytes(resume_from) if is_in_run_folder and resume_from is not None else None
    name, manifest = ranks.broadcast_from_rank0((None if resume_from is None else resume_from.name, manifest))

    def fetch() -> None:
        if name is None or world.local_rank != 0 or world.global_rank == 0:
            return
        if manifest is not None and remote is not None:
            remote.fetch(name, manifest, ranks.rank_print)
        elif is_url(resume):
            local_folder(str(resume), "--resume", with_trainer=True)

    ranks.call_on_all_ranks(fetch)


def find_intact(
    args: RunArgs, resume_from: Path | None, is_node_leader: bool, display: Any
) -> tuple[Path | None, list[Path]]:
    """Return the checkpoint to resume, and damaged ones that ``--resume auto`` skipped, the same on every rank.

    Collective. Only rank 0's ``resume_from`` counts. ``trainer/meta.json`` is always checked.
    """
    is_auto = str(args.resume).lower() == "auto"
    candidates = [] if resume_from is None else newest_first(args.run_dir) if is_auto else [resume_from]
    if resume_from is not None:
        display.phase("verifying the checkpoint")
    damaged: list[Path] = []
    candidates, verify, run_dir = ranks.broadcast_from_rank0((candidates, args.verify_checkpoint, args.run_dir))
    if is_url(args.out_dir):  # staging folders may have different paths on each node
        candidates = [args.run_dir / folder.name if folder.parent == run_dir else folder for folder in candidates]
    for folder in candidates:
        require_same_manifest(folder)  # otherwise a different checkpoint on another node would look damaged
        try:
            if verify:
                require_intact_on_all_ranks(folder, is_node_leader, display.message)
            ranks.result_of_rank0(partial(read_meta, folder))
            return folder, damaged
        except DamagedCheckpointError as error:
            if not is_auto or folder == candidates[-1]:
                raise
            display.message(f"warning: {error}; using the next older checkpoint")
            damaged.append(folder)
    return None, []
