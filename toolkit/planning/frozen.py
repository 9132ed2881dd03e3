"""The frozen model that an objective needs, such as a teacher. Does not import torch."""

from pathlib import Path

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.store import ADAPTERS, WEIGHTS
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.objectives import Objective


def model_option(objective: Objective) -> str:
    """Return the option that names the checkpoint of another model, a frozen one or a reference; "" if none is set."""
    return objective.frozen_option or ("reference_dir" if getattr(objective, "reference_dir", None) else "")


def frozen_flag(objective: Objective) -> str:
    """Return the option that names another model's checkpoint, with its value."""
    return f"--objective.{(option := model_option(objective))} {getattr(objective, option)}"


def find_frozen(objective: Objective) -> Path | None:
    """Return the folder of the frozen model; None if the objective needs none."""
    return find_model(objective) if objective.frozen_option else None


def find_model(objective: Objective) -> Path | None:
    """Return the folder of :func:`model_option`; None if it is not set."""
    if not (option := model_option(objective)):
        return None
    folder = find_checkpoint_dir(getattr(objective, option), f"--objective.{option}")
    if not (folder / WEIGHTS).exists():
        fix = "run `toolkit merge_lora` on it first" if (folder / ADAPTERS).exists() else "give a model's folder"
        raise UserError(f"{frozen_flag(objective)}: holds no {WEIGHTS}; {fix}")
    return folder


def require_same_vocabulary(flag: str, other: ModelConfig, trained: ModelConfig | None) -> None:
    """Compare the numbers of tokens of another model and the trained one, None for a user-provided module."""
    if trained is not None and other.vocab_size != trained.vocab_size:
        raise UserError(
            f"{flag}: has {other.vocab_size} tokens, but the trained model has {trained.vocab_size}; "
            "use a model with the same vocabulary"
        )
