"""Render a report as one self-contained HTML page: data, styles and scripts inline, nothing from the network."""

import base64
import hashlib
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.errors import one_line
from toolkit.escape import html_text, script_json
from toolkit.io.atomic import write_atomic
from toolkit.ui.events import REPORT
from toolkit.ui.progress import capitalized
from toolkit_report.compare import AXES, compare
from toolkit_report.plot import PLOT, plot_loss
from toolkit_report.run import RunFacts, read_run
from toolkit_report.series import MAX_POINTS, MAX_POINTS_OF_A_LINE, reduce_lines
from toolkit_report.text import label, parts, purpose

_CHARTS = (  # title, unit, patterns of columns
    ("Loss", "nats per token", ("loss", "val_loss")),
    ("Validation loss per byte", "bits per byte", ("val_bpb",)),
    ("Validation loss by source", "nats per token", ("val_loss_*",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Gradient norm before clipping", "", ("grad_norm",)),
    ("Throughput of all devices", "tokens/s", ("tokens_per_sec",)),
    ("Model FLOPs utilization", "%", ("mfu",)),
    ("Peak memory per device", "GB", ("peak_memory_gb",)),
    ("Wait for data in a step", "s", ("data_wait_s",)),
    ("Time of a step", "s", ("step_s", "update_s")),
    ("Shares of the mixture", "%", ("share_*",)),
)
_N_LOSSES = 3
"""Metrics of callbacks and objectives follow these charts."""
_CURVES = """<form id="switches" hidden>
<label>x axis <select id="axis"><option value="0">steps</option><option value="1">tokens</option>
<option value="2">seconds of training</option></select></label>
<label><input type="checkbox" id="log"> log scale</label>
<label><input type="checkbox" id="all"> show outliers</label>
<span>drag to zoom, double-click to reset</span></form>
<div id="charts"><noscript>The curves need JavaScript.</noscript></div>"""


def render_page(runs: Sequence[RunFacts]) -> str:
    """Return the page of one or several runs. All text from the runs is escaped, and a policy forbids other scripts."""
    data = json.dumps({"runs": [run.name for run in runs], **_charts(runs)}, separators=(",", ":"), allow_nan=False)
    # uPlot formats numbers in the browser's language, which is not a valid one in a POSIX locale
    script = (
        'try { new Intl.NumberFormat(navigator.language) } catch { Object.defineProperty(navigator, "language", '
        f'{{value: "en-US"}}) }}\n{_resource("uplot.min.js")}\n{_resource("page.js")}'
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = html_text(", ".join(run.name for run in runs))
    body = "\n".join(_element(kind, content, runs) for kind, content in parts(runs))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Report: {title}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>{_resource("uplot.min.css")}
{_resource("page.css")}</style></head>
<body><main>
<h1>{title}</h1>
{body}
{"".join(f'<p class="place">{html_text(run.place)}</p>' for run in runs)}
</main>
<script type="application/json" id="data">{script_json(data)}</script>
<script>{script}</script></body></html>
"""


def write_report(out_dir: Path, status: str) -> str | None:
    """Write loss.png, then report.html at the end of a run. Return what was not written: the run must not fail."""
    problem = None
    try:
        run = read_run(out_dir, status)
        try:
            plot_loss(run, out_dir / PLOT)
        except Exception as error:
            problem = f"{PLOT} was not written: {one_line(error) or type(error).__name__}"
        write_atomic(out_dir / REPORT, render_page([run]).encode())  # the last file of a run
    except Exception as error:
        problem = f"{REPORT} was not written: {one_line(error) or type(error).__name__}"
    return problem


def _resource(name: str) -> str:
    return (files("toolkit_report") / name).read_text(encoding="utf-8")


def _element(kind: str, content: Any, runs: Sequence[RunFacts]) -> str:
    """Return a part of :func:`toolkit_report.text.parts` as HTML."""
    if kind == "charts":
        return _CURVES
    if kind == "lead":
        number = [run.name for run in runs].index(content[0])
        dot = f'<i class="dot" style="background:var(--c{number % 8})"></i>'
        mark = f"{dot}<b>{html_text(content[0])}</b> " if len(runs) > 1 else ""
        return f'<p class="lead">{mark}{html_text(content[1])}</p>'
    if kind == "figures" and len(runs) == 1:
        tiles = (f"<div><dt>{html_text(label)}</dt><dd>{html_text(value)}</dd></div>" for label, value in content[1])
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    if kind in ("figures", "table"):
        rows = "".join(_row(row, "td") for row in content[1])
        head = _row(content[0], "th")
        return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    if kind == "samples":
        return "".join(
            f"<details{' open' * (number == 0)}><summary>{html_text(title)}</summary>"
            f"<pre><span>{html_text(prompt[:4000])}</span>{html_text(answer[:4000])}</pre></details>"
            for number, (title, prompt, answer) in enumerate(content)
        )
    start, end = {"heading": ("<h2>", "</h2>"), "code": ("<pre>", "</pre>"), "note": ('<p class="note">', "</p>")}[kind]
    return f"{start}{html_text(content)}{end}"


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _charts(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Return the charts, each with title, unit and columns, and each run's lines, in the order of importance."""
    max_points = max(20, min(MAX_POINTS_OF_A_LINE, MAX_POINTS // max(1, sum(len(run.columns) for run in runs))))
    lines = [reduce_lines(run.columns, max_points) for run in runs]
    unused = list(dict.fromkeys(name for run in lines for name in run if name != "val_ppl"))
    charts = [
        (title, unit, [name for name in unused if any(fnmatchcase(name, pattern) for pattern in patterns)])
        for title, unit, patterns in _CHARTS
    ]
    names = {name: label(name) for name in unused}
    others: dict[str, list[str]] = {}  # of callbacks and objectives: a metric and its validation
    for name in sorted(unused, key=lambda name: name.startswith("val_")):
        if not any(name in columns for _, _, columns in charts):
            others.setdefault(name.removeprefix("val_"), []).append(name)
    charts[_N_LOSSES:_N_LOSSES] = [(capitalized(label(name)), "", columns) for name, columns in others.items()]
    first = {name: place for place, name in enumerate(purpose(runs))}
    charts.sort(key=lambda chart: min((first.get(name, len(first)) for name in chart[2]), default=0))
    if any(run.settings.get("objective") for run in runs):  # not nats per token
        charts = [(title, unit if unit != "nats per token" else "", columns) for title, unit, columns in charts]
    axis = [*AXES].index(compare(runs)["axis"])
    return {"charts": [chart for chart in charts if chart[2]], "lines": lines, "labels": names, "axis": axis}
