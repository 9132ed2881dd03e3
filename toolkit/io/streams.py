"""Standard streams that are missing, closed or full."""

import os
import sys
from contextlib import suppress
from typing import IO, Any

from toolkit.escape import printable


def open_missing_streams() -> None:
    """Open /dev/null for standard streams that are None or closed: services and ``>&-`` have none.

    Otherwise the next file would get a closed descriptor's number, and libraries' output would damage it.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor is this one
        if getattr(getattr(sys, name), "closed", getattr(sys, name) is None):
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until exit)


class SafeOutput:
    """Wraps a standard stream. A closed pipe or a full disk silences it, but does not stop a run."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"  # None: io.StringIO

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
        except UnicodeEncodeError:
            self.write(text.encode(self.encoding, "replace").decode(self.encoding))
        except (OSError, ValueError):  # ValueError: the file is closed
            self._silence()
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except (OSError, ValueError):
            self._silence()

    def _silence(self) -> None:
        # The text is still buffered, and Python would report an error when it flushes at exit: redirect the descriptor
        # to /dev/null, as the Python documentation recommends for a broken pipe.
        with suppress(OSError, ValueError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._file.fileno())
            os.close(devnull)


class EscapedOutput(SafeOutput):
    """Wraps a terminal's stream, so that text in what is printed cannot control the terminal."""

    def write(self, text: str) -> int:
        return super().write(printable(text.replace("\r\n", "\n")))  # CSV's line end


def unescaped(file: Any) -> Any:
    """Return the stream for a display that draws with control characters, and escapes text itself."""
    return file._file if isinstance(file, EscapedOutput) else file
