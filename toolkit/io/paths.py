"""Validate path options, remote storage URLs, and symbolic links that point outside their folder."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

_OPTION = re.compile(r"(.*[._ -])?(dir|path|config|resume|from_peft|chat_template|out|metric_data|texts|base_model)")
_VARIABLE = re.compile(r"\$\{|^\$\w")
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # one slash, because Path collapses two into one


def is_path_option(name: str) -> bool:
    """Whether an option takes a path. ``name`` may be dotted."""
    return _OPTION.fullmatch(name) is not None


def expand_path(name: str, value: str) -> str:
    """Return the value of a path option with the home folder for ``~``, also where no shell has replaced it.

    ``name`` is the option as shown in messages. Raise UserError for a variable, which only a shell replaces, and for
    control characters, which could add lines to a file that names the path.
    """
    if re.search(r"[\x00-\x1f\x7f-\x9f]", value):
        raise UserError(f"{name} {ascii(value)}: must not have control characters; rename it")
    if is_url(value):
        if "://" not in value:
            url = mask_url(value.replace(":/", "://", 1))
            raise UserError(f"{name} {url.replace('://', ':/', 1)}: is not a URL; write {url}")
        return value
    if _VARIABLE.search(value):
        raise UserError(f"{name} {value}: variables are not replaced here; give the path itself")
    path = os.path.expanduser(value)
    if path.startswith("~"):
        raise UserError(f"{name} {value}: no such user; a file or folder of this name is ./{value}")
    return path


def is_url(value: Any) -> bool:
    """Whether a value is a remote storage URL, such as ``s3://bucket/run``."""
    return isinstance(value, str | Path) and _URL.match(str(value)) is not None


def require_local(name: str, value: Any) -> None:
    """Raise UserError if a path option is a URL; ``Path`` would create a local folder ``s3:``."""
    if is_path_option(name) and is_url(value):
        raise UserError(f"{name} {mask_url(str(value))}: must not be on remote storage; use a local folder")


def require_folder(name: str, value: Any) -> None:
    """Validate the URL of an option that takes a local or remote folder."""
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
    """Return the URL without possible secrets: user name, password, query and fragment."""
    return re.sub(r"[?#].*=.*", "?***", re.sub(r"(?<=:/)(/?)[^/]*@", r"\1", url, count=1))


def user_cache() -> Path:
    """Return ``$XDG_CACHE_HOME/toolkit``, with ``~/.cache`` as the default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolkit"


def cache_folder(url: str, kind: str) -> Path:
    """Return the cache folder for a URL. Its name starts with the URL's last component."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return user_cache() / kind / f"{url.rpartition('/')[2]}-{digest}"


def require_inside(file: Path, folder: Path) -> None:
    """Raise UserError if ``file`` is a symbolic link to a path outside ``folder``.

    Otherwise, an untrusted folder could copy the user's private files into a published model. Links within the folder
    are allowed, and links from a Hugging Face hub cache snapshot to its blobs.
    """
    real, root = file.resolve(), folder.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(real.is_relative_to(inside) for inside in roots):
        raise UserError(
            f"{file}: is a symbolic link to {real}, outside its folder; replace it with a copy or delete it"
        )
