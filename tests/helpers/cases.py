"""Many small cases of one property in one test."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def has_slow_tests(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests of the file are selected; its fixture then computes what they compare, too."""
    return any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)


def n_steps(request: pytest.FixtureRequest, fast: int = 4) -> int:
    """Return the steps of runs that are compared: 20 (N3), and ``fast`` without the slow tests of the file."""
    return 20 if has_slow_tests(request) else fast


def slow_except(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return values to parametrize with, all but those in ``fast`` marked slow."""
    kept, values = list(fast), list(values)
    assert all(value in values for value in kept), "a fast case is not among the values"
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


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
