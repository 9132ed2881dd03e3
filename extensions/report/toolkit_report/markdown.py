"""Render a report as Markdown, for pull requests and issues."""

from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.escape import markdown_code, markdown_text
from toolkit_report.run import RunFacts
from toolkit_report.text import parts


def render_markdown(runs: Sequence[RunFacts]) -> str:
    """Return the report of one or several runs as Markdown. Text from the runs is escaped."""
    title = f"## Report: {markdown_text(', '.join(run.name for run in runs))}"
    return "\n\n".join([title, *(block for kind, content in parts(runs) for block in _blocks(kind, content))]) + "\n"


def _blocks(kind: str, content: Any) -> Iterator[str]:
    if kind == "lead":
        yield f"**{markdown_text(content[0])}**: {markdown_text(content[1])}"
    elif kind == "heading" and content != "Curves":
        yield f"### {markdown_text(content)}"
    elif kind in ("figures", "table"):
        head, rows = content
        lines = [map(markdown_text, head), ["---"] * len(head), *(map(markdown_text, row) for row in rows)]
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
    elif kind == "note":
        yield f"> {markdown_text(content)}"
    elif kind == "samples" and content:
        title, prompt, answer = content[0]
        yield f"{markdown_text(title)}:\n\n> {markdown_text(prompt)} **{markdown_text(answer)}**"
    elif kind == "code":
        yield markdown_code(content, "bash").rstrip()
