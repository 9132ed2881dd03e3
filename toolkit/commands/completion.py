"""`toolkit completion`: completion of commands, flags and values in a shell."""

from argparse import ArgumentParser
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal, get_args, get_origin

import shtab

from toolkit.commands import COMMANDS, TRAINING, all_commands
from toolkit.config import STRATEGIES
from toolkit.config.classes import Option, parameters_of
from toolkit.config.command import COMMON_OPTIONS, CommandOptions
from toolkit.config.types import union_members
from toolkit.extension import registered
from toolkit.io.paths import is_path_option
from toolkit.models.families import list_names_by_family


def setup(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a script that completes toolkit's commands, flags and values in a shell.

    Write the script again after an update, or after installing an extension.

    Args:
        shell: The shell.
    """
    print(shtab.complete(_program(), shell))


def _program() -> ArgumentParser:
    """Return a parser with the words of all commands, which parses nothing."""
    program = ArgumentParser("toolkit")
    program.add_argument("--version", action="store_true", help="print the version")
    parsers = program.add_subparsers()
    for name, command in all_commands().items():
        parser = parsers.add_parser(name, help=command.help, add_help=False)
        if command.wraps_training:
            wrapped = parser.add_subparsers()
            for training in TRAINING:
                inner = COMMANDS[training]
                parser = wrapped.add_parser(training, help=inner.help, add_help=False)
                _add_options(parser, inner.positionals, command.load(), inner.load())
        else:
            _add_options(parser, command.positionals, command.load())
    return program


def _add_options(parser: ArgumentParser, positionals: tuple[str, ...], *functions: Callable[..., None]) -> None:
    """Add the options of a command and of all its classes, and the values that are known."""
    command = CommandOptions(*functions)
    options = command.options() | dict.fromkeys(COMMON_OPTIONS, Option())
    values: dict[str, list[str]] = {
        "command": [name for name, command in all_commands().items() if not command.wraps_training],  # of schema
        "model_name": [*chain(*list_names_by_family().values())],
        "strategy": [*STRATEGIES, *registered("strategies", STRATEGIES)],
    }
    for base in command.class_options:
        values[base] = [*command.choices(base)]
        options[base] = Option()
        for cls in command.choices(base).values():
            options |= {f"{base}.{key}": option for key, option in parameters_of(cls).items()}
    for key, option in options.items():
        text = option.doc.partition(". ")[0].replace("%", "%%")
        word: dict[str, Any] = {"choices": values.get(key, _values(option.kind)) or None, "help": text}
        actions: list[Any] = [parser.add_argument(f"--{key}", **word)]
        actions += [parser.add_argument(key, nargs="?", **word)] if key in positionals else []
        for action in actions if key == "config" or is_path_option(key) else ():
            action.complete = shtab.FILE


def _values(kind: Any) -> list[str]:
    """Return the values of a type's Literals and of booleans."""
    parts = [Literal["true", "false"] if part is bool else part for part in union_members(kind)]
    return [str(value) for part in parts if get_origin(part) is Literal for value in get_args(part)]
