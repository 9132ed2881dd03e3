"""What a report says about runs, in words and tables, for HTML and Markdown alike."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from toolkit.checkpoints.store import BEST
from toolkit.config import AUTO
from toolkit.ui.formats import format_count, format_loss, format_perplexity, format_seconds
from toolkit.ui.progress import VALIDATION_METRICS, capitalized, format_metric, metric_names
from toolkit_report.compare import AXES, compare, finite, last
from toolkit_report.run import RunFacts

Rows = list[list[str]]
_VERBS = {
    "pretrain": "Pretraining", "finetune_full": "Finetuning of all weights", "finetune_lora": "Training of adapters",
}  # fmt: skip
_WORDS = {  # parts of columns' names
    "^loss$": "training loss", "^val_": "validation ", "^grad_": "gradient ", "^mfu$": "MFU", "bpb$": "bits per byte",
    "ppl$": "perplexity", "rouge_l": "ROUGE-L", r"\bf1": "F1", "^sft_": "SFT ", "_per_sec$": "/s", "_gb$": ", GB",
    "_s$": ", s",
}  # fmt: skip


def parts(runs: Sequence[RunFacts]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a report as (kind, content).

    Kinds: lead (name, sentences), figures and table (head, rows), note and heading (text), charts (None), samples
    (list of title, prompt, answer; the last sample first) and code (text).
    """
    names, is_one = [run.name for run in runs], len(runs) == 1
    yield from (("lead", (run.name, " ".join(sentences(run)))) for run in runs)
    columns = ["value"] if is_one else names
    yield "figures", (["", *columns], _side_by_side([figures(run) for run in runs]))
    if not is_one:
        yield from _compared(runs)
    for run in runs:
        lacks_axis = run.columns and "tokens" not in run.columns
        notes = [*run.notes, *(["metrics.csv has no column tokens: no curves over tokens"] if lacks_axis else [])]
        yield from (("note", line if is_one else f"{run.name}: {line}") for line in notes)
    if any(run.columns for run in runs):
        yield from (("heading", "Curves"), ("charts", None))
    if any(run.samples for run in runs):
        yield "heading", "Samples over time"
        yield from (("samples", _samples(run, "" if is_one else f"{run.name}, ")) for run in runs)
    rows = [
        [run.name, c.name, f"{c.step:,}" if c.step >= 0 else "", f"{c.size / 1e6:,.1f} MB" if c.size else "", c.check]
        for run in runs
        for c in run.checkpoints
    ]
    if rows:
        head = ["run", "checkpoint", "step", "size", "check"]
        yield "heading", "Checkpoints"
        yield "table", (head[is_one:], [row[is_one:] for row in rows])
    if rows := _setting_rows(runs):
        yield "heading", "Settings that differ from the defaults" + " or between the runs" * (not is_one)
        yield "table", (["setting", "default", *columns], rows)
    if commands := [run.command for run in runs if run.command]:
        yield "heading", "Command that repeats the run" if is_one else "Commands that repeat the runs"
        yield from (("code", command) for command in commands)
    if rows := _side_by_side([_environment(run) for run in runs]):
        yield "heading", "Environment of the last launch"
        yield "table", (["", *columns], rows)
    if any(run.warnings for run in runs):
        yield "heading", "Warnings and notes printed by the run"
        yield from (("note", line if is_one else f"{run.name}: {line}") for run in runs for line in run.warnings)


