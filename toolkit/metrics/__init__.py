"""Metrics of generated answers: functions that ``--eval.metric`` names. Fast to import.

A metric is a function ``(answers, references, rows)``:

- answers: The generated text of each row. A function with an attribute ``needs_log_probs = True`` gets instead, for
  each row, the log-probability in nats of each of the row's ``choices``, given the prompt.
- references: The answer in the data of each row; None without one.
- rows: The rows as they are in the file, as dictionaries. A function with an attribute ``needs_prompts = True`` gets
  instead what the model was asked: dictionaries with ``messages``, ``tools`` or None, and ``where``, file and row.

It returns a dictionary. A list with a number for each row gives the mean and its standard error, a number is taken as
it is. A text after the name in ``--eval.metric NAME:TEXT`` is the function's fourth argument.

Functions run in a process that does nothing else (:mod:`toolkit.metrics.process`), so that they cannot change or hang
the training process.
"""

from collections.abc import Sequence
from typing import NamedTuple

from toolkit.errors import UserError, did_you_mean
from toolkit.extension import registered

_FUNCTIONS = "toolkit.metrics.functions"
METRICS = {
    name: f"{_FUNCTIONS}.{name}"
    for name in ("exact_match", "choice", "number", "regex", "json_valid", "rouge_l", "check", "reward")
}
"""Path of each function of this package."""


class Metric(NamedTuple):
    """An entry of ``--eval.metric``.

    Args:
        entry: The entry, for messages.
        path: Dotted path of the function.
        argument: The text after the name; None without one.
        suffix: What its names end with, because an earlier entry has the same function: _2, _3, ...
    """

    entry: str
    path: str
    argument: str | None = None
    suffix: str = ""


def parse_metrics(value: str | Sequence[str] | None) -> list[Metric]:
    """Return the metrics of ``--eval.metric``: names, ``NAME:TEXT`` or ``MODULE:FUNCTION``, separated by commas."""
    paths = METRICS | {name: entry.path for name, entry in registered("metrics", METRICS).items()}
    metrics: list[Metric] = []
    entries = value.split(",") if isinstance(value, str) else value or []
    for entry in (str(entry).strip() for entry in entries):
        name, colon, argument = entry.partition(":")
        if name in paths:
            metric = Metric(entry, paths[name], argument if colon else None)
        elif name.replace(".", "").isidentifier() and argument.isidentifier():
            metric = Metric(entry, f"{name}.{argument}")
        else:
            hint = did_you_mean(name, paths) or f"; use {', '.join(paths)}, or MODULE:FUNCTION"
            raise UserError(f"--eval.metric {entry}: no such metric{hint}")
        n = sum(other.path == metric.path for other in metrics)
        metrics.append(metric._replace(suffix=f"_{n + 1}" if n else ""))
    return metrics
