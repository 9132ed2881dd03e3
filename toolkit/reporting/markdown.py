"""Render a report as Markdown, for pull requests and issues."""

import html
import re
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.errors import printable
from toolkit.reporting.run import RunFacts
from toolkit.reporting.text import parts


def render_markdown(runs: Sequence[RunFacts]) -> str:
    """Return the report of one or several runs as Markdown. Text from the runs is escaped."""
    title = f"## Report: {escape(', '.join(run.name for run in runs))}"
    return "\n\n".join([title, *(block for kind, content in parts(runs) for block in _blocks(kind, content))]) + "\n"


def _blocks(kind: str, content: Any) -> Iterator[str]:
    if kind == "lead":
        yield f"**{escape(content[0])}**: {escape(content[1])}"
    elif kind == "heading" and content != "Curves":
        yield f"### {escape(content)}"
    elif kind in ("figures", "table"):
        head, rows = content
        lines = [map(escape, head), ["---"] * len(head), *(map(escape, row) for row in rows)]
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
    elif kind == "note":
        yield f"> {escape(content)}"
    elif kind == "samples" and content:
        title, prompt, answer = content[0]
        yield f"{escape(title)}:\n\n> {escape(prompt)} **{escape(answer)}**"
    elif kind == "code":
        yield f"```bash\n{printable(content).replace('```', '` ` `')}\n```"


def escape(value: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_\[\]|#~!@])", r"\\\1", html.escape(printable(" ".join(value.split())), quote=False))
