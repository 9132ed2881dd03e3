"""Create callbacks from class paths, for ``--callbacks`` and YAML files."""

import inspect
from typing import Any

from toolkit.errors import UserError
from toolkit.extension import add_cwd_to_path, import_object, load_registered, registered
from toolkit.planning.run_args import callback_entries
from toolkit.training.callbacks.base import Callback


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
    module = path.rpartition(".")[0]
    add_cwd_to_path()
    try:
        return import_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ImportError) and error.name not in (module, module.partition(".")[0]):
            raise UserError(f"--callbacks {path}: its module does not import: {error}") from error
        raise UserError(f"--callbacks {path}: no such class, here or among the installed packages") from error
