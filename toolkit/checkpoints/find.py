"""Resolve ``checkpoint_dir`` to a model folder. Does not import torch."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.checkpoints.remote.access import local_folder
from toolkit.checkpoints.store import FINAL, WEIGHTS, is_checkpoint_name, newest
from toolkit.errors import UserError, did_you_mean
from toolkit.io.safe_parse import read_yaml

CONFIG, HYPERPARAMETERS = "model_config.yaml", "hyperparameters.yaml"


def find_checkpoint_dir(value: str | Path, option: str = "checkpoint_dir") -> Path:
    """Resolve an option's ``value`` to a model folder: a path, a name below ``checkpoints/``, or a URL (downloaded)."""
    path = local_folder(value, option).expanduser()
    folder = path if path.is_dir() else Path("checkpoints") / value
    if path.is_file():
        raise UserError(f"{option} {value}: is a file; give the folder that holds it")
    if not folder.is_dir():
        if path.parent in (Path(), Path("checkpoints")):
            models = [str(file.parent.relative_to("checkpoints")) for file in Path("checkpoints").glob(f"*/*/{CONFIG}")]
            if hint := did_you_mean(path.name, models, cutoff=1, normalize=lambda m: Path(m).name.lower(), display=str):
                raise UserError(f"{option} {value}: no such folder{hint}")
        if is_checkpoint_name(path.name) or (path.parent != Path() and path.parent.is_dir()):
            raise UserError(
                f"{option} {value}: no such folder, also not below checkpoints/; {_suggest_folder(path.parent)}"
            )
        is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(value))
        raise UserError(
            f"{option} {value}: no such folder, also not below checkpoints/; to fetch a model from the hub, run "
            f"`toolkit download {value if is_hub_name else 'ORGANIZATION/NAME'}`"
        )
    if not (folder / CONFIG).is_file():
        if (folder / WEIGHTS).exists():
            raise UserError(
                f"{option} {value}: holds weights but no {CONFIG} (a user-defined module?); "
                f"load its {WEIGHTS} with load_state_dict"
            )
        raise UserError(f"{option} {value}: holds no {CONFIG}; {_suggest_folder(folder)}")
    return folder


def head_of(folder: Path) -> str | None:
    """Return the name of a checkpoint's head; None for a language model."""
    return read_settings(folder, CONFIG).get("head")


def read_settings(folder: Path, file: str) -> dict[str, Any]:
    """Return the content of a YAML file; {} if it is damaged, which is an error when the checkpoint is loaded."""
    with suppress(OSError, ValueError):
        if isinstance(values := read_yaml(folder / file), dict):
            return values
    return {}


def is_hf_folder(folder: str | Path) -> bool:
    """Whether a folder is a Hugging Face model and not a checkpoint, which may also hold the original config.json."""
    return Path(folder, "config.json").is_file() and not Path(folder, CONFIG).is_file()


def _suggest_folder(folder: Path) -> str:
    """Return a suggestion for the error message about a folder without a model.

    Raises UserError if it is a Hugging Face folder that cannot be imported.
    """
    converted = "checkpoints" / folder
    if model := newest(folder) or ((converted / CONFIG).is_file() and converted):
        return f"did you mean {model}?"
    if (folder / "config.json").is_file():
        from toolkit.checkpoints.hf.reader import require_supported_format

        require_supported_format(folder)
        return f"run `toolkit convert_from_hf {folder} checkpoints/{folder.resolve().name}` first"
    return f"a run's models are in its step-* and {FINAL} folders"
