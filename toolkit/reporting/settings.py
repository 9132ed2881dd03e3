"""Compare a run's settings with the defaults, and write the command that repeats the run."""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from toolkit.config.command import CommandOptions, OptionValue
from toolkit.errors import UserError
from toolkit.planning import training_options

_CLASSES = ("data", "objective")


def command_of(settings: Mapping[str, Any]) -> str:
    """Return the training command that has these settings."""
    if "checkpoint_dir" not in settings:
        return "pretrain"
    return "finetune_lora" if "lora_r" in settings else "finetune_full"


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name. A class is under its option, its arguments below: data, data.json_path."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and "class_path" in value:
            flat[name] = value["class_path"]
            value = value.get("init_args") or {}
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return {str(name): value for name, value in flat.items() if name != "resume"}


def changed_settings(command: str, flat: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {name: (value, default)} of the settings that differ from the defaults."""
    options = CommandOptions(getattr(training_options, command))
    for name in _CLASSES:
        with suppress(UserError):  # a class of an extension that is not installed
            options.update([(name, OptionValue("", flat[name]))] if isinstance(flat.get(name), str) else [])
    defaults = {key: option.default for key, option in options.options().items() if not option.is_required}
    defaults |= {name: type(options.parameters[name].default).__name__ for name in _CLASSES}
    pairs = {name: (_plain(value), _plain(defaults.get(name))) for name, value in flat.items()}
    return {name: (value, default) for name, (value, default) in pairs.items() if value != default}


def repeat_command(command: str, changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return a shell command with the settings that differ from the defaults."""
    words, positional = ["toolkit", command], "model_name" if command == "pretrain" else "checkpoint_dir"
    if positional in changed:
        words.append(shlex.quote(str(changed[positional][0])))
    for name, (value, _) in changed.items():
        if name == positional:
            continue
        if name == "extensions":
            value = ",".join(map(str, value))
        words.append(f"--{name} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}")
    return " ".join(words)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: tuples become lists."""
    return json.loads(json.dumps(value, default=str))
