"""Options as Python objects: names and types are checked against the signature of a function."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from toolkit.errors import UserError, did_you_mean
from toolkit.paths import require_local


def read_options(setup: Callable[..., None], given: dict[str, Any]) -> dict[str, Any]:
    """Check names and types against those of ``setup``'s parameters, and fill in its defaults.

    Args:
        setup: A function with typed parameters; dataclass parameters are groups.
        given: Values by name; groups as dictionaries or dataclasses, paths as strings or path objects.

    Raises:
        UserError: an unknown name, with a suggestion, or a value of the wrong type.
    """
    hints, parameters = get_type_hints(setup), inspect.signature(setup).parameters
    groups = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    for name in given:
        if name not in parameters:
            owner = next((group for group, cls in groups.items() if name in {f.name for f in fields(cls)}), None)
            group_hint = f"; did you mean {owner}={{{name!r}: ...}}?"
            raise UserError(f"{name}: no such option{group_hint if owner else did_you_mean(name, parameters)}")
    values = {}
    for name, parameter in parameters.items():
        value = given.get(name, parameter.default)
        if name in groups:
            values[name] = read_group(name, groups[name], value)
        else:
            values[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
            _require_type(name, values[name], hints[name])
            require_local(name, values[name])
    return values


def read_group(name: str, cls: type, value: Any) -> Any:
    """Create the dataclass ``cls`` from a dictionary or an instance, and validate it."""
    values, hints = as_mapping(name, value), get_type_hints(cls)
    for key, inner in values.items():
        if key not in hints:
            raise UserError(f"{name}.{key}: no such option{did_you_mean(str(key), hints)}")
        _require_type(f"{name}.{key}", inner, hints[key])
    return cls(**values)


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if is_dataclass(value) and not inspect.isclass(value):
        return vars(value)
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise UserError(f"{name} {kind}: must be a group of options, as a dictionary such as {{'name': value}}")
    return value


def _require_type(name: str, value: Any, hint: Any) -> None:
    if not fits(value, hint):
        choices = _choices(hint)
        near = did_you_mean(value, [c.strip("'") for c in choices]) if isinstance(value, str) else ""
        raise UserError(f"{name} {value!r}: must be {' or '.join(choices)}{near}")


def _choices(hint: Any) -> list[str]:
    """Describe the values of a type for messages."""
    if get_origin(hint) in (Union, types.UnionType):
        return [choice for part in get_args(hint) for choice in _choices(part)]
    if get_origin(hint) is Literal:
        return [repr(value) for value in get_args(hint)]
    return ["None"] if hint is type(None) else [inspect.formatannotation(hint)]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an option."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple | list) and len(value) == len(parts) and all(map(fits, value, parts))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, origin or hint)
