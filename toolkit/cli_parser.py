"""Parsing of the command line and YAML files into the arguments of a ``setup`` function.

jsonargparse converts values and prints the help. This module adds the merging of YAML files and flags, the choice of
data classes, and one-line errors with suggestions.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from toolkit.cli_words import Given, Pair, expand_flag, flatten, read_words, read_yaml_file, suggest
from toolkit.errors import UserError, did_you_mean
from toolkit.paths import require_local

COMMON_OPTIONS = ("help", "config", "print_config")  # options of every command


@dataclass
class Command:
    """The options of a ``setup`` function by dotted name, given the chosen classes."""

    name: str
    setup: Callable[..., None]
    choices: dict[str, dict[str, type]] = field(default_factory=dict)  # parameter -> classes by short name
    chosen: dict[str, type] = field(default_factory=dict)  # parameter -> class
    groups: dict[str, type] = field(default_factory=dict)  # parameter -> dataclass

    def __post_init__(self) -> None:
        self.parameters = parameters_of(self.setup)
        self.hints = {name: parameter.annotation for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            hint = self.hints[name]
            if inspect.isabstract(hint):
                self.choices[name] = subclasses(hint)
                self.chosen[name] = type(parameter.default)
            elif is_dataclass(hint):
                self.groups[name] = hint

    def options(self) -> dict[str, Any]:
        """Return the type of every option by dotted name."""
        found: dict[str, Any] = {}
        for name in self.parameters:
            group = self.chosen.get(name) or self.groups.get(name)
            if group is None:
                found[name] = self.hints[name]
            else:
                found |= {f"{name}.{option}": p.annotation for option, p in parameters_of(group).items()}
        return found

    def required(self) -> list[str]:
        """Return the dotted names of the options without a default."""
        found = [name for name, p in self.parameters.items() if p.default is inspect.Parameter.empty]
        optional = getattr(self.setup, "optional", ())  # parameters whose default suffices
        for name, chosen in self.chosen.items():
            if name in optional and chosen is type(self.parameters[name].default):
                continue
            parameters = parameters_of(chosen)
            found += [f"{name}.{option}" for option, p in parameters.items() if p.default is inspect.Parameter.empty]
        return found


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a function or class by name, with those that its ``**kwargs`` are forwarded to."""
    # private in jsonargparse 4.53, which offers the same resolution only as arguments of a parser
    from jsonargparse._parameter_resolvers import get_signature_parameters

    found = {p.name: p for p in get_signature_parameters(function, logger=False)}
    for name in found.keys() & (own := inspect.signature(function).parameters).keys():
        found[name].default = own[name].default  # a data module as written; jsonargparse makes a dictionary of it
    return found


def parse(
    name: str, setup: Callable[..., None], positionals: tuple[str, ...], argv: list[str]
) -> dict[str, Any] | None:
    """Return the arguments for ``setup``, or None after printing the help or the configuration.

    Args:
        name: The subcommand, for the help.
        setup: A function with typed parameters: scalars, dataclasses, and abstract base classes.
        positionals: Parameters that may be given without their flag.
        argv: The words after the subcommand.

    Raises:
        UserError: an unknown name, a value of the wrong type, a missing option, an unreadable file.
    """
    if hasattr(setup, "choose"):  # argv names another command, whose options it also takes
        setup, positionals = setup.choose(argv)
    command = Command(name, setup)
    words = read_words(argv, positionals)
    keys = {key for key, _ in words}
    names = (command.groups, command.choices)
    files = [text for key, text in words if key == "config"]
    for file in files:
        require_local("--config", file)
    layers = [list(flatten(read_yaml_file(file), file or "", *names)) for file in files]
    layers.append([pair for key, text in words if key not in COMMON_OPTIONS for pair in expand_flag(key, text, *names)])
    given = without_nulls(command, merge(command, layers))
    parser = build_parser(command, positionals)
    if "help" in keys:
        print(parser.format_help(), end="")
        return None
    check_names(command, given)
    check_paths(command, given)
    for key in command.required():
        if key not in given:
            usage = parser.format_usage().removeprefix("usage: ").strip()
            raise UserError(f"--{key}: must be given" + (f"; usage: {usage}" if key in positionals else ""))
    config = convert(command, parser, given)
    if "print_config" in keys:
        print(dump(command, config), end="")
        return None
    arguments = parser.instantiate(config)
    return {parameter: arguments[parameter] for parameter in command.parameters}


