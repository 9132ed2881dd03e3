"""S2 exact-resume: resolve ``--resume`` to a checkpoint."""

import os
from pathlib import Path

from toolkit.checkpoints.manifest import COMPLETE
from toolkit.checkpoints.remote.access import local_folder
from toolkit.checkpoints.store import WEIGHTS, checkpoint_folders, complete_checkpoints, is_complete, newest, step_of
from toolkit.errors import UserError


def resolve_resume(resume: bool | str, out_dir: Path) -> Path | None:
    """Return the checkpoint folder to resume from, or None for a new run.

    ``resume`` is False, "auto" (the newest checkpoint in out_dir, if any), True (the newest, which must exist), or the
    path or URL of a run's folder, a checkpoint folder or its ``lit_model.pth``.
    """
    try:
        os.listdir(out_dir)
    except FileNotFoundError:
        pass
    except OSError as error:
        what = "is a file" if os.path.isfile(out_dir) else error.strerror
        raise UserError(f"--out_dir {out_dir}: {what}; give a folder that can be read and written") from error
    if resume is False:
        _require_unused(out_dir, "--resume auto continues it, another --out_dir starts a new run")
        return None
    if resume is True or resume == "auto":
        checkpoint = newest(out_dir)
        if checkpoint is None and resume is True:
            raise UserError(f"--resume true: no complete checkpoint in --out_dir {out_dir}; --resume auto starts a run")
        if checkpoint is None and (existing := next(checkpoint_folders(out_dir), None)):
            raise UserError(
                f"--out_dir {out_dir}: {existing.name} has no file {COMPLETE}, so it cannot be resumed and is not "
                "overwritten; give another --out_dir"
            )
        return checkpoint
    path = local_folder(resume, "--resume", with_trainer=True)
    checkpoint = _named_checkpoint(path)
    if out_dir.resolve() not in checkpoint.resolve().parents:
        _require_unused(out_dir, f"--resume {resume} belongs to another run; give another --out_dir")
    elif (last := newest(out_dir)) is not None and step_of(last) > step_of(checkpoint):
        # Otherwise the next --resume auto could continue from a newer checkpoint of the abandoned branch.
        raise UserError(f"--resume {resume}: {last} is newer; to continue from the older one, give another --out_dir")
    return checkpoint


def _named_checkpoint(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"--resume {path}: no such folder or file; --resume auto finds the newest in --out_dir")
    if path.is_file() and path.name != WEIGHTS:
        raise UserError(f"--resume {path}: not a checkpoint; give a checkpoint folder or the {WEIGHTS} in one")
    folder = path.parent if path.name == WEIGHTS else path  # a file, or a folder of shards
    if is_complete(folder):
        return folder
    if folder is path and (checkpoint := newest(folder)) is not None:
        return checkpoint
    holds_model = (folder / WEIGHTS).exists() or (folder / "model_config.yaml").exists()
    reason = f"has no file {COMPLETE}: incomplete" if holds_model else "holds no complete checkpoint"
    raise UserError(f"--resume {path}: {reason}; give another, or load only its weights: --initial_checkpoint_dir")


def _require_unused(out_dir: Path, hint: str) -> None:
    metrics = out_dir / "logs" / "metrics.csv"
    outputs = [*(path for _, path in complete_checkpoints(out_dir)), *checkpoint_folders(out_dir), metrics]
    if used := next((path for path in outputs if path.exists()), None):
        raise UserError(f"--out_dir {out_dir}: already used ({used.relative_to(out_dir)} exists); {hint}")
