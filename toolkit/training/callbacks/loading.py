"""Create callbacks from class paths, for ``--callbacks`` and YAML files."""

import inspect
import sys
from typing import Any

from toolkit.errors import UserError, one_line
from toolkit.extension import add_cwd_to_path, import_object, load_registered, registered
from toolkit.training.hyperparameters import callback_entries
from toolkit.training.run import Callback


def load_callbacks(value: str | list[Any] | None) -> list[Callback]:
    """Create the callbacks of ``--callbacks``: class paths or names from extensions, optionally with ``init_args``.

    Modules may be in the current folder.
    """
    return [_load(entry) for entry in callback_entries(value)]


def _load(entry: Any) -> Callback:
    if isinstance(entry, str):
        entry = {"class_path": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("class_path"), str):
        raise UserError(
            f"--callbacks {entry}: must be a class path such as my_module.MyCallback, or a mapping with class_path and "
            "init_args"
        )
    path, arguments = entry["class_path"], entry.get("init_args") or {}
    cls = _import(path)
    if not (inspect.isclass(cls) and issubclass(cls, Callback)):
        raise UserError(f"--callbacks {path}: must be a class derived from toolkit.Callback")
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise UserError(f"--callbacks {path}: {error}; set arguments with init_args") from error
    return cls(**arguments)


def _import(path: str) -> Any:
    if path in registered("callbacks"):
        return load_registered("callbacks", path)
    module = path.rpartition(".")[0] or path
    add_cwd_to_path()
    try:
        return import_object(path)
    except Exception as error:  # the module may raise any
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if is_missing or module in sys.modules:
            problem = "no such class in the current folder or an installed package"
        else:
            problem = f"its module does not import: {type(error).__name__}: {one_line(error)}"
        raise UserError(f"--callbacks {path}: {problem}") from error
