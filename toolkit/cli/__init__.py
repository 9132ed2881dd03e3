"""The command line. Imports nothing heavy."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run ``toolkit ARGV`` and return its exit code (see tutorials/reference.md)."""
    from toolkit.cli import dispatch

    return dispatch.main(argv)
