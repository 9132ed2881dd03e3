"""`toolkit consolidate`: a sharded checkpoint becomes one with single files."""

from __future__ import annotations


def setup(checkpoint_dir: str, out_dir: str, verify_checkpoint: bool = True) -> None:
    """Write a sharded checkpoint again, with its weights in one file and its trainer state in another.

    Runs on the CPU, in one process, with a few weights in memory at a time. --resume goes on from the result as well.

    Args:
        checkpoint_dir: The sharded checkpoint: a folder, or a name below checkpoints/.
        out_dir: The new folder.
        verify_checkpoint: Compare files with their checksums before they are used; false also reads edited files.
    """
    import sys
    from pathlib import Path

    from toolkit.checkpoints.consolidate import consolidate
    from toolkit.checkpoints.finite import nonfinite_warning
    from toolkit.checkpoints.folder import find_checkpoint_dir, require_intact_model
    from toolkit.checkpoints.sharded import is_sharded
    from toolkit.checkpoints.store import WEIGHTS

    folder = Path(checkpoint_dir)  # a module of one's own has no configuration for find_checkpoint_dir to find
    source = folder if is_sharded(folder / WEIGHTS) else find_checkpoint_dir(checkpoint_dir)
    if verify_checkpoint:
        require_intact_model(source)
    if nonfinite := consolidate(source, Path(out_dir)):
        print(nonfinite_warning(nonfinite, out_dir), file=sys.stderr)
    print(f"wrote {out_dir}")
