"""Which options are paths, and where a path may lead: not to another machine, and no link out of its folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

_OPTION = re.compile(r"(.*[._ -])?(dir|path|config|resume|from_peft|chat_template)")
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # Path makes one slash of two


def is_path_option(name: str) -> bool:
    """Whether the value of an option is a path; ``name`` may be dotted."""
    return _OPTION.fullmatch(name) is not None


def require_local(name: str, value: Any) -> None:
    """Refuse a URL as the value of an option that is a path; ``Path`` would make it a local folder ``s3:``.

    Raises:
        UserError: names the option, its value and the fix.
    """
    if is_path_option(name) and isinstance(value, str | Path) and _URL.match(str(value)):
        raise UserError(f"{name} {value}: remote storage is not supported; copy it to a local folder and give that")


def require_inside(file: Path, folder: Path) -> None:
    """Refuse a file of ``folder`` that is, or lies in, a symbolic link to elsewhere: a stranger's folder could have
    private files of the user's copied into a model to publish. Links within the folder, and those of the Hugging Face
    hub's cache to its blobs, are fine.

    Raises:
        UserError: names the link and where it leads.
    """
    real, root = file.resolve(), folder.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(real.is_relative_to(inside) for inside in roots):
        raise UserError(f"{file}: is a link to {real}, outside its folder; replace it by a copy, or delete it")
