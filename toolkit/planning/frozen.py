"""The frozen model that an objective needs, such as a teacher. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.store import ADAPTERS, WEIGHTS
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.objectives import Objective

if TYPE_CHECKING:
    from toolkit.planning.run_args import RunArgs

_TOKENIZER = "tokenizer.json"


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


def use_frozen_vocabulary(args: RunArgs) -> RunArgs:
    """Return the options with the other model's tokenizer, if the run has none.

    Raises:
        UserError: The tokens of the run have other ids in the other model. Without a tokenizer, the number of tokens
            is compared when the data is known.
    """
    folder, source = find_model(args.objective), args.tokenizer_dir or args.base_dir
    if folder is None or not (folder / _TOKENIZER).is_file():
        return args
    if source is None:
        return replace(args, tokenizer_dir=str(folder))
    if args.tokenizer_dir is None and not (Path(source) / _TOKENIZER).is_file():
        return args
    flag = frozen_flag(args.objective)
    frozen, trained = Tokenizer.load(folder, flag.partition(" ")[0]).vocabulary, Tokenizer.load(source).vocabulary
    if differing := [token for token in frozen.keys() | trained.keys() if frozen.get(token) != trained.get(token)]:
        raise UserError(
            f"{flag}: has another vocabulary than {source}: of {len(frozen):,} and {len(trained):,} tokens, "
            f"{len(differing):,} differ; use a model with the same tokenizer"
        )
    return args
