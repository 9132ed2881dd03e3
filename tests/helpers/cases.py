"""Many small cases of one property in one test."""

from collections.abc import Callable, Iterable
from typing import Any


def check_each(check: Callable[..., Any], cases: Iterable[Any]) -> None:
    """Call ``check`` with every case; fail with the name and the message of each that fails.

    A case is an argument, or a tuple of arguments.
    """
    failed = []
    for case in cases:
        try:
            check(*case) if isinstance(case, tuple) else check(case)
        except Exception as error:
            failed.append(f"{case!r}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} cases fail:\n" + "\n".join(failed)
