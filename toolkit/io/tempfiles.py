"""Name temporary files and folders by machine and process, and clean up after dead processes."""

import functools
import os
import shutil
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TMP = ".tmp-"  # prefix of every temporary name
_TOOLKIT = f"{TMP}toolkit-"  # not the prefix of other programs' files
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux
_STALE_SECONDS = 24 * 3600  # files from another machine are stale if unchanged for this long


def temporary_path(path: Path) -> Path:
    """Return the temporary path to write before renaming it to ``path``."""
    return path.with_name(f"{temporary_prefix()}{path.name}")


def temporary_prefix() -> str:
    """Return the prefix of this process's temporary names."""
    return f"{_prefix()}{os.getpid()}-"


def sweep(folder: Path) -> None:
    """Remove temporary files of dead processes from ``folder``.

    Files from another machine or container are removed by age.
    """
    for path in folder.glob(f"{_TOOLKIT}*"):
        is_old = not path.name.startswith(_prefix()) and time.time() - _last_change(path) > _STALE_SECONDS
        if is_old or has_ended(path.name):
            remove([path])


def has_ended(name: str) -> bool:
    """Whether a temporary name or :func:`temporary_prefix` is from a process of this machine that has ended."""
    pid = name.removeprefix(_prefix()).partition("-")[0]
    return name.startswith(_prefix()) and pid.isdigit() and not is_alive(int(pid))


def remove(paths: Iterable[Path]) -> None:
    """Delete files and folders, ignoring errors. Symbolic links are not followed."""
    for path in paths:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@functools.cache
def machine_name() -> str:
    """Return a name that identifies the machine, the boot and the PID namespace.

    Containers have separate process ids; machines from one image may share a host name.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(f"{os.stat('/proc/self/ns/pid').st_ino:x}")
        parts.append(boot_id())
    return "-".join(parts)


def boot_id() -> str:
    """Return what identifies this boot of the machine, also in its containers; "" if unknown (not Linux)."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip().replace("-", "")[:12]
    return ""


def _prefix() -> str:
    return f"{_TOOLKIT}{machine_name()}-"


def _last_change(path: Path) -> float:
    """Return the last modification time of a file or folder tree; the current time if it cannot be read."""
    try:
        children = [] if path.is_symlink() else path.rglob("*")
        return max(entry.lstat().st_mtime for entry in (path, *children))
    except OSError:
        return time.time()


def is_alive(pid: int) -> bool:
    """Whether a process runs. On Linux, one that has exited and whose parent has not yet noticed does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
