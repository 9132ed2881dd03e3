"""Collect a command's options by dotted name, and convert their values to arguments of its ``setup`` function.

jsonargparse resolves the signature and converts the values. The rest is done here: jsonargparse's result depends on the
order of files, classes and flags, it keeps the options of a replaced class, and its errors take many lines.
"""

import inspect
import json
import os
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from toolkit.config.classes import classes_of, kind_of, parameters_of
from toolkit.config.entries import with_entry
from toolkit.config.other_tools import CLASS_HINTS, VALUE_HINTS, suggest_option
from toolkit.config.types import describe, expand_integer, is_restricted, limits, union_members
from toolkit.errors import UserError, did_you_mean, one_line
from toolkit.extension import NO_GROUPS, add_extensions, import_object, load_registered, registered
from toolkit.io.paths import mask_url, require_folder, require_local
from toolkit.io.safe_parse import parse_yaml

_URL_OPTIONS = ("checkpoint_dir", "initial_checkpoint_dir", "base_checkpoint_dir", "resume")  # may be URLs
COMMON_OPTIONS = ("help", "config", "print_config", "extensions")  # of every command


class Option(NamedTuple):
    kind: Any  # the type
    default: Any
    doc: str
    is_required: bool


class OptionValue(NamedTuple):
    """A user's value of an option. ``source`` is "" for a flag, None for Python, otherwise the YAML file."""

    source: str | None
    value: Any

    def display(self, key: str) -> str:
        """Return the option as shown in messages: flag, or file and key, then the value."""
        if re.search(r"(?i)(token|secret|password|passwd|api_key)$", key):
            return f"{key if self.source is None else f'--{key}'} ***"
        text = mask_url(self.text) if "://" in self.text else self.text
        if self.source is None:
            return f"{key} {(self.value if text == self.text else text)!r}"
        if self.source:
            return f"{self.source}: {key}: {text}"
        return f"--{key} {'' if self.value is None else text}".rstrip()

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else json.dumps(self.value, default=str)


