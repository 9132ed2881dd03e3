"""Render a report as one self-contained HTML page: data, styles and scripts inline, nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.errors import one_line
from toolkit.io.atomic import write_atomic
from toolkit.reporting import text
from toolkit.reporting.run import RunFacts, read_run
from toolkit.reporting.series import MAX_POINTS, reduce_lines

REPORT = "report.html"
_KNOWN = (  # title, unit, columns
    ("Loss", "nats per token", ("loss", "val_loss")),
    ("Bits per byte, validation", "bits", ("val_bpb",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Gradient norm, before clipping", "", ("grad_norm",)),
    ("Tokens per second, all devices", "tokens/s", ("tokens_per_sec",)),
    ("Model FLOPs utilization", "%", ("mfu",)),
    ("Peak memory", "GB", ("peak_memory_gb",)),
    ("Wait for data, per step", "s", ("data_wait_s",)),
    ("Time of a step", "s", ("step_s",)),
)
# uPlot formats numbers in the browser's language, which is no valid one in a POSIX locale
_LANGUAGE = """try { new Intl.NumberFormat(navigator.language) }
catch { Object.defineProperty(navigator, "language", {value: "en-US"}) }
"""


def render_page(runs: Sequence[RunFacts]) -> str:
    """Return the page of one or several runs. All text from the runs is escaped, and a policy forbids other scripts."""
    names = [run.name for run in runs]
    data = json.dumps({"runs": names, **_charts(runs)}, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # cannot end the script element
    script = _LANGUAGE + _resource("uplot.min.js") + "\n" + _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = html.escape(f"Report: {', '.join(names)}")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>{_resource("uplot.min.css")}
{_resource("page.css")}</style></head>
<body><main>
{"".join(_body(runs))}
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script></body></html>
"""


def write_report(out_dir: Path, status: str) -> str | None:
    """Write report.html at the end of a run. Return the problem, if any: a run must not fail because of it."""
    try:
        run = read_run(out_dir, status=status)
        run.name = out_dir.name
        write_atomic(out_dir / REPORT, render_page([run]).encode())
    except Exception as error:
        return one_line(error) or type(error).__name__
    return None


def _resource(name: str) -> str:
    return (files("toolkit.reporting") / name).read_text(encoding="utf-8")


def _body(runs: Sequence[RunFacts]) -> Iterable[str]:
    names = [run.name for run in runs]
    yield f"<h1>{html.escape(', '.join(names))}</h1>"
    for number, run in enumerate(runs):
        dot = f'<i class="dot c{number % 8}"></i><b>{html.escape(run.name)}</b> ' if len(runs) > 1 else ""
        yield f'<p class="lead">{dot}{html.escape(" ".join(text.sentences(run)))}</p>'
    if len(runs) == 1:
        tiles = [f"<div><dt>{_e(k)}</dt><dd>{_e(v)}</dd></div>" for k, v in text.figures(runs[0]).items()]
        yield f'<dl class="tiles">{"".join(tiles)}</dl>'
    else:
        all_figures = [text.figures(run) for run in runs]
        labels = dict.fromkeys(label for figures in all_figures for label in figures)
        yield _table(["", *names], [[label, *(f.get(label, "") for f in all_figures)] for label in labels])
    for run in runs:
        for line in run.notes:
            yield f'<p class="note">{_e(f"{run.name}: {line}" if len(runs) > 1 else line)}</p>'
    if any(run.columns for run in runs):
        yield (
            '<h2>Curves</h2><form id="switches" hidden><label>x axis <select id="axis"><option value="0">steps</option>'
            '<option value="1">tokens</option></select></label>'
            '<label><input type="checkbox" id="log"> log scale</label>'
            '<label><input type="checkbox" id="all"> show outliers</label>'
            "<span>drag to zoom, double-click to reset</span></form>"
            '<div id="charts"><noscript>The curves need JavaScript.</noscript></div>'
        )
    if any(run.samples for run in runs):
        yield f"<h2>Samples over time</h2>{''.join(map(_samples, runs))}"
    if rows := text.checkpoint_rows(runs):
        head = ["checkpoint", "step", "size", "check"]
        yield "<h2>Checkpoints</h2>"
        yield _table(["run", *head], rows) if len(runs) > 1 else _table(head, [row[1:] for row in rows])
    if rows := text.setting_rows(runs):
        yield f"<h2>Settings that differ from the defaults{' or between the runs' * (len(runs) > 1)}</h2>"
        yield _table(["setting", "default", *names], rows)
    if any(run.command for run in runs):
        yield "<h2>Repeat it</h2>" + "".join(f"<pre>{_e(run.command)}</pre>" for run in runs if run.command)
    if rows := text.environment_rows(runs):
        yield f"<h2>Environment</h2>{_table(['', *names], rows)}"
    if any(run.warnings for run in runs):
        yield "<h2>Warnings and notes of the run</h2>"
        yield "".join(f'<p class="note">{_e(line)}</p>' for run in runs for line in run.warnings)
    yield "".join(f'<p class="place">{_e(run.place)}</p>' for run in runs)


def _samples(run: RunFacts) -> str:
    """Return the samples of a run, the last one open."""
    parts = []
    for number, sample in enumerate(reversed(run.samples)):
        prompt, answer = (str(sample.get(key, ""))[:4000] for key in ("prompt", "text"))
        title = f"{run.name}, after step {sample.get('step')}"
        parts.append(
            f"<details{' open' * (number == 0)}><summary>{_e(title)}</summary>"
            f"<pre><span>{_e(prompt)}</span>{_e(answer)}</pre></details>"
        )
    return "".join(parts)


def _e(value: Any) -> str:
    return html.escape(str(value))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{_e(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(f"<th>{_e(cell)}</th>" for cell in head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _charts(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Return the charts, each with title, unit and columns, and each run's lines."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns))
    n_columns = max(1, sum(len(run.columns) for run in runs))
    max_points = max(20, min(2000, MAX_POINTS // n_columns))
    lines = [reduce_lines(run.columns, max_points) for run in runs]
    drawn = [name for name in names if any(name in line for line in lines)]
    charts = [[title, unit, [c for c in columns if c in drawn]] for title, unit, columns in _KNOWN]
    used = {column for _, _, columns in _KNOWN for column in columns} | {"val_ppl"}
    for title, unit, prefix in (
        ("Shares of the mixture", "%", "share_"), ("Validation loss by source", "nats per token", "val_loss_"),
    ):  # fmt: skip
        charts.append([title, unit, [name for name in drawn if name.startswith(prefix)]])
        used |= set(charts[-1][2])
    for name in drawn:
        if name not in used:
            group = [n for n in (name.removeprefix("val_"), f"val_{name.removeprefix('val_')}") if n in drawn]
            charts.append([group[0].replace("_", " "), "", group])
            used |= set(group)
    return {"charts": [chart for chart in charts if chart[2]], "lines": lines}
