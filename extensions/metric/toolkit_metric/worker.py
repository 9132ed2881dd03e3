"""The process that calls a metric function, see :mod:`toolkit_metric.process`."""

import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import islice
from threading import Thread
from typing import Any

from toolkit.dotted_paths import import_object
from toolkit.errors import UserError, one_line
from toolkit_metric.entries import Traits

_MAX_NAMES = 100
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


def serve() -> None:
    """Read JSON Lines from stdin and write responses to stdout, until stdin closes.

    The first line has the ``path`` of the function and its fourth ``argument``, or None; it is answered with the
    function's :class:`Traits`. Each further line has the other arguments and is answered with ``values``. A line that
    failed is answered with an ``error``. What the function prints goes to stderr.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()
    function: Callable[..., Any] | None = None
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            if function is None:
                function, more = _load(**request)
                response: dict[str, Any] = _traits(function)._asdict()
            else:
                response = {"values": check_values(function(*request, *more), len(request[0]))}
        except BaseException as error:  # a user's function can raise anything, SystemExit too
            reason, name = one_line(error)[:500], type(error).__name__
            text = reason if isinstance(error, UserError) else f"{name}: {reason}" if reason else name
            response = {"error": text + _line_of(error, function)}
        sys.stdout.flush()
        print(json.dumps(response), file=output, flush=True)


def _line_of(error: BaseException, function: Any) -> str:
    """Return the line of the function's file that raised an error; "" outside of it."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({os.path.basename(file)} line {lines[-1]})" if file and lines else ""


def _end_with_parent(parent: int) -> None:
    """End the process group of this process when the run has ended, even if the function never returns."""
    while os.getppid() == parent:
        time.sleep(5)
    os.killpg(0, signal.SIGKILL)


def _load(path: str, argument: str | None) -> tuple[Callable[..., Any], list[str]]:
    """Return the function and its arguments after the first three."""
    function = import_object(path)
    if not callable(function):
        raise TypeError(f"{path} is not a function")
    more = [] if argument is None else [argument]
    try:
        inspect.signature(function).bind([], [], [], *more)
    except TypeError as error:
        takes = "(answers, references, rows), and a text after NAME: as the fourth argument, if it takes one"
        raise TypeError(f"{error}; it is called with {takes}") from None
    return function, more


def _traits(function: Any) -> Traits:
    values: Any = {name: getattr(function, name, default) for name, default in Traits._field_defaults.items()}
    traits = Traits(**values)
    is_higher = traits.higher_is_better
    for value in is_higher.values() if isinstance(is_higher, dict) else [is_higher]:
        if value not in (True, False, None):
            raise TypeError(f"higher_is_better is {value!r:.40}, not True, False, or a dictionary of them by name")
    return traits


def check_values(result: Any, count: int) -> dict[str, Any]:
    """Return a function's result as plain numbers, or lists of ``count`` numbers. Raises TypeError or ValueError."""
    if not isinstance(result, dict) or not 0 < len(result) <= _MAX_NAMES:
        raise TypeError(f"returns {type(result).__name__}, not a dictionary with 1 to {_MAX_NAMES} numbers or lists")
    values: dict[str, Any] = {}
    for name, value in result.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"returns the name {name!r:.80}; use letters, digits and _")
        if isinstance(value, str | bytes | dict):
            raise TypeError(f"{name} is {type(value).__name__}, not a number or a list with a number for each row")
        if isinstance(value, Iterable) and getattr(value, "ndim", True):
            value = list(islice(value, count + 1))
            if len(value) != count:
                raise ValueError(f"{name} is a list of another length than the {count} rows")
            values[name] = list(map(float, value))
        else:
            values[name] = float(value)
    return values
