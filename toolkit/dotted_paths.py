"""Import objects by their dotted paths."""

import importlib
import os
import sys
from typing import Any

from toolkit.errors import UserError, one_line


def add_cwd_to_path() -> None:
    """Add the current folder to sys.path. For a console script, sys.path lacks it."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def load_object(path: str, what: str) -> Any:
    """Import an object by dotted path; if that fails, raise a UserError that begins with ``what`` and says why."""
    try:
        return import_object(path)
    except Exception as error:  # third-party code can raise anything
        error_type = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        hint = "; install it, or start in its folder" if isinstance(error, ModuleNotFoundError) else ""
        raise UserError(f"{what}: {error_type}{one_line(error)}{hint}") from error


def import_object(path: str) -> Any:
    """Import an object by dotted path: ``module.name`` or a module."""
    module, _, name = path.rpartition(".")
    if not module:
        return _import(path)
    try:
        imported = _import(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            raise ModuleNotFoundError(f"there is no module {module}", name=error.name) from error
        raise
    if hasattr(imported, name):
        return getattr(imported, name)
    try:
        return _import(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise AttributeError(f"{module} has no {name}") from error


def _import(module: str) -> Any:
    if module.startswith("."):  # relative imports are a TypeError
        raise ModuleNotFoundError(f"there is no module {module}", name=module)
    try:
        return importlib.import_module(module)
    except SystemExit as error:
        raise ImportError(f"{module} calls sys.exit({error.code!r}) when it is imported") from error
    except BaseException as error:
        if isinstance(error, Exception | KeyboardInterrupt):
            raise
        raise ImportError(f"{module} raises {type(error).__name__} when it is imported: {one_line(error)}") from error
