"""Format a subcommand's help. Commands with many options show the frequent ones first; others show all."""

import argparse
import inspect
import json
import shutil
import textwrap
from functools import partial
from typing import Any, Literal

from toolkit.config.classes import Option
from toolkit.config.command import CommandOptions
from toolkit.config.types import base_of, describe, is_restricted, limits, union_members
from toolkit.errors import UserError, did_you_mean
from toolkit.io.paths import is_path_option

MAX_OPTIONS_SHOWN = 40  # commands with more options show the frequent ones first
ORDER = (
    "", "train", "data", "eval", "optimizer", "objective", "fsdp", "ddp", "pipeline", "log", "profiler", "model_config"
)  # fmt: skip
FREQUENT = (
    "command", "checkpoint_dir", "model_name", "initial_checkpoint_dir", "data", "train.learning_rate",
    "train.global_batch_size", "train.micro_batch_size", "train.max_steps", "train.epochs", "train.max_seq_length",
    "lora_r", "devices", "precision", "out_dir", "resume", "device_memory_gb", "steps", "config",
)  # fmt: skip
"""The options of the first screen, in display order."""

Entries = dict[str, tuple[str, str]]  # option -> (value placeholder, help text)


def format_help(
    example: str | None, command: CommandOptions, usage: str, positionals: tuple[str, ...], topic: str | None
) -> str:
    """Return the help on ``topic``: "all", the name of a group, or None for the first screen."""
    groups = _groups(command)
    entries = {key: entry for group in groups.values() for key, entry in group.items()}
    topics = ["all", *filter(None, groups)]
    epilog: list[str] = []
    if topic is None and len(entries) > MAX_OPTIONS_SHOWN:
        short = {key: (entries[key][0], entries[key][1].partition(". ")[0]) for key in FREQUENT if key in entries}
        groups = {"frequent": short}
        inner = [f"--{key}" for key in entries if "." in key and key.partition(".")[0] in command.class_options]
        epilog += [f"options of the selected data: {', '.join(inner)}"] if inner else []
        count, names = len(entries), ", ".join(topics[1:])
        epilog += [f"--help all shows all {count} options, --help GROUP a group's options: {names}."]
    elif topic in topics[1:]:
        groups = {topic: groups[topic]}
    elif topic not in (None, "all"):
        raise UserError(f"--help {topic}: must be one of {', '.join(topics)}{did_you_mean(topic, topics)}")
    about, _, _ = (inspect.getdoc(command.functions[0]) or "").partition("\nArgs:")
    printer = argparse.ArgumentParser(
        usage=usage,
        description=_wrap([*about.split("\n\n"), *([] if example is None else [example])]),
        epilog=_wrap(epilog),
        add_help=False,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
    )
    for title, group in groups.items():
        box = printer.add_argument_group(f"{title} options".strip())
        for key, (value, text) in group.items():
            flag, kind = (key.upper(), "store") if key in positionals else (f"--{key} {value}".rstrip(), "store_true")
            box.add_argument(flag, action=kind, help=text.replace("%", "%%"))
    return printer.format_help()


def _groups(command: CommandOptions) -> dict[str, Entries]:
    """Return the help entries by group, with the groups in display order."""
    groups: dict[str, Entries] = {name: {} for name in ORDER}
    for name in filter(command.has_choice, command.class_options):
        text = f"Class: {', '.join(command.choices(name))}. `--{name} NAME --help {name}` shows its options."
        groups.setdefault(name, {})[name] = ("NAME", text)
    for key, option in command.options().items():
        groups.setdefault(key.rpartition(".")[0], {})[key] = (_placeholder(key, option.kind), _describe(option))
    groups[""]["config"] = ("FILE", "YAML file of options; flags override it. May be repeated.")
    groups[""]["extensions"] = ("NAMES", "Extension modules, separated by commas; see tutorials/extend.md.")
    groups[""]["print_config"] = ("", "Print all options as YAML and exit.")
    return {name: group for name, group in groups.items() if group}


def _placeholder(key: str, kind: Any) -> str:
    """Return the placeholder for an option's value, such as N or PATH."""
    bases = {*map(base_of, union_members(kind))}
    if bases & {int, float}:
        return "N"
    return "PATH" if is_path_option(key) else "BOOL" if bases == {bool} else "NAME" if Literal in bases else "VALUE"


def _describe(option: Option) -> str:
    """Return ``Sequences per forward pass. (an integer or auto; default: 4)``."""
    notes = [] if union_members(option.kind) in ((str,), (bool,)) else [describe(option.kind)]
    notes += [limits(kind) for kind in union_members(option.kind) if is_restricted(kind)]
    if not option.is_required and option.default is not None:
        default = option.default if isinstance(option.default, str) else json.dumps(option.default, default=str)
        notes.append(f"default: {default}")
    return f"{option.doc} ({'; '.join(notes)})" if notes else option.doc


def _wrap(paragraphs: list[str]) -> str:
    """Wrap paragraphs, but not example commands."""
    width = shutil.get_terminal_size().columns - 2
    lines = [p if p.startswith("toolkit ") else textwrap.fill(" ".join(p.split()), width) for p in paragraphs]
    return "\n\n".join(lines)
