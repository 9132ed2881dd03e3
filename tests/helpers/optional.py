"""Optional packages of tests."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Later:
    """A package that is imported on first use: each worker collects all files, and runs a part of them."""

    def __init__(self, name: str) -> None:
        self.__dict__["__name__"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks every object of a module for such names
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


def importorskip_later(name: str) -> Any:
    """Skip the file without the package; else return the package, which is imported on first use."""
    if find_spec(name) is None:
        pytest.skip(f"needs {name}", allow_module_level=True)
    return Later(name)
