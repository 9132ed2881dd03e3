"""Faults of file-system calls, by a library that is loaded into the command (shim.c)."""

import mmap
import os
import struct
import subprocess
from functools import cache
from pathlib import Path

from tests.faults.core import ROOT

_SOURCE = Path(__file__).with_name("shim.c")


@cache
def load() -> None:
    """Compile the library, and preload it into the commands that this process starts from now on."""
    library = ROOT / "build" / "faults" / "shim.so"
    if not library.exists() or library.stat().st_mtime < _SOURCE.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(new), str(_SOURCE), "-ldl"], check=True)
        new.rename(library)
    os.environ["LD_PRELOAD"] = str(library)


class Counter:
    """The number of file-system calls of a command below a folder."""

    def __init__(self, folder: Path) -> None:
        load()
        self._path = folder / "calls"
        self._path.write_bytes(bytes(8))
        self.environ = {"FAULT_DIR": str(folder / "out"), "FAULT_COUNTER": str(self._path)}

    @property
    def calls(self) -> int:
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ) as shared:
            return struct.unpack("q", shared[:])[0]

    def at(self, call: int, what: str, last: int | None = None, **more: str) -> dict[str, str]:
        """Return the environment of a command that has a fault at a call, counted from 0; see shim.c."""
        limit = {} if last is None else {"FAULT_LAST": str(last)}
        return self.environ | {"FAULT_AT": str(call), "FAULT_DO": what} | limit | more
