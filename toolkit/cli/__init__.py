"""The command line. Fast to import."""


def main(argv: list[str] | None = None) -> int:
    """Run ``toolkit ARGV`` and return its exit code (see tutorials/run_files.md)."""
    from toolkit.cli import dispatch

    return dispatch.main(argv)
