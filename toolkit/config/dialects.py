"""Formats of other tools' configuration files, which extensions read: :class:`Dialect`."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config.values import OptionValue
from toolkit.extension import load_registered, registered


@dataclass(frozen=True)
class ForeignFile:
    """The groups of another tool in a configuration file.

    Args:
        source: Path of the file.
        groups: Content of the groups.
        toolkit_options: toolkit's options in the same file, by dotted name.
        overrides: Options from flags and later files.
        world_size: Returns the number of devices on all nodes.
    """

    source: str
    groups: Mapping[str, Any]
    toolkit_options: Mapping[str, OptionValue]
    overrides: Mapping[str, OptionValue]
    world_size: Callable[[], int]


@dataclass(frozen=True)
class Dialect:
    """What an extension reads of another tool.

    Args:
        groups: Returns the groups of the other tool by name, from the content of a YAML file of a training command.
        translate: Converts these groups to {option: (value, key of the file)}.
        arguments: Functions by the name of an argument of :class:`toolkit.Trainer`; each returns {option: value}.
    """

    groups: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    translate: Callable[[ForeignFile], Mapping[str, tuple[Any, str]]] = lambda file: {}
    arguments: Mapping[str, Callable[[Any], Mapping[str, Any]]] = field(default_factory=dict)


set_by: dict[str, str] = {}
"""File and key that set each option of the command line, for messages."""


def dialects() -> Iterator[Dialect]:
    for name in registered("dialects"):
        yield load_registered("dialects", name)


def translate(dialect: Dialect, file: ForeignFile) -> dict[str, OptionValue]:
    """Return the options that another tool's groups set."""
    options = dialect.translate(file)
    set_by.update({option: f"{file.source}: {key}" for option, (_, key) in options.items()})
    return {option: OptionValue(file.source, value) for option, (value, _) in options.items()}


def add_origin(message: str) -> str:
    """Add to an error message about an option which key of another tool's file sets the option."""
    for option, key in set_by.items():
        if key not in message and re.search(rf"--{re.escape(option)}(?![\w.])", message):
            return f"{message}; it is set by {key}"
    return message
