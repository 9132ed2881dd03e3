"""Create callbacks from class paths, for ``--callbacks`` and YAML files."""

import inspect
from typing import Any

from toolkit.dotted_paths import add_cwd_to_path, load_object
from toolkit.errors import UserError
from toolkit.extension import load_registered, registered
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
    if path in registered("callbacks"):
        cls = load_registered("callbacks", path)
    else:
        add_cwd_to_path()
        cls = load_object(path, f"--callbacks {path}")
    if not (inspect.isclass(cls) and issubclass(cls, Callback)):
        raise UserError(f"--callbacks {path}: must be a class derived from toolkit.Callback")
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise UserError(f"--callbacks {path}: {error}; set arguments with init_args") from error
    return cls(**arguments)
