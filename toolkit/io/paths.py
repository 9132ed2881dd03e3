"""Checks of path options and URLs of remote storage, and of symbolic links that leave their folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

_OPTION = re.compile(r"(.*[._ -])?(dir|path|config|resume|from_peft|chat_template)")
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # Path makes one slash of two


def is_path_option(name: str) -> bool:
    """Whether the option takes a path; ``name`` may be dotted."""
    return _OPTION.fullmatch(name) is not None


def is_url(value: Any) -> bool:
    """Whether an option names remote storage, such as ``s3://bucket/run``."""
    return isinstance(value, str | Path) and _URL.match(str(value)) is not None


def require_local(name: str, value: Any) -> None:
    """Reject a URL as the value of a path option; ``Path`` would create a local folder ``s3:``."""
    if is_path_option(name) and is_url(value):
        raise UserError(f"{name} {mask_url(str(value))}: must not be on remote storage; use a local folder")


def require_folder(name: str, value: Any) -> None:
    """Check the URL of a path option that takes a local folder or one on remote storage."""
    if not is_url(value):
        return
    shown = mask_url(str(value))
    scheme, separator, path = str(value).partition("://")
    if not separator:
        raise UserError(f"{name} {shown}: is not a URL; give it as a string such as s3://bucket/run")
    if shown != value:
        raise UserError(
            f"{name} {shown}: must not contain a user name, a password or a query; "
            "set the credentials in the environment or in the profile of the storage"
        )
    parts = path.strip("/").split("/")
    needed = 1 if scheme in ("file", "memory") else 2
    if len(parts) < needed or not all(parts) or {".", ".."} & set(parts):
        raise UserError(f"{name} {shown}: must name a folder in a bucket, such as {scheme}://bucket/run")


def mask_url(url: str) -> str:
    """Return the URL without what may be a secret: user name, password, and values of the query or fragment."""
    return re.sub(r"[?#].*=.*", "?***", re.sub(r"(?<=:/)(/?)[^/]*@", r"\1", url, count=1))


def user_cache() -> Path:
    """Return ``$XDG_CACHE_HOME/toolkit``, with ``~/.cache`` as the default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolkit"


def require_inside(file: Path, folder: Path) -> None:
    """Reject a file of ``folder`` that a symbolic link resolves to a path outside.

    An untrusted folder could otherwise copy the user's private files into a published model. Links within the folder,
    and from the Hugging Face hub's cache to its blobs, are allowed.
    """
    real, root = file.resolve(), folder.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(real.is_relative_to(inside) for inside in roots):
        raise UserError(
            f"{file}: is a symbolic link to {real}, outside its folder; replace it with a copy or delete it"
        )
