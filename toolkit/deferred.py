"""Packages whose ``__init__`` runs at the first use of a name from it, although their modules are imported before.

``import lightning.fabric`` first imports the whole of ``lightning``: its Trainer, torchmetrics and with it SciPy and
transformers, half of the time that a process needs to start. The run needs none of them.
"""

import sys
from importlib import util
from types import ModuleType
from typing import Any

PACKAGES = ("lightning", "torchmetrics")


class _Deferred(ModuleType):
    _is_executed = False

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":  # Fabric compares it
            from importlib import metadata  # start-up time

            return metadata.version(self.__name__)
        # a package's own modules ask it for modules whose import has begun
        if name.startswith("__") or self._is_executed or f"{self.__name__}.{name}" in sys.modules:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._is_executed = True
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer(packages: tuple[str, ...]) -> None:
    """Let ``import package.module`` skip the package's ``__init__``, for packages that are not imported yet."""
    for name in packages:
        if name not in sys.modules and (spec := util.find_spec(name)) is not None:
            sys.modules[name] = module = _Deferred(name)
            vars(module).update(vars(util.module_from_spec(spec)))
