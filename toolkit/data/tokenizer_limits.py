"""Limits of the tokenizers library: its cores, panics of its Rust code, and files that expand texts without bound."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toolkit.errors import UserError, one_line

PARALLEL = "TOKENIZERS_PARALLELISM"  # the library reads it on each call
_REPLACEMENT = re.compile(r'"pattern":\{"(String|Regex)":"(.*?)"\},"content":"(.*?)"\}')
_MAX_GROWTH = 100_000  # of a text by all replacements, one after another


def is_parallel() -> bool:
    """Whether the tokenizers library may use all cores."""
    return os.environ.get(PARALLEL, "true").lower() not in ("", "off", "false", "f", "no", "n", "0")


@contextmanager
def one_thread_per_call() -> Iterator[None]:
    """Limit each call of the tokenizers library to one core, for callers with a thread pool."""
    before = os.environ.get(PARALLEL, "true")
    os.environ[PARALLEL] = "false"
    try:
        yield
    finally:
        os.environ[PARALLEL] = before


@contextmanager
def translate_panic(name: str) -> Iterator[None]:
    """Convert a panic in the library's Rust code to UserError. PanicException is not an Exception.

    One cause is a regular expression that exceeds the limit of ten million backtracking steps.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{name}: tokenizer.json: the tokenizers library fails on a text: {one_line(error)}") from None


def require_bounded(name: str, part: Any) -> None:
    """Raise ValueError if replacements could expand a text without limit: 40 that double it make 1 TB of a letter."""
    replacements = [] if part is None else _REPLACEMENT.findall(part.__getstate__().decode())
    growth = math.prod(  # a regular expression may match nothing, between all characters
        1 + len(new) if kind == "Regex" or not old else max(1, len(new) / len(old)) for kind, old, new in replacements
    )
    if growth > _MAX_GROWTH:
        raise ValueError(f"tokenizer.json: its {name} can make a text {growth:.3g} times as long")