def _compared(runs: Sequence[RunFacts]) -> Iterator[tuple[str, Any]]:
    """Yield the comparison of several runs, with differences from the first one."""
    comparison = compare(runs)
    groups, unit = comparison["groups"], AXES[comparison["axis"]]
    first = purpose(runs)
    columns = sorted(
        dict.fromkeys(name for group in groups for name in group["metrics"] if name != comparison["axis"]),
        key=lambda name: (first.index(name) if name in first else len(first), not name.startswith("val_")),
    )
    if columns:
        yield "heading", f"Comparison {'at equal' if comparison['is_equal'] else 'after the same'} {unit}"
        end = comparison["end"]
        head = [f"{format_seconds(end)} of training" if unit == AXES["seconds"] else f"{end:,.0f} {unit}"]
        sizes = [len(group["runs"]) for group in groups]
        head += [group["name"] + f" ({n} runs)" * (n > 1) for group, n in zip(groups, sizes, strict=True)]
        yield "table", (head, [[label(c), *(_estimate(group["metrics"].get(c)) for group in groups)] for c in columns])
        if 1 in sizes:
            yield "note", "One run does not show the noise: repeat each with --seed 1, 2, ... for standard errors."


def label(column: str) -> str:
    """Return the words for a column of metrics.csv, with its unit."""
    for pattern, words in _WORDS.items():
        column = re.sub(pattern, words, column)
    return column.replace("_", " ")


def _estimate(value: Mapping[str, float | None] | None) -> str:
    """Return ``3.1234 ± 0.002 (-0.012 ± 0.003)``: mean and difference, with standard errors."""
    if value is None:
        return ""
    errors = [
        f" ± {_digits(v, 2)}" if (v := value[name]) is not None else "" for name in ("stderr", "difference_stderr")
    ]
    text, difference = f"{_digits(value['mean'] or 0.0, 6)}{errors[0]}", value["difference"]
    return text if difference is None else f"{text} ({_digits(difference, 4, '+')}{errors[1]})"


