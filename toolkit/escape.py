"""Escape text on its way out: names, paths, labels and settings, which a stranger may have written.

Whoever writes shell commands, YAML, Markdown, HTML, CSV, comments or lines for a terminal calls these functions, and
nobody escapes text in another way; tests/test_imports.py finds those who do. Imports nothing heavy.
"""

import re
import shlex
from collections.abc import Iterable
from functools import cache
from typing import IO, Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NOT_PORTABLE = re.compile(r"[-+]?\.?\d|[yYnN]$")  # YAML text that other parsers read as a number or a boolean


def one_line(text: object) -> str:
    """Return a text, such as another library's error, as one printable line of at most 2,000 characters."""
    try:
        line = " ".join(str(text).split())
    except Exception:  # of a stranger's __str__
        line = type(text).__name__
    if len(line) > 2000:
        line = f"{line[:1500]} ... {line[-495:]}"
    return line if line.isprintable() else one_line(visible(line))


def visible(text: str, keep: str = "") -> str:
    """Escape all that is not printable, such as line breaks and characters without width, except those in ``keep``."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def printable(text: str) -> str:
    """Escape control characters except tabs and line feeds, line separators, and surrogates, which no encoding has."""
    return _CONTROL.sub(lambda control: ascii(control[0])[1:-1], text)


def shell_word(text: str) -> str:
    """Return a word for bash or zsh, in one line: a word with control characters is ``$'...'``."""
    if text.isprintable():
        return shlex.quote(text)
    content = text.encode(errors="backslashreplace")
    escaped = "".join(chr(b) if 32 <= b < 127 and b not in b"\\'" else f"\\x{b:02x}" for b in content)
    return f"$'{escaped}'"


def shell_line(words: Iterable[str]) -> str:
    """Return a command for bash or zsh."""
    return " ".join(map(shell_word, words))


def kubernetes_word(text: str) -> str:
    """Return a word for the command, arguments or environment of a pod, where ``$(NAME)`` and ``$$`` are replaced."""
    return text.replace("$", "$$")


def comment(*lines: str) -> str:
    """Return lines of comments for a shell script, YAML or Python."""
    return "".join(f"# {one_line(line)}\n" for line in lines)


def to_yaml(*documents: Any) -> str:
    """Return YAML as people write it: keys in order, no anchors, text of several lines as a block."""
    import yaml

    return yaml.dump_all(documents, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=1000)


@cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: Dumper, text: str) -> Any:
        is_block = "\n" in text and text.replace("\n", "").isprintable()
        is_plain = text.isprintable() and not _NOT_PORTABLE.match(text)
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if is_block else None if is_plain else '"')

    Dumper.add_representer(str, represent)
    return Dumper


def markdown_text(text: object) -> str:
    """Return text that Markdown shows as it is, in one line: also for a cell of a table."""
    return re.sub(r"([\\`*_\[\]|#~!@])", r"\\\1", html_text(" ".join(str(text).split()), quote=False))


def markdown_code(text: str, language: str) -> str:
    """Return a block of code. Its fence is longer than any in ``text``."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{printable(text.rstrip())}\n{fence}\n"


def html_text(text: str, quote: bool = True) -> str:
    """Return text for HTML, and with ``quote`` for its attributes."""
    import html

    return html.escape(printable(text), quote)


def script_json(text: str) -> str:
    """Return JSON that cannot end the HTML script element that it is in."""
    return text.replace("<", "\\u003c")


def csv_writer(file: IO[str]) -> Any:
    """Return a writer of rows as CSV."""
    import csv

    return csv.writer(file)
