"""Render a report as Markdown, for pull requests and issues."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from toolkit.reporting import text
from toolkit.reporting.run import RunFacts


def render_markdown(runs: Sequence[RunFacts]) -> str:
    """Return the report of one or several runs as Markdown. Text from the runs is escaped."""
    names = [run.name for run in runs]
    parts = [f"# Report: {escape(', '.join(names))}"]
    for run in runs:
        parts += [f"## {escape(run.name)}"] * (len(runs) > 1)
        parts += [escape(" ".join(text.sentences(run)))]
    labels = dict.fromkeys(label for run in runs for label in text.figures(run))
    parts.append(
        _table(["", *names], [[label, *(text.figures(run).get(label, "") for run in runs)] for label in labels])
    )
    if rows := text.setting_rows(runs):
        parts += ["### Settings that differ", _table(["setting", "default", *names], rows)]
    for run in runs:
        if run.command:
            parts += ["### Command", f"```bash\n{run.command.replace('```', '` ` `')}\n```"]
    for run in runs:
        if run.samples:
            sample = run.samples[-1]
            parts.append(f"### Sample after step {escape(str(sample.get('step')))}")
            parts.append("\n".join(f"> {escape(str(sample.get(key, '')))}" for key in ("prompt", "text")))
    if rows := text.checkpoint_rows(runs):
        parts += ["### Checkpoints", _table(["run", "checkpoint", "step", "size", "check"], rows)]
    if rows := text.environment_rows(runs):
        parts += ["### Environment", _table(["", *names], rows)]
    remarks = [line for run in runs for line in (*run.warnings, *run.notes)]
    parts += ["### Warnings and notes", "\n".join(f"- {escape(line)}" for line in remarks)] if remarks else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell if cell == '---' else escape(cell) for cell in row)} |" for row in lines)


def escape(value: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", html.escape(" ".join(value.split()), quote=False))
