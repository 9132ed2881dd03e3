"""Collect a command's options by dotted name, and convert their values to arguments of its ``setup`` function.

jsonargparse resolves the signatures, and converts and checks values by type. The layers are merged here, because the
result must not depend on the order of files, classes and flags, nor keep options of a replaced class.
"""

import inspect
import os
import re
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from toolkit.config.classes import Option, classes_of, find_class, has_short_name, kind_of, parameters_of
from toolkit.config.other_tools import CLASS_HINTS, VALUE_HINTS, suggest_data, suggest_option
from toolkit.config.types import describe, expand_integer, is_mapping, is_restricted, limits, union_members
from toolkit.config.values import OptionValue, instantiate, with_entry
from toolkit.dotted_paths import import_object
from toolkit.errors import UserError, did_you_mean
from toolkit.extension import add_extensions, load_registered, registered
from toolkit.io.paths import expand_path, is_path_option, require_folder, require_local

_URL_OPTIONS = ("checkpoint_dir", "initial_checkpoint_dir", "base_checkpoint_dir", "resume")  # may be URLs
PATH_LISTS = ("run_dirs", "checkpoint_dirs")  # separated by commas
COMMON_OPTIONS = ("help", "config", "print_config", "extensions")  # of every command


def parse_object(setup: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``setup`` from Python values by name.

    Groups may be dictionaries or dataclasses. Paths may be strings or path objects. Class options are objects.
    """
    values = dict(values)
    add_extensions(values.pop("extensions", None), "extensions")
    command = CommandOptions(setup)
    objects = {name: values.pop(name, command.parameters[name].default) for name in command.class_options}
    for name, value in objects.items():
        if not isinstance(value, base := command.class_options[name]):
            raise UserError(f"{name} {value!r}: must be an instance of {base.__name__}")
    command.selected = {}
    command.update(command.flatten(values, None))
    return command.arguments(command.resolve() | objects)


class CommandOptions:
    """The options of a command, the selected classes, and the user's values.

    With two ``functions``, the first takes the second's ``options`` as ``run``. If both have a parameter with the same
    name, the first function's is used. A parameter ``training`` is another command line, which the caller adds to the
    arguments. Other parameters are scalars, dataclasses (option groups; fields of flat groups have no prefix), and
    abstract base classes (class options).
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.functions = functions
        # parameters that hold options, but are not options; a data class may have an option named "run"
        self.holders = ("run", "groups") if functions[1:] else ("training", "groups")
        parameters = flat_parameters(functions)
        self.parameters = {name: option for name, option in parameters.items() if name not in self.holders}
        self.extension_groups = self._load_extension_groups() if "groups" in parameters else {}
        for name, cls in self.extension_groups.items():
            self.parameters[name] = Option(cls, cls())
        kinds = {name: parameter.kind for name, parameter in self.parameters.items()}
        self.class_options = {name: kind for name, kind in kinds.items() if inspect.isabstract(kind)}
        self.groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
        self.selected = {name: type(self.parameters[name].default) for name in self.class_options}
        self.values: dict[str, OptionValue] = {}
        self.problems: list[str] = []
        """Messages about YAML files, reported together."""

    def _load_extension_groups(self) -> dict[str, type]:
        """Return the option groups of extensions by name."""
        kind = "option_groups"
        groups: dict[str, type] = {}
        for name, entry in registered(kind, self.parameters).items():
            cls: Any = load_registered(kind, name)
            groups[name] = cls
            has_defaults = not any(option.is_required for option in parameters_of(cls).values())
            if not (has_defaults and is_dataclass(cls)):
                raise UserError(f"extension {entry.origin}: {kind} {name}: must be a dataclass with defaults")
        return groups

    def options(self) -> dict[str, Option]:
        """Return every option by dotted name."""
        options: dict[str, Option] = {}
        for name, parameter in self.parameters.items():
            cls: Any = self.selected.get(name) or self.groups.get(name)
            if cls is None:
                options[name] = parameter
                continue
            has_default = cls is type(parameter.default)
            for key, option in parameters_of(cls).items():
                if has_default:
                    option = option._replace(default=getattr(parameter.default, key, option.default), is_required=False)
                options[f"{name}.{key}"] = option
        return options

    def choices(self, name: str) -> dict[str, type]:
        """Return the classes for a parameter by short name, see :func:`classes_of`."""
        return classes_of(self.class_options[name])

    def has_choice(self, name: str) -> bool:
        """Whether several classes are known for a parameter, or a user-provided class is selected."""
        return [self.selected[name]] != list(self.choices(name).values())

    def has_name(self, group: str) -> bool:
        """Whether the main option of a group is its name, such as optimizer.name."""
        return isinstance(getattr(self.groups.get(group), "name", None), str)

    # ---- user values

    def flatten(self, values: Mapping[str, Any], source: str | None) -> dict[str, OptionValue]:
        """Return the values of a flag's mapping, a YAML file or Python by dotted name.

        A class option is a mapping with ``class_path`` and ``init_args``, only a class name, or only options.
        """
        flat: dict[str, OptionValue] = {}
        prefix = f"{source}: " if source else ""

        def add(key: str, value: Any) -> None:
            if key in flat:
                raise UserError(f"{prefix}{key}: given twice; remove one")
            flat[key] = OptionValue(source, OptionValue(source, value).text if source == "" else value)

        for key, value in values.items():
            is_group, is_class = key in self.groups, key in self.class_options
            if is_class and isinstance(value, dict):
                inner = dict(value)
                if "class_path" in inner:
                    add(key, inner.pop("class_path"))
                value = {**as_mapping(f"{prefix}{key}.init_args", inner.pop("init_args", None) or {}), **inner}
            elif is_group and source is None:
                value = as_mapping(key, value)
            if (is_group or is_class) and isinstance(value, Mapping):
                for option, inner_value in value.items():
                    add(f"{key}.{option}", inner_value)
            elif not is_group:
                add(str(key), os.fspath(value) if isinstance(value, os.PathLike) else value)
            elif value is not None:
                hint = f", such as {key}.name: {value}" if isinstance(value, str) and self.has_name(key) else ""
                problem = f"{OptionValue(source, value).display(key)}: must be a group of `name: value` pairs{hint}"
                if not source:
                    raise UserError(problem)
                self.problems.append(problem)
        return flat

    def update(self, layer: Mapping[str, OptionValue]) -> None:
        """Merge values, which override earlier ones.

        Selecting another class drops the previous class's options, because the new class may lack them or give them
        another meaning.
        """
        added = {key: value for key, value in layer.items() if key not in self.class_options}
        for key in [key for key in self.class_options if key in layer]:
            try:
                cls = self._select_class(key, layer[key])
            except UserError as error:
                if not layer[key].source:
                    raise
                self.problems.append(str(error))
                added = {k: v for k, v in added.items() if not k.startswith(f"{key}.")}
            else:
                if cls is not self.selected[key]:
                    self.values = {k: v for k, v in self.values.items() if not k.startswith(f"{key}.")}
                self.selected[key] = cls
        self.values |= added

    def _select_class(self, key: str, value: OptionValue) -> type:
        """Return the class for ``--data NAME``: one of toolkit's, or a user-provided class by its full path."""
        base = self.class_options[key]
        if not value.value:
            raise UserError(f"--{key}: needs a value: {', '.join(self.choices(key))}")
        module, _, name = value.text.rpartition(".")
        try:
            cls = import_object(value.text) if module else find_class(base, name)
        except (ImportError, AttributeError, ValueError):
            cls = None
        entry = registered(kind := kind_of(base)).get(name)
        roots = ("", "toolkit", entry.path.partition(".")[0]) if entry else ()
        if cls is None and module.partition(".")[0] in roots:  # toolkit: where an older version had it
            cls = load_registered(kind, name)  # says why it does not import
        if cls is None:
            choices = self.choices(key)
            near = CLASS_HINTS.get(name) or did_you_mean(name, choices, cutoff=0.65)
            if key == "data" and os.path.exists(value.text):
                near = suggest_data(value.text) or near
            near = near or f"; known are {', '.join(choices)}"
            raise UserError(f"{value.display(key)}: no such class{near}")
        if not (inspect.isclass(cls) and issubclass(cls, base)):
            raise UserError(f"{value.display(key)}: must be a class derived from {base.__name__}")
        return cls

    # ---- checks and conversion

    def resolve(self, usage: str = "") -> dict[str, Any]:
        """Return the checked and converted values by parameter; groups and classes as {option: value}.

        ``usage`` is for messages.
        """
        options = self.options()
        self._merge_entries(options)
        if problems := self.problems + self._describe_unknown(options):
            raise UserError(" | ".join(problems))
        for key in [*self.values]:
            self._check(key, options[key].kind)
        for key, option in options.items():
            if option.is_required and key not in self.values:
                if key.upper() in usage.split():
                    raise UserError(f"{key.upper()}: must be given; usage: {usage}")
                raise UserError(f"--{key}: must be given")
        converted = {key: self._convert(key, options[key].kind, usage) for key in self.values}
        values: dict[str, Any] = {name: {} for name in self.parameters}
        for key, option in options.items():
            name, _, field = key.partition(".")
            owner, last = (values[name], field) if field else (values, name)
            owner[last] = converted.get(key, option.default)
        return values

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for the functions from resolved values, with groups and classes as objects."""
        ready = dict(values)
        for name, cls in (self.groups | self.selected).items():
            kinds = {key: option.kind for key, option in parameters_of(cls).items() if f"{name}.{key}" in self.values}
            ready[name] = cls(**values[name] | {key: instantiate(values[name][key], kinds[key]) for key in kinds})

        def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
            arguments: dict[str, Any] = {}
            for name, parameter in parameters_of(function).items():
                if name == "run" and name in self.holders:
                    arguments[name] = arguments_of(self.functions[1])["options"]
                elif name == "groups":
                    arguments[name] = {group: ready[group] for group in self.extension_groups}
                elif is_flat(parameter):
                    arguments[name] = parameter.kind(**arguments_of(parameter.kind))
                elif name in ready:
                    arguments[name] = ready[name]
            return arguments

        return arguments_of(self.functions[0])

    def _merge_entries(self, options: Mapping[str, Option]) -> None:
        """Set entries of mapping options, such as --data.sources.web.weight, in the mapping."""
        for name in [name for name, option in options.items() if is_mapping(option.kind)]:
            for key in [key for key in self.values if key.startswith(f"{name}.")]:
                entry, option = self.values.pop(key), options[name]
                default = {} if option.is_required else option.default or {}
                mapping = self.values.get(name, OptionValue(entry.source, default))
                changed = with_entry(mapping.value, key.removeprefix(f"{name}.").split("."), entry, key, option.kind)
                self.values[name] = mapping._replace(value=changed)

    def _check(self, key: str, kind: Any) -> None:
        """Raise UserError for a missing value, or for a URL where a local path is required.

        A boolean flag without a value means true. null means the default if the type does not allow null.
        """
        value = self.values[key]
        if value == OptionValue("", None):
            if kind is not bool:
                raise UserError(f"--{key}: needs a value: {describe(kind)}")
            self.values[key] = OptionValue("", "true")
            return
        if value.value is None and not {None, type(None), Any} & {kind, *get_args(kind)}:
            del self.values[key]
            return
        group, _, name = key.rpartition(".")
        owner: Any = self.selected.get(group, self.functions[0])
        if group in self.selected and not has_short_name(owner, self.class_options[group]):
            return  # a user-provided class may accept URLs
        if name not in getattr(owner, "takes_urls", ()):
            may_be_remote = key in _URL_OPTIONS or (key == "out_dir" and "data" in self.class_options)
            check = require_folder if may_be_remote else require_local
            check(value.name(key), value.value)

    def _convert(self, key: str, kind: Any, usage: str) -> Any:
        """Return the user's value as ``kind``. Raise UserError with option, value and valid values."""
        value = self.values[key]
        try:
            converted = value.convert(kind)
        except ArgumentError as error:
            text, kinds = value.text, union_members(kind)
            for limited in filter(is_restricted, kinds):
                try:
                    number = value._replace(value=limited._type(expand_integer(text, kind)))
                except ValueError:
                    continue
                must = "not be negative" if limited._expression == "v>=0" else f"be {limits(limited)}"
                raise UserError(f"{number.display(key)}: must {must}") from error
            names = [a for kind in kinds if get_origin(kind) is Literal for a in get_args(kind) if isinstance(a, str)]
            hint = VALUE_HINTS.get(f"{key}={text.lower()}") or did_you_mean(text, names, cutoff=0.55)
            if not hint and re.fullmatch(r"[\d.]+ *[A-Za-z]+", text):
                doc = " ".join(self.options()[key].doc.split()).partition(". ")[0]
                hint = f"; write it without a unit, a million as 1e6 ({doc.rstrip('.')})"
            shown = value.display(key).removeprefix("--" if key.upper() in usage.split() else "")  # positional
            raise UserError(f"{shown}: must be {describe(kind)}{hint}") from error
        if isinstance(converted, str) and (is_path_option(key) or key in PATH_LISTS):
            paths = converted.split(",") if key in PATH_LISTS else [converted]
            return ",".join(expand_path(value.name(key), path) for path in paths)
        return converted

    def _describe_unknown(self, options: dict[str, Option]) -> list[str]:
        """Describe the unknown options of YAML files, which may be another tool's. Raise UserError for others.

        Their values are not shown: a misspelled name may have a secret.
        """
        unknown: dict[str, dict[str, list[str]]] = {}
        for key in [key for key in self.values if key not in options]:
            source = self.values[key].source
            hint = self._suggest(key, source, options)
            if not source:
                raise UserError(f"{'--' * (source == '')}{key}: no such option{hint}")
            unknown.setdefault(source, {}).setdefault(hint, []).append(key)
        problems = []
        for source, keys_by_hint in unknown.items():  # a file is named once, because the length of a line is bounded
            parts = [f"{', '.join(k)}: no such option{'s' * (len(k) > 1)}{hint}" for hint, k in keys_by_hint.items()]
            problems.append(f"{source}: {' | '.join(parts)}")
        return problems

    def _suggest(self, key: str, source: str | None, options: dict[str, Option]) -> str:
        """Return a hint for an unknown option, such as ``; did you mean --train.max_steps?``."""
        group, _, last = key.rpartition(".")
        choices = self.choices(group) if group in self.class_options else {}

        def show(option: str) -> str:
            option_group, _, name = option.rpartition(".")
            in_python = repr(name) if option_group == group else f"{option_group}={{{name!r}: ...}}"
            return in_python if source is None else option if source else f"--{option}"

        if matches := [name for name, cls in choices.items() if last in inspect.signature(cls).parameters]:
            hint = f"add --{group} {matches[0]}" if len(matches) == 1 else f"{', '.join(matches)} have it"
            selected: Any = self.selected[group]
            paths = [f"{group}.{name}" for name in parameters_of(selected) if name.endswith("path")]
            if last.endswith("path") and paths and selected is not type(self.parameters[group].default):
                hint = f"did you mean {show(paths[0])}?"  # the user has chosen the class
            where = f"of --{group} {selected.__name__}" if selected in choices.values() else f"without --{group}"
            return f" {where}; {hint}"
        if hint := suggest_option(key, {*options, *self.class_options}, show):
            return hint
        if matches := [option for option in options if option.replace(".", "_") == key.replace("-", "_")]:
            return f"; did you mean {show(matches[0])}?"
        names = options if source != "" else [*options, *COMMON_OPTIONS]
        compared = str if group else lambda option: option.rpartition(".")[2]
        near = did_you_mean(key, names, cutoff=0.75, margin=0.05, normalize=compared, display=show)
        if not near and f"{group}.options" in options:
            near = f"; an option of the {group}'s class is set by {show(f'{group}.options.{last}')}"
        return near or "; see --help"


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Convert an option group from Python, a dictionary or dataclass, to a mapping."""
    if is_dataclass(value) and not inspect.isclass(value):
        return vars(value)
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise UserError(f"{name} {kind}: must be a group of options, as a dictionary such as {{'name': value}}")
    return value


def flat_parameters(functions: Sequence[Callable[..., Any]]) -> dict[str, Option]:
    """Return the parameters of functions by name, with the fields of flat groups instead of these."""
    parameters: dict[str, Option] = {}
    owners: list[Any] = [*reversed(functions)]
    for owner in owners:  # grows by the flat groups
        for name, parameter in parameters_of(owner).items():
            if is_flat(parameter):
                owners.append(parameter.kind)
            else:
                parameters[name] = parameter
    return parameters


def is_flat(parameter: Option) -> bool:
    """Whether a parameter is a group whose fields are options without a prefix."""
    return getattr(parameter.kind, "is_flat", False)
