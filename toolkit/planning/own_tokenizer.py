"""The tokenizer of a named architecture that is trained from scratch. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data import HuggingFaceText, InstructionData, Mixture, PythonStdlib, TextFiles
from toolkit.models.families import get_config
from toolkit.models.families.repositories import repository_of

if TYPE_CHECKING:
    from toolkit.planning.run_args import RunArgs


_TEXT = (HuggingFaceText, InstructionData, Mixture, PythonStdlib, TextFiles)


def own_repository(args: RunArgs) -> str | None:
    """Return the hub repository of the architecture if the run needs its tokenizer."""
    name, data = args.model_name, args.data
    if getattr(data, "vocab_size", None) or getattr(args.model_config, "vocab_size", None):
        return None  # the user wants another one
    if name is None or args.tokenizer_dir or args.base_dir or not isinstance(data, _TEXT):
        return None
    return name if "/" in name else repository_of(get_config(name).name)


def use_own_tokenizer(args: RunArgs) -> RunArgs:
    """Return the options with the architecture's tokenizer, from checkpoints/ or the cache of the hub."""
    if (repository := own_repository(args)) is None:
        return args
    from huggingface_hub import try_to_load_from_cache

    file = Path("checkpoints", repository, "tokenizer.json")
    found = file if file.is_file() else try_to_load_from_cache(repository, file.name)
    return replace(args, tokenizer_dir=str(Path(found).parent)) if isinstance(found, (str, Path)) else args


def download_hint(repository: str) -> str:
    return f"`toolkit download {repository} --tokenizer_only` downloads the architecture's tokenizer"
