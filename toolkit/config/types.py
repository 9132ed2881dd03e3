"""Describe the types of options for help and messages."""

import re
import types
from typing import Any, Literal, Union, get_args, get_origin


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union without None, or the type itself."""
    union = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return tuple(part for part in union if part is not type(None))


def base_of(part: Any) -> Any:
    """Return the plain class of a type: int for PositiveInt, list for list[str]."""
    return getattr(part, "_type", get_origin(part) or part)


def is_mapping(kind: Any) -> bool:
    return base_of(union_members(kind)[0]) is dict


def is_restricted(kind: Any) -> bool:
    """Whether ``kind`` is a number type with limits, such as jsonargparse's PositiveInt."""
    return hasattr(kind, "_restrictions")


def limits(kind: Any) -> str:
    """Describe the limits of a restricted number, such as ``greater than zero``."""
    text = kind._expression
    for sign, words in {"v>=": "at least ", "v<=": "at most ", "v>": "greater than ", "v<": "less than "}.items():
        text = text.replace(sign, words)
    return re.sub(r"\b0$", "zero", text)


def describe(kind: Any) -> str:
    """Describe the valid values of a type, such as ``an integer or auto``."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    names |= {dict: """a mapping such as '{"name": 1}'"""}
    columns = """a mapping such as '{"prompt": "question", "completion": "answer"}'"""
    descriptions = []
    for part in union_members(kind):
        base, values = base_of(part), get_args(part)
        if base is Literal:
            descriptions.append(("one of " if len(values) > 1 else "") + ", ".join(map(str, values)))
        elif base is tuple:
            example = "[train, val]" if values[0] is str else "[0.9, 0.95]"
            descriptions.append(f"a list of {len(values)} such as {example}")
        elif values == (str, str):
            descriptions.append(columns)
        else:
            descriptions.append(names.get(base, f"a value of type {getattr(base, '__name__', base)}"))
    return " or ".join(descriptions)


def expand_integer(text: str, kind: Any) -> str:
    """Rewrite ``1e6`` as ``1000000`` if the type is an integer."""
    kinds = {*map(base_of, union_members(kind))}
    if int in kinds and float not in kinds and re.fullmatch(r"[+-]?\d[\d_]*(\.\d*)?([eE][+-]?\d+)?", text):
        number = float(text)
        if number.is_integer() and abs(number) < 2**53:
            return str(int(number))
    return text
