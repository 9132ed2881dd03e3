"""The ways in which a command ends early on purpose. The command line turns each into one line and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the user's (exit code 2). The message is one line: the flag or file, its value, and the mend."""


class GuardError(RuntimeError):
    """A guard stopped the run before it could do harm: a non-finite loss, replicas that differ (exit code 3)."""


class StoppedBySignal(RuntimeError):
    """The run was asked to stop by a signal and has saved its state (exit code 128 + the signal's number)."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def did_you_mean(name: str, known: Iterable[str], count: int = 3) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` for the known names nearest to ``name``, or an empty string."""
    by_lower = {k.lower(): k for k in known}
    near = [by_lower[k] for k in difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.5)]
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