def parse_object(setup: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``setup`` from Python values by name.

    Groups may be dictionaries or dataclasses. Paths may be strings or path objects. Class options are objects.
    """
    values = dict(values)
    add_extensions(values.pop("extensions", None), "extensions")
    command = CommandOptions(setup)
    objects = {name: values.get(name, command.parameters[name].default) for name in command.class_options}
    for name, value in objects.items():
        if not isinstance(value, base := command.class_options[name]):
            raise UserError(f"{name} {value!r}: must be an instance of {base.__name__}")
    command.selected = {}
    command.update(command.flatten({n: v for n, v in values.items() if n not in objects}, None))
    return command.arguments(command.resolve()) | objects


class CommandOptions:
    """The options of a command, the selected classes, and the user's values.

    With two ``functions``, the first takes the second's arguments as ``run``. If both have a parameter with the same
    name, the first function's is used. Parameters are scalars, dataclasses (option groups; fields of flat groups have
    no prefix), and abstract base classes (class options).
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.functions = functions
        self.parameters = {n: p for function in reversed(functions) for n, p in parameters_of(function).items()}
        self.flat = {n: p.annotation for n, p in self.parameters.items() if getattr(p.annotation, "is_flat", False)}
        for name, cls in self.flat.items():
            del self.parameters[name]
            self.parameters |= parameters_of(cls)
        self.extension_groups: dict[str, type] = {}
        # ``run`` and ``groups`` hold options, but are not options
        self.holders = {name for name, p in self.parameters.items() if p.default is NO_GROUPS}
        for name in self.holders:
            del self.parameters[name]
        if "groups" in self.holders:
            kind, extension_names = "option_groups", registered("option_groups", self.parameters)
            self.extension_groups = {name: load_registered(kind, name) for name in extension_names}
            for name, cls in self.extension_groups.items():
                if not is_dataclass(cls) or any(
                    p.default is inspect.Parameter.empty for p in parameters_of(cls).values()
                ):
                    raise UserError(
                        f"extension {extension_names[name].origin}: {kind} {name}: must be a dataclass with defaults"
                    )
        for name, cls in self.extension_groups.items():
            self.parameters[name] = SimpleNamespace(annotation=cls, default=cls(), doc=inspect.getdoc(cls))
        self.class_options = {n: p.annotation for n, p in self.parameters.items() if inspect.isabstract(p.annotation)}
        groups = {n: p.annotation for n, p in self.parameters.items() if is_dataclass(p.annotation)}
        self.groups: dict[str, Any] = groups
        self.selected = {name: type(self.parameters[name].default) for name in self.class_options}
        self.values: dict[str, OptionValue] = {}
        self.problems: list[str] = []
        """Messages about YAML files, reported together."""

    def options(self) -> dict[str, Option]:
        """Return every option by dotted name."""
        options: dict[str, Option] = {}
        for name, parameter in self.parameters.items():
            cls: Any = self.selected.get(name) or self.groups.get(name)
            is_default = cls is type(parameter.default)
            for key, p in ({"": parameter} if cls is None else parameters_of(cls)).items():
                is_required = p.default is inspect.Parameter.empty and not (key and is_default)
                default = getattr(parameter.default, key, p.default) if key and is_default else p.default
                options[f"{name}.{key}".rstrip(".")] = Option(p.annotation, default, p.doc or "", is_required)
        return options

    def choices(self, name: str) -> dict[str, type]:
        """Return the classes for a parameter by short name, see :func:`classes_of`."""
        return classes_of(self.class_options[name])

    def has_choice(self, name: str) -> bool:
        """Whether several classes are known for a parameter, or a user-provided class is selected."""
        return [self.selected[name]] != list(self.choices(name).values())

    # ---- user values

    def flatten(self, values: Mapping[str, Any], source: str | None) -> Iterator[tuple[str, OptionValue]]:
        """Yield the values of a YAML file or of Python by dotted name.

        A class option is a mapping with ``class_path`` and ``init_args``, only a class name, or only options.
        """
        for key, value in values.items():
            if key in self.class_options and isinstance(value, dict):
                value = dict(value)
                if "class_path" in value:
                    yield key, OptionValue(source, value.pop("class_path"))
                prefix = f"{source}: " if source else ""
                value = {**as_mapping(f"{prefix}{key}.init_args", value.pop("init_args", None) or {}), **value}
            elif key in self.groups and source is None:
                value = as_mapping(key, value)
            is_group = key in self.groups or key in self.class_options
            if is_group and isinstance(value, Mapping):
                # copies, because jsonargparse converts the values of a dictionary in place
                pairs = {option: dict(inner) if isinstance(inner, dict) else inner for option, inner in value.items()}
                yield from ((f"{key}.{option}", OptionValue(source, inner)) for option, inner in pairs.items())
            elif key not in self.groups:
                yield str(key), OptionValue(source, os.fspath(value) if isinstance(value, os.PathLike) else value)
            elif value is not None:
                is_named = isinstance(value, str) and isinstance(getattr(self.groups[key], "name", None), str)
                hint = f", such as {key}.name: {value}" if is_named else ""
                problem = f"{OptionValue(source, value).display(key)}: must be a group of `name: value` pairs{hint}"
                if not source:
                    raise UserError(problem)
                self.problems.append(problem)

    def update(self, layer: Iterable[tuple[str, OptionValue]]) -> None:
        """Merge values, which override earlier ones.

        Selecting another class drops the previous class's options, because the new class may lack them or give them
        another meaning.
        """
        layer = list(layer)
        for key, value in layer:
            if key not in self.class_options:
                continue
            try:
                cls = self._select_class(key, value)
            except UserError as error:
                if not value.source:
                    raise
                self.problems.append(str(error))
                layer = [(k, v) for k, v in layer if not k.startswith(f"{key}.")]
                continue
            if cls is not self.selected[key]:
                self.values = {k: v for k, v in self.values.items() if not k.startswith(f"{key}.")}
                self.selected[key] = cls
        self.values |= {key: value for key, value in layer if key not in self.class_options}

    def _select_class(self, key: str, value: OptionValue) -> type:
        """Return the class for ``--data NAME``: one of toolkit's, or a user-provided class by its full path."""
        choices = self.choices(key)
        if not value.value:
            raise UserError(f"--{key}: needs a value: {', '.join(choices)}")
        module, _, name = value.text.rpartition(".")
        try:
            cls = import_object(value.text) if module else choices.get(name)
        except (ImportError, AttributeError, ValueError):
            cls = None
        if cls is None and name in registered(kind := kind_of(self.class_options[key])):
            cls = load_registered(kind, name)  # says why it does not import
        if cls is not None and not (inspect.isclass(cls) and issubclass(cls, self.class_options[key])):
            raise UserError(f"{value.display(key)}: must be a class derived from {self.class_options[key].__name__}")
        if cls is None:
            hint = None if module else CLASS_HINTS.get(name)
            near = hint or did_you_mean(name, choices, cutoff=0.65) or f"; known are {', '.join(choices)}"
            raise UserError(f"{value.display(key)}: no such class{near}")
        return cls

    # ---- checks and conversion

    def resolve(self, usage: str = "") -> Namespace:
        """Return the checked and converted values of all options; ``usage`` is for messages."""
        options = self.options()
        self._merge_into_mappings(options)
        if problems := self.problems + self._describe_unknown(options):
            raise UserError(" | ".join(problems))
        for key in list(self.values):
            self._check(key, options)
        for key, option in options.items():
            if option.is_required and key not in self.values:
                hint = f"; usage: {usage}" if key.upper() in usage.split() else ""
                raise UserError(f"--{key}: must be given{hint}")
        self._parser = self._build_parser()
        try:
            if any(value.source is None for value in self.values.values()):
                return self._parser.parse_object(Namespace({key: value.value for key, value in self.values.items()}))
            else:
                kinds = {key: options[key].kind if key in options else None for key in self.values}
                texts = {key: expand_integer(value.text, kinds[key]) for key, value in self.values.items()}
                return self._parser.parse_args([f"--{key}={text}" for key, text in texts.items()])
        except ArgumentError as error:
            raise UserError(self._explain(error, options, usage)) from error

    def arguments(self, config: Namespace) -> dict[str, Any]:
        """Return the arguments for the functions, with groups and choices as objects."""
        ready = vars(self._parser.instantiate(config))
        plain = (
            self.parameters.keys() - self.groups.keys() - self.class_options.keys()
        )  # other values may look like a class to instantiate
        ready |= {name: value for name, value in config.as_dict().items() if name in plain}
        for values in (ready, *(vars(value) for value in ready.values() if is_dataclass(value))):
            # restricted numbers have special classes, which YAML does not write
            values |= {key: value._type(value) for key, value in values.items() if is_restricted(type(value))}
        arguments = {name: ready[name] for name in self.parameters if name in ready}
        for name, cls in self.flat.items():
            arguments[name] = cls(**{key: arguments.pop(key) for key in parameters_of(cls)})
        if "groups" in self.holders:
            arguments["groups"] = {name: arguments.pop(name) for name in self.extension_groups}
        if len(self.functions) > 1:  # the second function's arguments become ``run``
            own_parameters = inspect.signature(self.functions[0]).parameters
            arguments["run"] = {name: arguments.pop(name) for name in [*arguments] if name not in own_parameters}
        return arguments

    def _merge_into_mappings(self, options: Mapping[str, Option]) -> None:
        """Set entries of mapping options, such as --data.sources.web.weight, in the mapping's earlier value."""
        mappings = [
            name for name in options if get_origin(union_members(options[name].kind)[0]) is dict and name in self.values
        ]
        for key, name in [(key, name) for name in mappings for key in self.values if key.startswith(f"{name}.")]:
            path = key.removeprefix(f"{name}.").split(".")
            if len(path) > 1:  # jsonargparse sets entries themselves
                entry = self.values.pop(key)
                value = parse_yaml(entry.text) if entry.source == "" else entry.value
                changed = with_entry(self.values[name].value, path, value, entry.display(key))
                self.values[name] = self.values[name]._replace(value=changed)

    def _build_parser(self) -> ArgumentParser:
        parser, added = ArgumentParser(exit_on_error=False), {*self.class_options, *self.flat, *self.holders}
        for function in self.functions:
            added |= set(parser.add_function_arguments(function, skip=set(added), as_group=False))
        for cls in self.flat.values():
            parser.add_class_arguments(cls, as_group=False, instantiate=False)
        for name, cls in (self.extension_groups | self.selected).items():
            parser.add_class_arguments(cls, name)
            if type(default := self.parameters[name].default) is cls:
                parser.set_defaults({f"{name}.{key}": value for key, value in vars(default).items()})
        return parser

    def _check(self, key: str, options: dict[str, Option]) -> None:
        """Raise UserError for a missing value, or for a URL where a local path is required.

        A boolean flag without a value means true. null means the default if the type does not allow null.
        """
        value, kind = self.values[key], options[key].kind if key in options else Any
        group = key.partition(".")[0]
        if value == OptionValue("", None):
            if kind is not bool:
                raise UserError(f"--{key}: needs a value: {describe(kind)}")
            self.values[key] = OptionValue("", "true")
        elif value.value is None and not {None, type(None), Any} & {kind, *get_args(kind)}:
            del self.values[key]
        elif self.selected.get(group) in (None, *(self.choices(group).values() if group in self.class_options else ())):
            prefix = f"{value.source}: " if value.source else "--" if value.source == "" else ""
            may_be_remote = key in _URL_OPTIONS or (key == "out_dir" and "train" in self.groups)  # of a run
            owner = self.selected.get(group, self.functions[0])
            if key.rpartition(".")[2] not in getattr(owner, "takes_urls", ()):
                check = require_folder if may_be_remote else require_local
                check(f"{prefix}{key}", value.value)  # user-provided classes may accept URLs

    def _describe_unknown(self, options: dict[str, Option]) -> list[str]:
        """Describe the unknown options of YAML files, which may be another tool's. Raise UserError for others.

        Their values are not shown: a misspelled name may have a secret.
        """
        unknown: dict[str, dict[str, list[str]]] = {}
        for key, value in self.values.items():
            inside = key.rpartition(".")[0]
            if key in options or (inside in options and get_origin(union_members(options[inside].kind)[0]) is dict):
                continue
            hint = self._suggest(key, value.source, options)
            if not value.source:
                raise UserError(f"{'--' * (value.source == '')}{key}: no such option{hint}")
            unknown.setdefault(value.source, {}).setdefault(hint, []).append(key)

        return [  # a file is named once, because the length of a line is bounded
            f"{source}: "
            + " | ".join(
                f"{', '.join(keys)}: no such option{'s' * (len(keys) > 1)}{hint}" for hint, keys in keys_by_hint.items()
            )
            for source, keys_by_hint in unknown.items()
        ]

    def _suggest(self, key: str, source: str | None, options: dict[str, Option]) -> str:
        """Return a hint for an unknown option, such as ``; did you mean --train.max_steps?``."""
        group, _, last = key.rpartition(".")
        choices = self.choices(group) if group in self.class_options else {}
        if matches := [name for name, cls in choices.items() if last in inspect.signature(cls).parameters]:
            hint = f"add --{group} {matches[0]}" if len(matches) == 1 else f"{', '.join(matches)} have it"
            return f" of --{group} {self.selected[group].__name__}; {hint}"

        def show(option: str) -> str:
            option_group, _, name = option.rpartition(".")
            in_python = repr(name) if option_group == group else f"{option_group}={{{name!r}: ...}}"
            return in_python if source is None else option if source else f"--{option}"

        if hint := suggest_option(key, {*options, *self.class_options}, show):
            return hint
        names = options if source != "" else [*options, *COMMON_OPTIONS]
        compared = str if group else lambda option: option.rpartition(".")[2]
        return did_you_mean(key, names, cutoff=0.75, margin=0.05, normalize=compared, display=show) or "; see --help"

    def _explain(self, error: ArgumentError, options: dict[str, Option], usage: str) -> str:
        """Convert jsonargparse's error to one line with option, value and valid values."""
        message = one_line(error)
        named = re.search(r'[Kk]ey "([^"]+)"', message)
        key = named[1] if named else ""
        if key not in self.values:
            return message
        value, kinds = self.values[key], union_members(options[key].kind)
        for kind in filter(is_restricted, kinds):
            try:
                number = kind._type(expand_integer(value.text, options[key].kind))
            except ValueError:
                continue
            must = "not be negative" if kind._expression == "v>=0" else f"be {limits(kind)}"
            return f"{value._replace(value=number).display(key)}: must {must}"
        names = [a for kind in kinds if get_origin(kind) is Literal for a in get_args(kind) if isinstance(a, str)]
        hint = VALUE_HINTS.get((key, value.text.lower())) or did_you_mean(value.text, names, cutoff=0.55)
        is_positional = key.upper() in usage.split()
        shown = value.display(key).removeprefix("--" if is_positional else "")
        return f"{shown}: must be {describe(options[key].kind)}{hint}"


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Convert an option group from Python, a dictionary or dataclass, to a mapping."""
    if is_dataclass(value) and not inspect.isclass(value):
        return vars(value)
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise UserError(f"{name} {kind}: must be a group of options, as a dictionary such as {{'name': value}}")
    return value
