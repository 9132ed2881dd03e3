"""What a report says about a run in words and tables, for HTML and Markdown alike."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from toolkit.reporting.run import RunFacts, started_at
from toolkit.ui.formats import format_count, format_loss, format_perplexity, format_seconds

Row = Sequence[str]


def sentences(run: RunFacts) -> list[str]:
    """Return three sentences: what was trained, how, and how well."""
    settings, launch = run.settings, run.launches[-1] if run.launches else {}
    model = settings.get("model_name") or run.model.get("name") or settings.get("checkpoint_dir") or "a model"
    if settings.get("checkpoint_dir") and model != settings["checkpoint_dir"]:
        model = f"{model} from {settings['checkpoint_dir']}"
    count = launch.get("parameters")
    size = f" ({format_count(count)} parameters)" if isinstance(count, int | float) else ""
    keys = ("path", "json_path", "repo_id", "train_data_path", "data_path", "sources")
    sources = [settings.get(f"data.{key}") for key in keys]
    source = next((f" ({show(value)})" for value in sources if value), "")
    objective = settings.get("objective") or "NextToken"
    verb = {"pretrain": "Pretraining", "finetune_full": "Finetuning all weights", "finetune_lora": "Training adapters"}
    what = f"{verb.get(run.training_command, 'Training')} of {model}{size} on {settings.get('data', 'data')}{source}"
    what += f" with objective {objective.rpartition('.')[2]}." if objective != "NextToken" else "."
    steps, tokens, seconds = last(run, "step"), last(run, "tokens"), last(run, "seconds")
    how = f"{run.status[:1].upper()}{run.status[1:]} "
    how += f"at step {steps:,.0f}" if math.isfinite(steps) else "before the first logged step"
    how += f" after {format_count(tokens)} tokens" if math.isfinite(tokens) else ""
    how += f" and {format_seconds(seconds)}" if math.isfinite(seconds) else ""
    how += f", on {launch['devices']}" if launch.get("devices") else ""
    how += f", started {started}" if (started := started_at(run)) else ""
    return [what, f"{how}.", _how_well(run)]


def _how_well(run: RunFacts) -> str:
    if not {"loss", "val_loss"} & run.columns.keys():
        return "No loss was logged."
    text = ""
    if "loss" in run.columns:
        text = f"The training loss went from {format_loss(first(run, 'loss'))} to {format_loss(last(run, 'loss'))}"
    if "val_loss" in run.columns:
        text += f"{'; the' if text else 'The'} validation loss is {format_loss(last(run, 'val_loss'))}"
        if "val_bpb" in run.columns:
            text += f" ({last(run, 'val_bpb'):.4f} bits per byte)"
        values = run.columns["val_loss"]
        import numpy as np

        lowest = int(np.nanargmin(values))
        if values[lowest] < last(run, "val_loss"):
            step = run.columns["step"][lowest]
            text += f", the lowest was {format_loss(float(values[lowest]))} at step {step:,.0f}"
    return f"{text}."


def finite(run: RunFacts, column: str) -> Any:
    """Return the finite values of a column."""
    import numpy as np

    values = run.columns.get(column, np.array([]))
    return values[np.isfinite(values)]


def first(run: RunFacts, column: str) -> float:
    values = finite(run, column)
    return float(values[0]) if len(values) else math.nan


def last(run: RunFacts, column: str) -> float:
    values = finite(run, column)
    return float(values[-1]) if len(values) else math.nan


def figures(run: RunFacts) -> dict[str, str]:
    """Return the key figures of a run by label; without those that were not logged."""
    import numpy as np

    def median(column: str) -> float:
        values = finite(run, column)
        return float(np.median(values)) if len(values) else math.nan

    wait, step = median("data_wait_s"), median("step_s")
    values = {
        "steps": (last(run, "step"), lambda v: f"{v:,.0f}"),
        "tokens": (last(run, "tokens"), format_count),
        "training time": (last(run, "seconds"), format_seconds),
        "training loss": (last(run, "loss"), format_loss),
        "validation loss": (last(run, "val_loss"), format_loss),
        "perplexity": (last(run, "val_ppl"), format_perplexity),
        "bits per byte": (last(run, "val_bpb"), lambda v: f"{v:.4f}"),
        "tokens/s (median)": (median("tokens_per_sec"), format_count),
        "MFU (median)": (median("mfu"), lambda v: f"{v:.1%}"),
        "peak memory": (last(run, "peak_memory_gb"), lambda v: f"{v:.3g} GB"),
        "waiting for data": (wait / step if step else math.nan, lambda v: f"{v:.1%} of a step"),
    }
    return {label: write(value) for label, (value, write) in values.items() if math.isfinite(value)}


def setting_rows(runs: Sequence[RunFacts]) -> list[Row]:
    """Return rows of name, default, and each run's value, of settings that differ from defaults or between runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.changed))
    names += [n for n in dict.fromkeys(n for run in runs for n in run.settings) if n not in names and _differs(runs, n)]
    rows: list[Row] = []
    for name in names:
        default = next((run.changed[name][1] for run in runs if name in run.changed), None)
        rows.append([name, show(default), *(show(run.settings[name]) if name in run.settings else "" for run in runs)])
    return rows


def _differs(runs: Sequence[RunFacts], name: str) -> bool:
    return len({show(run.settings.get(name)) for run in runs}) > 1


def environment_rows(runs: Sequence[RunFacts]) -> list[Row]:
    """Return rows of name and each run's value, of its last launch."""
    launches = [run.launches[-1] if run.launches else {} for run in runs]
    facts = [
        {"devices": launch.get("devices"), "precision": launch.get("precision"), "strategy": launch.get("strategy")}
        | (launch["environment"] if isinstance(launch.get("environment"), dict) else {})
        for launch in launches
    ]
    names = dict.fromkeys(name for values in facts for name in values)
    rows = [[str(name), *(show(values.get(name, "")) for values in facts)] for name in names]
    return [row for row in rows if any(cell not in ("", "null") for cell in row[1:])]


def checkpoint_rows(runs: Sequence[RunFacts]) -> list[Row]:
    """Return rows of run, checkpoint, step, size and check."""
    return [
        [run.name, c.name, f"{c.step:,}" if c.step >= 0 else "", "" if c.size is None else f"{c.size / 1e6:,.1f} MB",
         c.check]
        for run in runs for c in run.checkpoints
    ]  # fmt: skip


def show(value: Any) -> str:
    """Return a setting as on the command line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:300]}..."
