"""Render a checkpoint's jinja templates. Templates are untrusted code, so they run in jinja's sandbox in a subprocess
with limits (:mod:`toolkit.data.chat.sandbox_process`).

Templates have the same globals, filters and tags as in transformers (``apply_chat_template``).
"""

import contextlib
import json
import select
import sys
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_IDLE = 60  # seconds without a request before the process exits
_MAX_CHARS = 1 << 24  # output limit, plus four times the request length
_MAX_ERROR_CHARS = 500


class MessagesRejectedError(TemplateError):
    """Raised when a template calls ``raise_exception`` to reject the messages."""


def serve() -> None:
    """Read JSON Lines requests from stdin and write responses to stdout, until stdin closes or is idle.

    A request has the template ``source``, the ``values`` to render (None to only compile), the time ``now``, and the
    limits ``cpu_seconds`` and ``memory`` (bytes). A response is ``{"text": ...}`` or ``{"error": ...}``.
    """
    while select.select([sys.stdin], [], [], _IDLE)[0] and (line := sys.stdin.buffer.readline()):
        try:
            request = json.loads(line)
            _limit(request["cpu_seconds"], request["memory"])
            response = {"text": _render(request, _MAX_CHARS + 4 * len(line))}
        except Exception as error:  # a template can raise any exception
            response = {"error": _describe(error)}
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


def _limit(cpu_seconds: int, memory: int) -> None:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds, resource.RLIMIT_AS: memory}
    for kind, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # above an existing hard limit; macOS has no RLIMIT_AS
            resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _render(request: dict[str, Any], max_chars: int) -> str:
    template, values = compile_template(request["source"]), request["values"]
    if values is None:
        return ""
    text = template.render(**values, strftime_now=datetime.fromisoformat(request["now"]).strftime)
    if len(text) > max_chars:
        raise OverflowError(f"the text has {len(text):,} characters")
    return text


def _describe(error: Exception) -> str:
    if isinstance(error, MessagesRejectedError):
        problem = f"the template rejects the messages: {error.message}"
    elif isinstance(error, TemplateSyntaxError):
        problem = f"the template has a syntax error in line {error.lineno}: {error.message}"
    elif isinstance(error, MemoryError):
        problem = "the template needs too much memory to render the messages"
    else:
        problem = f"the template fails to render the messages: {type(error).__name__}: {error}"
    return problem[:_MAX_ERROR_CHARS]


@lru_cache(8)
def compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja's own filter escapes HTML
    # a function, because templates must not have access to attributes of the class
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)
    environment.globals.update(raise_exception=_raise_exception, namespace=_Namespace)
    return environment.from_string(source)


class _Generation(Extension):
    """Tag ``{% generation %}``, which marks assistant text. Only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise MessagesRejectedError(message)


class _Namespace(Namespace):
    """``namespace`` for templates. Underscored names are rejected; they would escape the sandbox."""

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
        raise SecurityError(f"a namespace must not contain the underscored name {name!r}")
