"""Compare a run's settings with the defaults, and write the command that repeats the run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from toolkit.config.command import CommandOptions, OptionValue
from toolkit.errors import UserError
from toolkit.planning import training_options

_CLASSES = ("data", "objective")
_POSITIONAL = {"pretrain": "model_name", "finetune_full": "checkpoint_dir", "finetune_lora": "checkpoint_dir"}


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


def default_values(command: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of each option of a training command, with the classes in ``flat``."""
    options = CommandOptions(getattr(training_options, command))
    for name in _CLASSES:
        if isinstance(flat.get(name), str):
            try:
                options.update([(name, OptionValue("", flat[name]))])
            except UserError:
                continue  # a class of an extension that is not installed
    defaults = {key: _plain(option.default) for key, option in options.options().items() if not option.is_required}
    selected = {name: type(options.parameters[name].default).__name__ for name in _CLASSES}
    return defaults | selected


def changed_settings(command: str, flat: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {name: (value, default)} of the settings that differ from the defaults."""
    defaults = default_values(command, flat)
    values = {name: _plain(value) for name, value in flat.items()}
    return {name: (value, defaults.get(name)) for name, value in values.items() if value != defaults.get(name)}


def repeat_command(command: str, changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return a shell command with the settings that differ from the defaults."""
    words, positional = ["toolkit", command], _POSITIONAL[command]
    if changed.get(positional, (None,))[0] is not None:
        words.append(shlex.quote(str(changed[positional][0])))
    for name in sorted(changed, key=lambda name: name not in _CLASSES):  # a class before its options
        value = changed[name][0]
        if name not in (positional, "extensions") and not (name == "objective" and value == "NextToken"):
            words.append(f"--{name} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}")
    if "extensions" in changed:
        words.append(f"--extensions {shlex.quote(','.join(map(str, changed['extensions'][0])))}")
    return " ".join(words)


def _plain(value: Any) -> Any:
    """Return the value as JSON has it: tuples become lists."""
    return json.loads(json.dumps(value, default=str))
