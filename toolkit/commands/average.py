"""`toolkit average`: average the weights of several checkpoints."""

from pathlib import Path

from toolkit.errors import require_option


def setup(out_dir: str, checkpoint_dirs: str, verify_checkpoint: bool = True) -> None:
    """Write a model with the mean of the weights of several checkpoints of one model, such as the last ones of a run.

    Runs on the CPU, with a few weights in memory at a time. Sums are float64, rounded once to the checkpoints' dtype.

    Args:
        out_dir: The new folder.
        checkpoint_dirs: Two or more checkpoints, separated by commas: folders, or names below checkpoints/.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    from toolkit.checkpoints.average import average
    from toolkit.checkpoints.folder import find_model

    names = [name.strip() for name in checkpoint_dirs.split(",") if name.strip()]
    require_option(len(names) >= 2, "checkpoint_dirs", checkpoint_dirs, "must be two or more folders: A,B,...")
    folders = [find_model(name, verify=verify_checkpoint) for name in names]
    average(folders, Path(out_dir))
    print(f"wrote {out_dir}: the mean of {len(folders)} checkpoints")
