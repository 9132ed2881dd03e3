"""Save checkpoints in one call, as a run does in several steps."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from toolkit.checkpoints.run.sharded import ShardedSave
from toolkit.checkpoints.store import begin_checkpoint, commit_checkpoint, delete_on_error
from toolkit.distributed.ranks import run_on_rank0


def write_checkpoint(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a checkpoint folder; ``write`` receives a temporary folder to fill."""
    tmp = begin_checkpoint(folder)
    with delete_on_error(tmp, folder):
        write(tmp)
        commit_checkpoint(tmp, folder, {})


def save_sharded(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors to a folder of shards. Collective if a process group is initialized."""
    save = ShardedSave(tensors, folder)
    save.write()
    save.gather_results()
    run_on_rank0(save.finish)
