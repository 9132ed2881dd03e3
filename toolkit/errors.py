"""The ways in which a command ends early on purpose. The command line turns each into one line and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CommandError(Exception):
    """Ends a command with ``exit_code`` and its message as one line on standard error, without a traceback."""

    exit_code = 1


class UserError(CommandError, ValueError):
    """A mistake of the user's. The message is one line: the flag or file, its value, and the mend."""

    exit_code = 2


class GuardError(CommandError, RuntimeError):
    """A guard stopped the run before it could do harm: a non-finite loss, replicas that differ."""

    exit_code = 3


class StoppedBySignalError(CommandError, RuntimeError):
    """The run was asked to stop by a signal and has saved its state (exit code 128 + the signal's number)."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class CallbackError(RuntimeError):
    """A callback of a training run failed; the message names it and the moment."""


class PeerLostError(CommandError, RuntimeError):
    """Another process of the run has ended or does not answer, so that this one cannot go on."""


class PeerShutdownError(CommandError, RuntimeError):
    """This process ends because the run does; another one has said why. No message is printed."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def settle(error: BaseException) -> None:
    """Note that the processes of a run have agreed on how it ends, and that this error is what this one reports."""
    error.__dict__["is_settled"] = True


def is_settled(error: BaseException | None) -> bool:
    return getattr(error, "is_settled", False)


def did_you_mean(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` for the known names nearest to ``name``, or an empty string.

    ``cutoff`` is the least likeness, from 0 to 1, of :class:`difflib.SequenceMatcher`.
    """
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=cutoff)
    likeness = {k: difflib.SequenceMatcher(None, k, name.lower()).ratio() for k in close}
    near = [by_lower[k] for k in close if likeness[k] >= likeness[close[0]] - 0.2]  # not what is much further off
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
