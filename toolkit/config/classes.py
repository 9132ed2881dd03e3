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

from toolkit.dotted_paths import import_object
from toolkit.errors import UserError
from toolkit.extension import load_registered, registered


def class_names(base: type) -> list[str]:
    """Return the short names of the subclasses of ``base`` that its package and extensions offer, importing none."""
    builtin = _builtin_classes(base)
    extra = registered(kind_of(base), builtin)
    builtin = builtin | {name: entry.path for name, entry in extra.items() if entry.origin == "toolkit"}
    return sorted(builtin, key=lambda name: (not name.isupper(), name)) + [n for n in extra if n not in builtin]


def find_class(base: type, name: str) -> type | None:
    """Import and return the class with a short name; None if the name is unknown or the import fails."""
    builtin = _builtin_classes(base)
    with suppress(UserError):  # report an import error only if the class is chosen
        if name in builtin:
            return import_object(builtin[name])
        if name in registered(kind := kind_of(base), builtin):
            return load_registered(kind, name)
    return None


def classes_of(base: type) -> dict[str, type]:
    """Import all subclasses of ``base`` with a short name, and return them by name."""
    classes = {name: find_class(base, name) for name in class_names(base)}
    return {name: cls for name, cls in classes.items() if cls is not None}


def has_short_name(cls: type, base: type) -> bool:
    """Whether a class is one of toolkit or of an extension, which its name selects."""
    return cls.__name__ in class_names(base) and find_class(base, cls.__name__) is cls


def kind_of(base: type) -> str:
    """Return the kind of extension of a base class: "data" for toolkit.data.base.DataModule."""
    return base.__module__.split(".")[-2]


def _builtin_classes(base: type) -> dict[str, str]:
    """Return the dotted paths of the classes that the package of ``base`` offers, by name."""
    return importlib.import_module(base.__module__.rpartition(".")[0]).CLASSES


def class_path(cls: type, base: type) -> str:
    """Return a class's name in options: the short name if there is one, otherwise the import path."""
    return cls.__name__ if has_short_name(cls, base) else f"{cls.__module__}.{cls.__qualname__}"


class Option(NamedTuple):
    kind: Any = None  # the type
    default: Any = None
    doc: str = ""
    is_required: bool = False


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
