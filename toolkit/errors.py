"""Expected errors. The command line turns each into one line and an exit code."""

import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from toolkit.escape import one_line as one_line  # of most messages
from toolkit.escape import printable


class CommandError(Exception):
    """Ends a command with ``exit_code`` and its message as one line on standard error, without a traceback."""

    exit_code = 1


class UserError(CommandError, ValueError):
    """A user error. The message is one line: the flag or file, its value, and the fix."""

    exit_code = 2


class MissingName:
    """A name that a package lacks. Using it raises UserError with ``hint``; importing it would hide the reason."""

    def __init__(self, name: str, hint: str) -> None:
        self._message = f"{name}: does not exist; {hint}"

    def _raise(self, *args: object, **options: object) -> NoReturn:
        raise UserError(self._message)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # of Python, such as __wrapped__
            raise AttributeError(name)
        self._raise()

    __call__ = __getitem__ = __iter__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = _raise


class GuardError(CommandError, RuntimeError):
    """A guard stopped the run: a non-finite loss, or replicas that differ."""

    exit_code = 3


class DifferenceError(CommandError, RuntimeError):
    """Values that must be equal on all ranks or in two runs differ."""

    exit_code = 3


class DataError(CommandError, RuntimeError):
    """Training data cannot be read: a file is damaged or missing. The message names it and the fix.

    The run saves a checkpoint before it raises this. Before the first step, it raises UserError (exit code 2) instead.
    """

    exit_code = 3


class StoppedBySignalError(CommandError, RuntimeError):
    """A signal stopped the run after its state was saved (exit code 128 + signal number)."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StoppedByFileError(CommandError, RuntimeError):
    """A file STOP stopped the run after its state was saved."""

    exit_code = 0


class TerminatedError(KeyboardInterrupt):
    """SIGTERM before a run handles signals. Like Ctrl-C, ``except Exception`` does not catch it."""


class CallbackError(RuntimeError):
    """A callback failed; the message names the callback and the method."""


class PeerLostError(CommandError, RuntimeError):
    """Another process of the run exited or does not respond, so this one cannot continue."""


class PeerShutdownError(CommandError, RuntimeError):
    """This process ends with the run; another process reports the reason. Prints no message."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def mark_reported(error: BaseException) -> None:
    """Mark an error as known to all ranks, so that this process exits without waiting for its peers."""
    error.__dict__["is_reported"] = True


def is_reported(error: BaseException | None) -> bool:
    return getattr(error, "is_reported", False)


def require_option(ok: bool, name: str, value: object, hint: str) -> None:
    """Check the value of an option; ``name`` may be dotted, and ``hint`` gives the valid values or the fix."""
    if not ok:
        raise UserError(f"--{name} {option_text(value)}: {hint}")


def require_bitsandbytes(option: str) -> None:
    """Raise a UserError if bitsandbytes, which ``option`` needs, is not installed."""
    require_package(option, "bitsandbytes", "0.48")


def require_package(option: str, name: str, version: str) -> None:
    """Raise a UserError if the package ``name``, which ``option`` needs, is not installed."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{option}: needs {name}; run: pip install '{name}>={version}'")


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without torch's C++ stack, or the name of its class."""
    text = str(error).partition(". Exception raised from")[0]
    return (text.strip().splitlines() or [type(error).__name__])[0]


def notice(line: object) -> None:
    """Print a line on standard error: standard output is for results."""
    print(printable(str(line)), file=sys.stderr, flush=True)


def option_text(value: object) -> str:
    """Return an option's value as on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def count_of(count: int, noun: str) -> str:
    """Return such as ``1 chunk``, ``2,000 chunks`` or ``2 processes``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def join_first(items: Sequence[str], shown: int = 5) -> str:
    """Join the first ``shown`` items and count the rest: ``a, b and 3 more``."""
    return ", ".join(items[:shown]) + (f" and {len(items) - shown} more" if len(items) > shown else "")


def did_you_mean(
    name: str,
    valid_names: Iterable[str],
    count: int = 3,
    cutoff: float = 0.5,
    margin: float = 0.2,
    normalize: Callable[[str], str] = str.lower,
    display: Callable[[str], str] = repr,
) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` with the names most similar to ``name``, or an empty string.

    Args:
        name: The unknown name.
        valid_names: Names to choose from.
        count: Maximum number of names in the hint.
        cutoff: Minimum similarity, from 0 to 1, of :class:`difflib.SequenceMatcher`.
        margin: Maximum difference in similarity from the most similar name.
        normalize: Maps a valid name to the text that is compared with ``name``.
        display: Formats a valid name for the hint.
    """
    similarity = {k: difflib.SequenceMatcher(None, normalize(k), name[:200].lower()).ratio() for k in valid_names}
    least = max([cutoff, *(s - margin for s in similarity.values())])
    near = sorted((k for k, s in similarity.items() if s >= least), key=lambda k: (similarity[k], k), reverse=True)
    return f"; did you mean {' or '.join(map(display, near[:count]))}?" if near else ""
