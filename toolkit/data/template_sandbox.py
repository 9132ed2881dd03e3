"""Runs the jinja templates that come with checkpoints: strangers' code, so in jinja's sandbox.

The names, filters and tags are those that templates find in transformers (``apply_chat_template``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class RefusedError(TemplateError):
    """A template called ``raise_exception``: it does not take these messages."""


def compile_template(source: str) -> Template:
    """Compile ``source``.

    Raises:
        TemplateError: if it is not a jinja template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, dict=_Dict(), namespace=_Namespace)
    return environment.from_string(source)


class _Generation(Extension):
    """``{% generation %}`` marks what the model says; it is rendered as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: str) -> None:
    raise RefusedError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """``dict`` for templates, without the attributes of the class."""

    __call__: Callable[..., dict] = staticmethod(dict)


class _Namespace(Namespace):
    """``namespace`` for templates, without underscored names: those lead out of the sandbox."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        attributes = dict(*args, **attributes)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold the underscored name {name!r}")
