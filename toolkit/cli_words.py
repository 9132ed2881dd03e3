"""What the user wrote: words of the command line and YAML files, as pairs of an option's dotted name and a text."""

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

    def named(self, key: str) -> str:
        """How the user knows it, for messages: flag or file and key, then the value."""
        return f"{self.source}: {key}: {self.text}" if self.source else f"--{key} {self.text or ''}".rstrip()


Pair = tuple[str, Given]

_FEWER_ACTIVATIONS = (
    "train.micro_batch_size",
    "; activations are always kept; to need less memory, lower --train.micro_batch_size or --train.max_seq_length, see "
    "`toolkit plan`",
)
_ADAPTED_LAYERS = (
    "lora_query",
    "; choose the layers with --lora_query, --lora_key, --lora_value, --lora_projection, --lora_mlp, --lora_head",
)
_OF_OTHER_TOOLS = {
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
"""Names that options have in other tools: an option that the command must have for the hint, and the hint."""


def read_words(argv: list[str], positionals: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Split the command line into (option, text). An option is followed by one value; text is None where it is not."""
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
    """Return what a YAML file holds.

    Raises:
        UserError: it cannot be read, or does not hold a mapping.
    """
    if not path:
        raise UserError("--config: needs a value: the path of a YAML file")
    try:
        # A pipe is what the shell makes of `--config <(command)`.
        values = parse_yaml(Path(path).read_bytes()) if path.startswith("/dev/") else read_yaml(path)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--config {path}: not a YAML file: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must hold `name: value` pairs")
    return values


def expand_flag(key: str, text: str | None, groups: Mapping[str, type], choices: Container[str]) -> Iterator[Pair]:
    """Yield a flag, or what it sets if it sets a whole group, such as ``--train '{"max_steps": 3}'``."""
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
    """Yield the leaves of a mapping by dotted name, each value as one would write it on the command line.

    Args:
        values: What a YAML file holds.
        source: The file's name, for messages.
        groups: Keys that hold a mapping of options.
        choices: Keys that hold ``class_path`` and ``init_args``; a class's name or its options alone will do.
    """
    for key, value in values.items():
        if key in choices and isinstance(value, dict):
            value = dict(value)
            if "class_path" in value:
                yield key, Given(source, to_text(value.pop("class_path")))
            value = {**(value.pop("init_args", None) or {}), **value}
        if (key in choices or key in groups) and isinstance(value, dict):
            yield from ((f"{key}.{option}", Given(source, to_text(v))) for option, v in value.items())
        elif key in groups and value is not None:
            raise UserError(f"{Given(source, to_text(value)).named(key)}: a group, which holds `name: value` pairs")
        elif key not in groups:
            yield str(key), Given(source, to_text(value))


def to_text(value: Any) -> str:
    """The spelling of a YAML value as a flag's value."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def suggest(key: str, known: Collection[str], prefix: str) -> str:
    """``; did you mean --train.max_steps?``: the options whose group and name come nearest, near ties included."""
    group, _, last = key.rpartition(".")
    needed, hint = _OF_OTHER_TOOLS.get(last, ("", ""))
    if needed in known:
        return hint
    scores = {}
    for option in known:
        option_group, _, option_last = option.rpartition(".")
        scores[option] = likeness(last, option_last)
        if group and last != option_last:
            scores[option] = min(scores[option], likeness(group, option_group))
    best = max(scores.values())
    near = [option for option, score in scores.items() if score >= max(0.6, best - 0.05)][:3]
    return f"; did you mean {' or '.join(prefix + option for option in near)}?" if near else "; see --help"


def likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
