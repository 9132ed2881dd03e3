"""Classes that options may name, and the parameters of a class or function as jsonargparse resolves them."""

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from jsonargparse._parameter_resolvers import get_signature_parameters  # see parameters_of

from toolkit.errors import UserError
from toolkit.extension import load_registered, registered


def classes_of(base: type) -> dict[str, type]:
    """Return {short name: class} for the subclasses of ``base`` that its package and extensions export."""
    package = importlib.import_module(base.__module__.rpartition(".")[0])
    exported = {name: getattr(package, name) for name in package.__all__}
    derived = {name: c for name, c in exported.items() if inspect.isclass(c) and issubclass(c, base)}
    classes = {name: cls for name, cls in derived.items() if not inspect.isabstract(cls)}
    for name in registered(kind := kind_of(base), list(classes)):
        with suppress(UserError):  # report an import error only if the class is chosen
            classes[name] = load_registered(kind, name)
    return classes


def kind_of(base: type) -> str:
    """Return the kind of extension of a base class: "data" for toolkit.data.base.DataModule."""
    return base.__module__.split(".")[-2]


def class_path(cls: type, base: type) -> str:
    """Return a class's name in options: the short name if there is one, otherwise the import path."""
    return cls.__name__ if cls in classes_of(base).values() else f"{cls.__module__}.{cls.__qualname__}"


class Option(NamedTuple):
    kind: Any  # the type
    default: Any
    doc: str
    is_required: bool


@functools.cache
def parameters_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Return the parameters of a function or class by name, including those forwarded through ``**kwargs``.

    Uses a private function of jsonargparse (tested with 4.53). The public API offers this only for parsers.
    """
    # jsonargparse converts a data module that is a default to a dictionary
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    if inspect.isclass(function) and is_dataclass(function):
        made = {field.name: field.default_factory for field in fields(function)}
        defaults |= {name: make() for name, make in made.items() if make is not MISSING}
    options = {}
    for p in get_signature_parameters(function, logger=False):
        kind = _resolve_annotation(function, p) if isinstance(p.annotation, str) else p.annotation
        default = defaults.get(p.name, p.default)
        options[p.name] = Option(kind, default, p.doc or "", default is inspect.Parameter.empty)
    return options


def _resolve_annotation(function: Callable[..., Any], parameter: Any) -> Any:
    """Return the type of a parameter. jsonargparse leaves postponed annotations in classes derived from a dataclass."""
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    for owner in inspect.getmro(function) if inspect.isclass(function) else (function,):
        with suppress(NameError, AttributeError, TypeError, SyntaxError):
            return get_type_hints(holder, vars(importlib.import_module(owner.__module__)))[parameter.name]
    name, kind = f"{function.__module__}.{function.__qualname__}", parameter.annotation
    raise UserError(f"{name}: type {kind} of {parameter.name} has no value; import it outside `if TYPE_CHECKING`")
