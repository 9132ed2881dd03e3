"""Consolidate a sharded checkpoint, written by any number of ranks, into single files."""

from pathlib import Path

from toolkit.checkpoints.finite import write_weights
from toolkit.checkpoints.folder import CONFIG, load_compatible_weights, read_model_config
from toolkit.checkpoints.manifest import COMPLETE
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.run.optimizer_state import nest
from toolkit.checkpoints.run.sharded import is_sharded, read_sharded
from toolkit.checkpoints.store import WEIGHTS, is_complete, require_new_folder, write_folder, write_model_folder
from toolkit.checkpoints.weights import load_state, load_weights, save_state
from toolkit.errors import UserError
from toolkit.io.safe_parse import read_json_object
from toolkit.models.gpt import model_on_meta

_STATE, _OPTIMIZER = Path("trainer", "state.pth"), Path("trainer", "optimizer")


def consolidate(checkpoint_dir: Path, out_dir: Path) -> None:
    """Write a copy of a sharded checkpoint with weights in one file and optimizer state in ``trainer/state.pth``.

    Creates the folder atomically, and marks it complete if the source is. Needs no process group, and as much memory as
    :func:`~toolkit.checkpoints.run.sharded.read_sharded`.
    """
    require_new_folder(out_dir)
    if checkpoint_dir.resolve() in (out_dir.resolve(), *out_dir.resolve().parents):
        raise UserError(f"out_dir {out_dir}: is inside the checkpoint; give another folder")
    if not (is_sharded(checkpoint_dir / WEIGHTS) or is_sharded(checkpoint_dir / _OPTIMIZER)):
        raise UserError(f"checkpoint_dir {checkpoint_dir}: is not sharded; use it directly")
    # Not begin_checkpoint: it deletes unfinished checkpoints next to out_dir, which may belong to a running job.
    write = write_model_folder if is_complete(checkpoint_dir) else write_folder  # only the former marks it complete
    write(out_dir, lambda tmp: _write(tmp, checkpoint_dir, out_dir))


def _write(tmp: Path, source: Path, out_dir: Path) -> None:
    converted = {source / path for path in (WEIGHTS, _STATE, _OPTIMIZER, COMPLETE)}
    copy_files(source, tmp, ("**/*",), exclude=converted)
    _write_weights(tmp, source, out_dir)
    if (source / "trainer").exists():
        _write_state(tmp, source)


def _write_weights(tmp: Path, source: Path, out_dir: Path) -> None:
    if (source / CONFIG).exists():
        weights = load_compatible_weights(source, model_on_meta(read_model_config(source)))
    else:  # a user-defined module: meta.json records which names share a tensor
        weights = load_weights(source)
        tied = read_json_object(source / "trainer" / "meta.json").get("tied", {})
        weights |= {second: weights[first] for second, first in tied.items()}
    write_weights(weights.items(), tmp / WEIGHTS, out_dir)


def _write_state(tmp: Path, source: Path) -> None:
    state = load_state(source / _STATE)
    optimizer = state.get("optimizer")
    if not isinstance(optimizer, dict):
        raise UserError(f"{source / _STATE}: optimizer: is missing or not a dict; use another checkpoint")
    if "state" not in optimizer:
        values = optimizer.pop("values", None) or {}
        state["optimizer"] = {"state": nest(read_sharded(source / _OPTIMIZER) | values), **optimizer}
    save_state(state, tmp / _STATE)
