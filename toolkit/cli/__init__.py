"""The command line. Fast to import."""

from toolkit.distributed.signals import hold_signals


def main(argv: list[str] | None = None) -> int:
    """Run ``toolkit ARGV`` and return its exit code (see tutorials/run_files.md)."""
    if argv is None:
        hold_signals(True)  # the imports take a moment
    from toolkit.cli import dispatch

    return dispatch.main(argv)
