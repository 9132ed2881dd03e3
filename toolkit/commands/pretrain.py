"""`toolkit pretrain`: train a language model on text."""

import shutil
import textwrap

from toolkit.commands.training import train
from toolkit.extension import describe_extensions
from toolkit.models.families import list_aliases, list_names_by_family
from toolkit.planning.training_options import PretrainOptions


def setup(options: PretrainOptions) -> None:
    """Train a language model on text, from scratch or from a checkpoint.

    `toolkit pretrain list` prints the names of the models.
    """
    if options.model_name == "list":
        _print_names()
    else:
        train(options)


def _print_names() -> None:
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    for family, names in list_names_by_family().items():
        lines = textwrap.wrap("  ".join(names), width - 12, break_long_words=False, break_on_hyphens=False)
        print("\n".join(f"{label:11} {line}" for label, line in zip([family, *[""] * len(lines)], lines, strict=False)))
    print(f"\nAlso {len(list_aliases())} model names of the same architectures: Llama-3.1-8B-Instruct, ...")
    print("Names are case-insensitive; an organization prefix is ignored.")
    for line in describe_extensions():
        print(f"Extension {line}")