def merge(command: Command, layers: list[list[Pair]]) -> dict[str, Given]:
    """Merge the layers; later layers override earlier ones.

    A layer that chooses another class drops earlier options of the previous class, because they do not exist or have
    another meaning in the new one.
    """
    merged: dict[str, Given] = {}
    for layer in layers:
        for key, given in layer:
            if key in command.choices:
                chosen = choose(command, key, given)
                if chosen is not command.chosen[key]:
                    merged = {k: v for k, v in merged.items() if not k.startswith(f"{key}.")}
                command.chosen[key] = chosen
        merged |= {key: given for key, given in layer if key not in command.choices}
    return merged


def without_nulls(command: Command, given: dict[str, Given]) -> dict[str, Given]:
    """Drop each null of a YAML file whose option does not take null: it stands for the default."""
    known = command.options()
    return {k: v for k, v in given.items() if not v.is_null or k not in known or takes_null(known[k])}


# ---- classes to choose from


def subclasses(base: type) -> dict[str, type]:
    """The subclasses of ``base`` that its package exports, by name."""
    package = importlib.import_module(base.__module__.rpartition(".")[0])
    exported = [getattr(package, name) for name in package.__all__]
    return {c.__name__: c for c in exported if inspect.isclass(c) and issubclass(c, base) and not inspect.isabstract(c)}


def choose(command: Command, key: str, given: Given) -> type:
    """Return the class for ``--data NAME``: one of toolkit's, or a user-provided class by its full path."""
    known, text = command.choices[key], given.text
    if not text:
        raise UserError(f"--{key}: needs a value: {', '.join(known)}")
    short = {f"{c.__module__}.{c.__name__}": c for c in known.values()} | known
    if text in short:
        return short[text]
    module, _, name = text.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError, ValueError):
        found = None
    if not (inspect.isclass(found) and issubclass(found, command.hints[key])):
        near = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        raise UserError(f"{given.named(key)}: no such class{near}")
    return found


# ---- checks and conversion


def check_names(command: Command, given: dict[str, Given]) -> None:
    """Raise UserError for the first option that is unknown or has no value; a flag without a value means true."""
    known = command.options()
    for key, value in list(given.items()):
        inside = key.rsplit(".", 1)[0]
        if key in known or get_origin(strip_none(known.get(inside))) is dict:  # --optimizer.options.momentum 0.9
            if value.text is None and known.get(key) is bool:  # --verify
                given[key] = value._replace(text="true")
            elif value.text is None:
                raise UserError(f"--{key}: needs a value: {describe(known.get(key, Any))}")
        else:
            names = known if value.source else [*known, *COMMON_OPTIONS]
            hint = other_class_hint(command, key) or suggest(key, names, "" if value.source else "--")
            raise UserError(f"{value.named(key)}: no such option{hint}")


def other_class_hint(command: Command, key: str) -> str:
    """Return a hint if another class has this option, such as data.train_data_path of TextFiles."""
    group, _, name = key.partition(".")
    classes = [c for c, cls in command.choices.get(group, {}).items() if name in parameters_of(cls)]
    if not classes:
        return ""
    chosen = f" of --{group} {command.chosen[group].__name__}"
    return f"{chosen}; add --{group} {classes[0]}" if len(classes) == 1 else f"{chosen}; {', '.join(classes)} have it"


def check_paths(command: Command, given: dict[str, Given]) -> None:
    """Raise UserError for a URL in place of a path; user-provided data classes may accept URLs."""
    for key, value in given.items():
        group = key.partition(".")[0]
        if command.chosen.get(group) in (None, *command.choices.get(group, {}).values()):
            require_local(f"{value.source}: {key}" if value.source else f"--{key}", value.text)


