"""Convert configuration files of other tools to toolkit options: an FSDP guide's YAML and minGPT's hydra file.

A file may also contain toolkit's keys, unless both set the same option. For each key, one line reports the options that
it sets, or why it has no effect; an unsupported key is an error. Keys that flags or later files override are not
checked. Batch sizes of both formats are per device.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.config.checks import note
from toolkit.config.dialects import ForeignFile
from toolkit.config.values import OptionValue
from toolkit.errors import UserError, did_you_mean
from toolkit_foreign import fsdp_guide, mingpt
from toolkit_foreign.rules import ForeignConfig, Options

FORMATS = {
    "model": fsdp_guide.MODEL,
    "data": fsdp_guide.DATA,
    "training": fsdp_guide.TRAINING,
    "distributed": fsdp_guide.DISTRIBUTED,
    "data_config": mingpt.DATA,
    "gpt_config": mingpt.GPT,
    "optimizer_config": mingpt.OPTIMIZER,
    "trainer_config": mingpt.TRAINER,
}
"""Conversion rules by group (:data:`toolkit_foreign.groups.GROUPS`) and key."""
_REPLACED_BY = {
    "model_name": ("model_name", "initial_checkpoint_dir"),
    "train.lr_warmup_steps": ("train.lr_warmup_steps", "train.lr_warmup_fraction"),
}


def translate(foreign: ForeignFile) -> dict[str, tuple[Any, str]]:
    """Convert the groups of a file to options. Prints a line per key on standard error, on rank 0 only."""
    file = ForeignConfig(**vars(foreign))
    lines: list[str] = []
    set_by: dict[str, tuple[Any, str]] = {}  # the value of an option, and the key that set it
    for group in file.groups:
        _check_names(file, group)
    for group, keys in file.groups.items():
        for key, value in keys.items() if group in FORMATS else ():
            if value is not None:
                name = f"{group}.{key}"
                options, outcome = _translate_key(file, group, key)
                _merge(file.source, set_by, name, options)
                lines.append(f"{name} {OptionValue('', value).text}{outcome}")
        implied = {o: v for o, v in mingpt.IMPLIED.get(group, {}).items() if o not in set_by and _is_unset(file, o)}
        _merge(file.source, set_by, group, implied)
        if implied:
            lines.append(f"{group} -> {_flags(implied)}")
    if "hydra" in file.groups:
        lines.append("hydra: has no effect on toolkit")
    note(*(f"{file.source}: {line}" for line in lines))
    return set_by


def _check_names(file: ForeignConfig, group: str) -> None:
    """Check the key names of a group, before slower checks."""
    keys, rules = file.groups[group], FORMATS.get(group)
    if rules is None:
        return
    if not isinstance(keys, Mapping):
        raise UserError(f"{OptionValue(file.source, keys).display(group)}: must be a group of `name: value` pairs")
    for key in keys:
        if key not in rules:
            hint = did_you_mean(str(key), rules) or f"; known are {', '.join(rules)}"
            raise UserError(f"{file.source}: {group}.{key}: no such key{hint}")


def _translate_key(file: ForeignConfig, group: str, key: str) -> tuple[Options, str]:
    """Return the options that a key sets, and the outcome for display."""
    rule, key_value, name = FORMATS[group][key], OptionValue(file.source, file.groups[group][key]), f"{group}.{key}"
    names = rule.options.split()
    overrides = [file.override(option) for option in names]
    if overrides and all(overrides):
        return {}, f": overridden by {overrides[0]}"
    if both := [option for option in names if option in file.toolkit_options and option not in file.overrides]:
        raise UserError(f"{key_value.display(name)}: the file also sets {both[0]}; keep one of them")
    try:
        result = rule.apply(file, key_value.value)
    except UserError:  # invalid number of devices
        raise
    except ValueError as error:
        raise UserError(f"{key_value.display(name)}: {error}") from None
    if isinstance(result, str):
        return {}, f": {result}"
    options = {option: value for option, value in result.items() if not file.override(option)}
    return options, f" -> {_flags(options)}{rule.note and f' ({rule.note})'}"


def _merge(source: str, set_by: dict[str, tuple[Any, str]], key: str, options: Options) -> None:
    """Add the options of a key to ``set_by``."""
    for option, value in options.items():
        before, other = set_by.setdefault(option, (value, key))
        if before != value:
            meaning, other_meaning = _flags({option: value}), _flags({option: before})
            raise UserError(
                f"{source}: {key}: means {meaning}, but {other} means {other_meaning}; change one, or give --{option}"
            )


def _is_unset(file: ForeignConfig, option: str) -> bool:
    """Whether neither the file nor an override sets an option that a group implies."""
    names = _REPLACED_BY.get(option, (option,))
    return not any(name in file.toolkit_options or file.override(name) for name in names)


def _flags(options: Options) -> str:
    return " ".join(f"--{option} {OptionValue('', value).text}" for option, value in options.items())