def _digits(value: float, digits: int, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if abs(value) >= 10**digits else f"{value:{sign},.{digits}g}"


def sentences(run: RunFacts) -> list[str]:
    """Return two sentences: what was trained, and how far. The figures follow in a table."""
    settings, launch = run.settings, run.launch
    model = settings.get("model_name") or launch.get("model") or "a model"
    count = launch.get("parameters")
    size = f" ({format_count(count)} parameters)" if isinstance(count, int | float) else ""
    base = settings.get("checkpoint_dir") or settings.get("initial_checkpoint_dir")
    what = f"{_VERBS.get(run.training_command, 'Training')} of {model}{size}{f' from {base}' if base else ''}"
    what += f" on {settings.get('data', 'data')}"
    what += f" with the objective {settings['objective']}" if settings.get("objective") else ""
    step = last(run, "step")
    how = f"{capitalized(run.status)} "
    how += f"at step {step:,.0f}" if math.isfinite(step) else "before the first logged step"
    how += f", on {launch['devices']}" if launch.get("devices") else ""
    with suppress(LookupError, TypeError, ValueError, OverflowError, OSError):
        how += time.strftime(", started on %Y-%m-%d at %H:%M", time.localtime(run.launches[0]["time"]))
    return [f"{what}.", f"{how}."]


def median(run: RunFacts, column: str) -> float:
    values = finite(run, column)
    return float(np.median(values)) if len(values) else math.nan


def purpose(runs: Sequence[RunFacts]) -> list[str]:
    """Return the columns that say what the runs were for: the one of ``--eval.best_by``, then scores, no losses."""
    columns = dict.fromkeys(name for run in runs for name in run.columns)
    names = [*filter(None, map(_best_by, runs)), *metric_names(columns)]
    for name in ("accuracy", "reward_margin", "reward"):
        names += [name if f"val_{name}" not in columns else f"val_{name}"]
    return [name for name in dict.fromkeys(names) if name in columns]


def _best_by(run: RunFacts) -> str:
    """Return the column of ``--eval.best_by``; empty with auto."""
    name = str(run.settings.get("eval.best_by", AUTO)).removeprefix("val_")
    return "" if name == AUTO else f"val_{name}"


def _score(column: str) -> str:
    return label(column).removeprefix("validation ") if column.startswith("val_") else f"training {label(column)}"


def figures(run: RunFacts) -> dict[str, str]:
    """Return the key figures of a run by label, what it was for first, without those that were not logged."""
    losses, val_losses, steps = finite(run, "loss"), finite(run, "val_loss"), run.columns.get("step", ())
    metrics = {name: value for name in run.columns if math.isfinite(value := last(run, name))}
    shown: dict[str, str] = {}
    if best_by := _best_by(run):
        at = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.name == BEST]
        for row in np.flatnonzero(np.isin(steps, at) & np.isfinite(run.columns.get(best_by, math.nan))):
            values = {name: v for name, column in run.columns.items() if math.isfinite(v := column[row])}
            shown[f"best {_score(best_by)}"] = f"{format_metric(best_by, values)} at step {steps[row]:,.0f}"
    scores = [name for name in purpose([run]) if name in metrics and name not in VALIDATION_METRICS]
    shown |= {_score(name): format_metric(name, metrics) for name in scores}
    values = {
        "validation loss": (last(run, "val_loss"), format_loss),
        "lowest validation loss": (math.nan, format_loss),
        "perplexity": (last(run, "val_ppl"), format_perplexity),
        "bits per byte": (last(run, "val_bpb"), lambda v: f"{v:.4f}"),
        "training loss": (last(run, "loss"), format_loss),
        "first training loss": (losses[0] if len(losses) > 1 else math.nan, format_loss),
        "steps": (last(run, "step"), lambda v: f"{v:,.0f}"),
        "tokens": (last(run, "tokens"), format_count),
        "training time": (last(run, "seconds"), format_seconds),
        "tokens/s (median)": (median(run, "tokens_per_sec"), format_count),
        "MFU (median)": (median(run, "mfu"), lambda v: f"{v:.1%}"),
        "peak memory": (last(run, "peak_memory_gb"), lambda v: f"{v:.3g} GB"),
        "waiting for data": (median(run, "data_wait_s") / (median(run, "step_s") or math.nan), lambda v: f"{v:.1%}"),
    }
    if not best_by and len(val_losses) and (lowest := val_losses.min()) < val_losses[-1]:
        step = steps[run.columns["val_loss"] == lowest][0]
        values["lowest validation loss"] = (lowest, lambda v: f"{format_loss(v)} at step {step:,.0f}")
    shown |= {label: write(value) for label, (value, write) in values.items() if math.isfinite(value)}
    shown |= {"energy": run.energy} if run.energy else {}
    return shown


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> Rows:
    """Return rows of a label and each run's value."""
    places: dict[str, int] = {}  # a label is as late as in any run
    for values in columns:
        places |= {label: max(place, places.get(label, 0)) for place, label in enumerate(values)}
    labels = sorted(places, key=places.__getitem__)
    return [[label, *(values.get(label, "") for values in columns)] for label in labels]


def _setting_rows(runs: Sequence[RunFacts]) -> Rows:
    """Return rows of name, default and each run's value, of settings that differ from the default or between runs."""
    defaults = {name: _show(default) for run in runs for name, (_, default) in run.changed.items()}
    values = [{name: _show(value) for name, value in run.settings.items()} for run in runs]
    shared = [name for name in values[0] if all(name in run for run in values)]
    names = dict.fromkeys([*defaults, *(name for name in shared if len({run[name] for run in values}) > 1)])
    return [[name, defaults.get(name, ""), *(run.get(name, "") for run in values)] for name in names]


def _environment(run: RunFacts) -> dict[str, str]:
    values = {name: run.launch.get(name) for name in ("devices", "batch", "precision", "strategy")}
    packages = run.launch.get("environment")
    values |= packages if isinstance(packages, dict) else {}
    return {str(name): _show(value) for name, value in values.items() if value is not None}


def _samples(run: RunFacts, prefix: str) -> list[tuple[str, str, str]]:
    return [
        (
            f"{prefix}after step {sample.get('step')}{sample.get('note', '')}",
            str(sample.get("prompt")),
            str(sample.get("text")),
        )
        for sample in reversed(run.samples)
    ]


def _show(value: Any) -> str:
    """Return a setting as on the command line, shortened."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:300]}..."
