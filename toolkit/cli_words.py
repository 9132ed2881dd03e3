"""Reading of the command line and YAML files into pairs of dotted option name and text."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import UserError
from toolkit.untrusted import parse_yaml, read_yaml


class Given(NamedTuple):
    """One option as the user gave it. ``source`` is "" for a flag, else the YAML file."""

    source: str
    text: str | None
    is_null: bool = False  # YAML's null

    def named(self, key: str) -> str:
        """Return the option as shown in messages: flag, or file and key, then the value."""
        return f"{self.source}: {key}: {self.text}" if self.source else f"--{key} {self.text or ''}".rstrip()


Pair = tuple[str, Given]

_FEWER_ACTIVATIONS = (
    "train.micro_batch_size",
    "; toolkit has no activation checkpointing; to save memory, lower --train.micro_batch_size or "
    "--train.max_seq_length, see `toolkit plan`",
)
_ADAPTED_LAYERS = (
    "lora_query",
    "; choose the layers with --lora_query, --lora_key, --lora_value, --lora_projection, --lora_mlp, --lora_head",
)
_OTHER_TOOLS_OPTIONS = {
    "lr": ("train.learning_rate", "; did you mean --train.learning_rate?"),
    "gpus": ("devices", "; did you mean --devices?"),
    "fp16": ("precision", "; did you mean --precision 16-mixed?"),
    "bf16": ("precision", "; did you mean --precision bf16-mixed?"),
    "wandb": ("logger_name", "; did you mean --logger_name wandb?"),
    "target_modules": _ADAPTED_LAYERS,
    "lora_target_modules": _ADAPTED_LAYERS,
    "gradient_checkpointing": _FEWER_ACTIVATIONS,
    "activation_checkpointing": _FEWER_ACTIVATIONS,
}
"""Option names of other tools, each with the option that a command must have for the hint, and the hint."""


def read_words(argv: list[str], positionals: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Split the command line into (option, text). Each option takes one value; text is None where it is missing."""
    words: list[tuple[str, str | None]] = []
    left, rest = list(positionals), list(argv)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and len(word) > 2:
            key, equals, text = word[2:].partition("=")
            takes_value = key not in ("help", "print_config") and not equals
            if takes_value and rest and not rest[0].startswith("--"):
                text, equals = rest.pop(0), "="
            words.append((key, text if equals else None))
        elif word == "-h":
            words.append(("help", None))
        elif left and not (word.startswith("-") and len(word) > 1):
            words.append((left.pop(0), word))
        else:
            raise UserError(f"{word}: unexpected word; options are given as --name value")
    return words


def read_yaml_file(path: str | None) -> dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        UserError: the file is not readable or not a mapping.
    """
    if not path:
        raise UserError("--config: needs a value: the path of a YAML file")
    try:
        # `--config <(command)` passes a pipe under /dev/
        values = parse_yaml(Path(path).read_bytes()) if path.startswith("/dev/") else read_yaml(path)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--config {path}: not a YAML file: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must contain `name: value` pairs")
    return values


def expand_flag(key: str, text: str | None, groups: Mapping[str, type], choices: Container[str]) -> Iterator[Pair]:
    """Yield a flag, or the options of a group flag such as ``--train '{"max_steps": 3}'``."""
    given = Given("", text)
    if key not in groups and not (key in choices and (text or "").startswith("{")):
        yield key, given
        return
    try:
        values = parse_yaml(text or "")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        is_named = isinstance(getattr(groups.get(key), "name", None), str)  # --optimizer AdamW
        hint = f"did you mean --{key}.name {text}?" if text and is_named else f"for example --{key}.NAME VALUE"
        raise UserError(f"{given.named(key)}: {key} is a group; set its options, {hint}")
    yield from flatten({key: values}, "", groups, choices)


def flatten(values: dict[str, Any], source: str, groups: Container[str], choices: Container[str]) -> Iterator[Pair]:
    """Yield the leaves of a mapping by dotted name, with each value as command-line text.

    Args:
        values: Content of a YAML file.
        source: The file's name, for messages.
        groups: Keys with a mapping of options.
        choices: Keys with ``class_path`` and ``init_args``; a class name or its options alone suffice.
    """
    for key, value in values.items():
        if key in choices and isinstance(value, dict):
            value = dict(value)
            if "class_path" in value:
                yield key, Given(source, to_text(value.pop("class_path")))
            value = {**(value.pop("init_args", None) or {}), **value}
        if (key in choices or key in groups) and isinstance(value, dict):
            yield from ((f"{key}.{option}", Given(source, to_text(v), v is None)) for option, v in value.items())
        elif key in groups and value is not None:
            raise UserError(f"{Given(source, to_text(value)).named(key)}: a group; it takes `name: value` pairs")
        elif key not in groups:
            yield str(key), Given(source, to_text(value), value is None)


def to_text(value: Any) -> str:
    """Return a YAML value as command-line text."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def suggest(key: str, known: Collection[str], prefix: str) -> str:
    """Return ``; did you mean --train.max_steps?`` with the options closest in group and name, near ties included."""
    group, _, last = key.rpartition(".")
    needed, hint = _OTHER_TOOLS_OPTIONS.get(last, ("", ""))
    if needed in known:
        return hint
    scores = {}
    for option in known:
        option_group, _, option_last = option.rpartition(".")
        scores[option] = similarity(last, option_last)
        if group and last != option_last:
            scores[option] = min(scores[option], similarity(group, option_group))
    best = max(scores.values())
    near = [option for option, score in scores.items() if score >= max(0.6, best - 0.05)][:3]
    return f"; did you mean {' or '.join(prefix + option for option in near)}?" if near else "; see --help"


def similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
