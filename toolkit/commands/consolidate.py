"""`toolkit consolidate`: convert a sharded checkpoint to single files."""

from pathlib import Path

from toolkit.checkpoints.store import WEIGHTS


def setup(checkpoint_dir: str, out_dir: str, verify_checkpoint: bool = True) -> None:
    """Convert a sharded checkpoint to one with unsharded weights in one file and trainer state in another.

    Runs on the CPU, in one process, with a few weights in memory at a time. Runs can resume from the result.

    Args:
        checkpoint_dir: The sharded checkpoint: a folder, or a name below checkpoints/.
        out_dir: The new folder.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    from toolkit.checkpoints.folder import find_checkpoint_dir, require_intact_model
    from toolkit.checkpoints.remote.access import local_folder
    from toolkit.checkpoints.run.consolidate import consolidate
    from toolkit.checkpoints.run.sharded import is_sharded

    checkpoint_dir = str(local_folder(checkpoint_dir, "checkpoint_dir", with_trainer=True))
    folder = Path(checkpoint_dir)  # find_checkpoint_dir rejects user-defined modules: they have no model_config.yaml
    source = folder if is_sharded(folder / WEIGHTS) else find_checkpoint_dir(checkpoint_dir)
    if verify_checkpoint:
        require_intact_model(source)
    consolidate(source, Path(out_dir))
    print(f"wrote {out_dir}")
