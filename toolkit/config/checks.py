"""Check option values. Imports no torch."""

import os
from typing import Any

from toolkit.config.other_tools import VALUE_HINTS
from toolkit.errors import UserError, did_you_mean, notice, one_line, require_option
from toolkit.extension import registered

_UNCHECKED = (None, "auto")
"""Values that are not checked."""


def require_positive(group: str, args: Any, *names: str) -> None:
    """Check options of a group such as "train"; "" for options without a group."""
    for name in names:
        option, value = f"{group}.{name}".removeprefix("."), getattr(args, name)
        require_option(value in _UNCHECKED or value > 0, option, value, "must be greater than zero")


def require_not_negative(group: str, args: Any, *names: str) -> None:
    """Do what :func:`require_positive` does, but allow zero."""
    for name in names:
        option, value = f"{group}.{name}".removeprefix("."), getattr(args, name)
        require_option(value in _UNCHECKED or value >= 0, option, value, "must not be negative")


def require_one_of(name: str, value: str, builtin_names: tuple[str, ...], kind: str) -> None:
    """Check that ``value`` is one of ``builtin_names`` or a name that an extension registers as ``kind``."""
    valid_names = [*builtin_names, *registered(kind, builtin_names)]
    if value not in valid_names:
        hint = VALUE_HINTS.get(f"{name}={value.lower()}") or did_you_mean(value, valid_names)
        raise UserError(f"--{name} {value}: must be one of {', '.join(valid_names)}{hint}")


_notes: list[str] = []


def note(*lines: str) -> None:
    """Print lines on stderr, in the first process of a run only. The run's report has them."""
    _notes.extend(map(one_line, lines))
    print_once(*lines)


def take_notes() -> list[str]:
    """Return the lines that :func:`note` has printed since the last call."""
    notes = _notes[:]
    _notes.clear()
    return notes


def print_once(*lines: str) -> None:
    """Print lines on stderr, in the first process of a run only."""
    if lines and all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")):
        notice("\n".join(map(one_line, lines)))
