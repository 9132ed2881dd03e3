"""Recognize path options, and reject URLs and symbolic links that lead out of a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

_OPTION = re.compile(r"(.*[._ -])?(dir|path|config|resume|from_peft|chat_template)")
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # Path makes one slash of two


def is_path_option(name: str) -> bool:
    """Whether the option takes a path; ``name`` may be dotted."""
    return _OPTION.fullmatch(name) is not None


def require_local(name: str, value: Any) -> None:
    """Reject a URL as the value of a path option; ``Path`` would create a local folder ``s3:``.

    Raises:
        UserError: the value is a URL.
    """
    if is_path_option(name) and isinstance(value, str | Path) and _URL.match(str(value)):
        raise UserError(f"{name} {value}: remote storage is not supported; use a local folder")


def require_inside(file: Path, folder: Path) -> None:
    """Reject a file of ``folder`` that a symbolic link resolves to a path outside.

    An untrusted folder could otherwise copy the user's private files into a published model. Links within the folder,
    and those of the Hugging Face hub's cache to its blobs, are allowed.

    Raises:
        UserError: the file is outside the folder.
    """
    real, root = file.resolve(), folder.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(real.is_relative_to(inside) for inside in roots):
        raise UserError(
            f"{file}: is a symbolic link to {real}, outside its folder; replace it with a copy or delete it"
        )
