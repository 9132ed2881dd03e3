"""The tokenizer of a run that has none: of the named architecture, or of the objective's model. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.models.families import get_config
from toolkit.models.families.repositories import repository_of
from toolkit.planning.frozen import find_model, frozen_flag
from toolkit.planning.run_args import RunArgs

_TOKENIZER = "tokenizer.json"


def own_repository(args: RunArgs) -> str | None:
    """Return the hub repository of the architecture if the run needs its tokenizer."""
    name, data = args.model_name, args.data
    if getattr(data, "vocab_size", None) or getattr(args.model_config, "vocab_size", None):
        return None  # the user wants another one
    if name is None or args.tokenizer_dir or args.base_dir or data.content not in ("text", "answers", "preferences"):
        return None
    return name if "/" in name else repository_of(get_config(name).name)


def use_own_tokenizer(args: RunArgs) -> RunArgs:
    """Return the options with the architecture's tokenizer, from checkpoints/ or the cache of the hub."""
    if (repository := own_repository(args)) is None:
        return args
    from huggingface_hub import try_to_load_from_cache

    file = Path("checkpoints", repository, _TOKENIZER)
    found = file if file.is_file() else try_to_load_from_cache(repository, file.name)
    return replace(args, tokenizer_dir=str(Path(found).parent)) if isinstance(found, (str, Path)) else args


def download_hint(repository: str) -> str:
    return f"`toolkit download {repository} --tokenizer_only` downloads the architecture's tokenizer"


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