def convert(command: Command, parser: Any, given: dict[str, Given]) -> Any:
    """Convert the texts with jsonargparse; its errors become one line."""
    known = command.options()
    words = [f"--{key}={expand_integer(value.text or '', known.get(key))}" for key, value in given.items()]
    try:
        return parser.parse_args(words)
    except argparse.ArgumentError as error:
        message = " ".join(str(error).split())
        named = re.search(r'[Kk]ey "([^"]+)"', message)
        key = named[1] if named else ""
        if key not in given:
            raise UserError(message) from error
        kind = known[key]
        options = [a for a in literals(kind) if isinstance(a, str)]
        raise UserError(
            f"{given[key].named(key)}: must be {describe(kind)}{did_you_mean(given[key].text or '', options)}"
        ) from error


def expand_integer(text: str, kind: Any) -> str:
    """Return ``1000000`` for ``1e6`` if the option is an integer."""
    kinds = get_args(kind) or (kind,)
    if int in kinds and float not in kinds and re.fullmatch(r"[+-]?\d[\d_]*(\.\d*)?([eE][+-]?\d+)?", text):
        number = float(text)
        if number.is_integer() and abs(number) < 2**53:
            return str(int(number))
    return text


def strip_none(kind: Any) -> Any:
    """Return ``X`` for ``X | None``."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [a for a in get_args(kind) if a is not type(None)]
        return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007  (made at run time)
    return kind


def takes_null(kind: Any) -> bool:
    return kind in (None, Any, type(None)) or any(takes_null(a) for a in get_args(kind) if get_origin(kind) is not dict)


def literals(kind: Any) -> tuple[Any, ...]:
    kind = strip_none(kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def describe(kind: Any) -> str:
    """Describe the values of a type for messages."""
    kind = strip_none(kind)
    if allowed := literals(kind):
        return f"one of {', '.join(map(str, allowed))}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} such as [0.9, 0.95]"
    if get_origin(kind) is dict or kind is dict:
        return """a mapping such as '{"name": 1}'"""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(a) for a in get_args(kind))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(kind, f"a value of type {getattr(kind, '__name__', kind)}")


# ---- help and print_config


def build_parser(command: Command, positionals: tuple[str, ...]) -> Any:
    """Build jsonargparse's parser for ``setup``; each chosen class is an option group."""
    from jsonargparse import SUPPRESS, ArgumentParser

    required = command.required()
    words = [p.upper() if p in required else f"[{p.upper()}]" for p in positionals]
    about = (inspect.getdoc(command.setup) or "").partition("\nArgs:")[0].strip()
    parser = ArgumentParser(
        prog=f"toolkit {command.name}",
        usage=" ".join([f"toolkit {command.name}", *words, "[--option value ...]"]),
        description=about,
        exit_on_error=False,
    )
    help_only = {"action": "store_true", "default": SUPPRESS}  # parse() has removed these options already
    parser.add_argument("--config FILE", **help_only, help="YAML file of options; flags override it. May be repeated.")
    parser.add_argument("--print_config", **help_only, help="Print all options as YAML and exit.")
    parser.add_function_arguments(command.setup, skip=set(command.choices), as_group=False, as_positional=False)
    for name, chosen in command.chosen.items():
        parser.add_class_arguments(chosen, name, instantiate=True)
        default = command.parameters[name].default
        if type(default) is chosen:
            parser.set_defaults({f"{name}.{k}": v for k, v in vars(default).items()})
    for action in parser._actions:
        if action.dest in command.groups:
            action.help = SUPPRESS  # jsonargparse's option to read a group from a file
        elif action.dest in command.chosen:
            action.metavar = "NAME"
            kinds = ", ".join(command.choices[action.dest])
            action.help = f"Class: {kinds}. `--{action.dest} NAME --help` shows its options."
    return parser


def dump(command: Command, config: Any) -> str:
    """Return all options as YAML; ``toolkit SUB --config`` with it gives the same configuration."""
    import json

    import yaml

    values = json.loads(json.dumps(config.as_dict()))  # tuples become lists
    for name, chosen in command.chosen.items():
        is_known = chosen in command.choices[name].values()
        path = chosen.__name__ if is_known else f"{chosen.__module__}.{chosen.__name__}"
        values[name] = {"class_path": path, "init_args": values.get(name, {})}
    ordered = {name: values[name] for name in command.parameters if name in values}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)
