"""Faults of file-system calls, by a library that is loaded into the command (shim.c)."""

import os
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from pytest import MonkeyPatch

from tests.faults.core import ROOT

_SOURCE = Path(__file__).with_name("shim.c")
_LIBRARY = ROOT / "build" / "faults" / "shim.so"


@contextmanager
def preloaded_processes(n: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes with the library. A command is a fork of one of them; it cannot be loaded into a fork later."""
    with MonkeyPatch.context() as patch, ProcessPoolExecutor(n, get_context("spawn")) as pool:
        patch.setenv("LD_PRELOAD", str(_build()), prepend=":")
        yield pool


def _build() -> Path:
    """Compile the library, if it is older than its source."""
    if not _LIBRARY.exists() or _LIBRARY.stat().st_mtime < _SOURCE.stat().st_mtime:
        _LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        new = _LIBRARY.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(new), str(_SOURCE), "-ldl"], check=True)
        new.rename(_LIBRARY)
    return _LIBRARY


class Counter:
    """The number of file-system calls of a command below a folder, and of the faults among them."""

    def __init__(self, folder: Path) -> None:
        if str(_LIBRARY) not in Path("/proc/self/maps").read_text():
            raise RuntimeError("no faults can happen: this process was started without the library of shim.c")
        self._path = folder / "calls"
        self._path.write_bytes(bytes(16))
        self.environ = {"FAULT_DIR": str(folder / "out"), "FAULT_COUNTER": str(self._path)}

    @property
    def calls(self) -> int:
        return struct.unpack("qq", self._path.read_bytes())[0]

    @property
    def faults(self) -> int:
        """Number of calls at which the fault was done, or of readings of the clock after its jump."""
        return struct.unpack("qq", self._path.read_bytes())[1]

    def at(self, call: int, what: str, last: int | None = None, **more: str) -> dict[str, str]:
        """Return the environment of a command that has a fault at a call, counted from 0; see shim.c."""
        limit = {} if last is None else {"FAULT_LAST": str(last)}
        return self.environ | {"FAULT_AT": str(call), "FAULT_DO": what} | limit | more
