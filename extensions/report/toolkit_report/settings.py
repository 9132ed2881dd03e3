"""Compare a run's settings with the defaults, and write the command that repeats the run."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from toolkit.config import TrainingCommand
from toolkit.config.command import CommandOptions
from toolkit.config.values import OptionValue
from toolkit.errors import UserError
from toolkit.escape import shell_word
from toolkit.planning.training_options import OPTIONS

_CLASSES = ("data", "objective")


def command_of(settings: Mapping[str, Any]) -> TrainingCommand:
    """Return the training command that has these settings."""
    if "checkpoint_dir" not in settings:
        return "pretrain"
    return "finetune_lora" if "lora_r" in settings else "finetune_full"


def flatten(command: TrainingCommand, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name. A class is under its option, its arguments below: data, data.json_path.

    Raises:
        UserError: The settings are not those of a command.
    """
    flat = CommandOptions(OPTIONS[command]).flatten(settings, None)
    return {name: option.value for name, option in flat.items() if name != "resume"}


def defaults_of(command: TrainingCommand, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name: default} of the command's options, and of the classes that the settings name.

    A user's class is not imported: the folder of the run may hold its module. Its options have no default.
    """
    options = CommandOptions(OPTIONS[command])
    for name in _CLASSES:
        with suppress(UserError):  # a class of an extension that is not installed
            options.update({name: OptionValue("", flat[name])} if str(flat.get(name, "")).isidentifier() else {})
    defaults = {name: None for name in ("extensions", *flat) if re.fullmatch(r"extensions|(data|objective)\.\w+", name)}
    defaults |= {key: None if option.is_required else option.default for key, option in options.options().items()}
    return defaults | {name: type(options.parameters[name].default).__name__ for name in _CLASSES}


def changed_settings(defaults: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {name: (value, default)} of the settings that differ from the defaults."""
    pairs = {name: (_plain(value), _plain(defaults.get(name))) for name, value in flat.items()}
    return {name: (value, default) for name, (value, default) in pairs.items() if value != default}


def repeat_command(command: str, changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return a shell command with the settings that differ from the defaults, one option per line.

    Names and values may be a stranger's.
    """
    start, options = f"toolkit {command}", []
    positional = "model_name" if command == "pretrain" else "checkpoint_dir"
    for name, (value, _) in changed.items():
        text = ",".join(map(str, value)) if name == "extensions" and isinstance(value, list) else value
        text = text if isinstance(text, str) else json.dumps(text)
        if name == positional and not text.startswith("-"):
            start += f" {shell_word(text)}"
        else:  # after a space, a value must not look like an option
            equals = "=" if text.startswith("-") else " "
            options.append(shell_word(f"--{name}") + equals + shell_word(text))
    return " \\\n  ".join([start, *options])


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: tuples become lists."""
    return json.loads(json.dumps(value, default=str))
