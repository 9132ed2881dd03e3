"""Users' values of options, and entries of mapping options such as ``--data.sources.web.weight``."""

import copy
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, get_args

from jsonargparse import ArgumentParser, Namespace

from toolkit.config.types import expand_integer, is_mapping, is_restricted, union_members
from toolkit.errors import UserError, did_you_mean
from toolkit.io.paths import mask_url
from toolkit.io.safe_parse import parse_yaml


class OptionValue(NamedTuple):
    """A user's value of an option. ``source`` is "" for a flag, None for Python, otherwise the YAML file."""

    source: str | None
    value: Any

    def name(self, key: str) -> str:
        """Return the option as shown in messages without its value: flag, or file and key."""
        return f"{self.source}: {key}" if self.source else f"{'--' * (self.source == '')}{key}"

    def display(self, key: str) -> str:
        """Return the option as shown in messages: flag, or file and key, then the value."""
        if re.search(r"(?i)(token|secret|password|passwd|api_key)$", key):
            return f"{key if self.source is None else f'--{key}'} ***"
        text = mask_url(self.text) if "://" in self.text else self.text
        if self.source is None:
            return f"{key} {(self.value if text == self.text else text)!r}"
        if self.source:
            return f"{self.name(key)}: {text}"
        return f"{self.name(key)} {'' if self.value is None else text}".rstrip()

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else json.dumps(self.value, default=str)

    def convert(self, kind: Any) -> Any:
        """Return the value as an instance of ``kind``, by jsonargparse. Raise ArgumentError if it is none."""
        parser = _parser(kind)
        if self.source is None:  # a copy, because values in a dictionary are converted in place
            parsed = parser.parse_object({"value": copy.deepcopy(self.value)})
        else:
            parsed = parser.parse_args([f"--value={expand_integer(self.text, kind)}"])
        value = _plain(parsed.value)
        return value._type(value) if is_restricted(type(value)) else value  # YAML does not write the special class


@cache
def _parser(kind: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    return parser


def _plain(value: Any) -> Any:
    """Undo that jsonargparse makes Namespaces of mappings that describe an object."""
    if isinstance(value, list):
        return [*map(_plain, value)]
    return value.as_dict() if isinstance(value, Namespace) else value


def instantiate(value: Any, kind: Any) -> Any:
    """Return a converted value of a user's class, with objects instead of the mappings that describe them."""
    if not isinstance(value, dict | list) or is_mapping(kind):
        return value
    parser = _parser(kind)
    return parser.instantiate(parser.parse_object({"value": value})).value


def with_entry(mapping: Any, path: Sequence[str], entry: OptionValue, key: str, kind: Any) -> Any:
    """Return a copy of ``mapping`` (a dict or YAML text) with an entry at ``path``. Other values are not changed.

    An entry of an entry must be in an existing one. ``key`` is the option name of the entry, ``kind`` the mapping's
    type.
    """
    value = entry.value
    if entry.source == "":
        if value is None:
            raise UserError(f"--{key}: needs a value")
        if get_args(union_members(kind)[0])[1:] != (str,):
            with suppress(ValueError):
                value = parse_yaml(value)
    with suppress(ValueError):
        mapping = parse_yaml(mapping) if isinstance(mapping, str) else copy.deepcopy(mapping)
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, dict):
        return mapping  # the check of its type reports it
    inner = mapping
    for depth, name in enumerate(path[:-1]):
        if depth == 0 and name not in mapping:
            raise UserError(f"{entry.display(key)}: no entry {name!r}{did_you_mean(name, map(str, mapping))}")
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError(f"{entry.display(key)}: {name} is {inner!r} and has no options")
    inner[path[-1]] = value
    return mapping
