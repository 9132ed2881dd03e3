"""Metrics of generated answers: functions that ``--eval.metric`` names. Fast to import.

A metric is a function ``(answers, references, rows)``:

- answers: The generated text of each row.
- references: The answer in the data of each row; None without one.
- rows: The rows as they are in the file, as dictionaries.

Attributes of a function may ask for others, see :class:`Traits`.

It returns a dictionary. A list with a number for each row gives the mean and its standard error, a number is taken as
it is. A text after the name in ``--eval.metric NAME:TEXT`` is the function's fourth argument.

Functions run in a process that does nothing else (:mod:`toolkit_metric.process`), so that they cannot change or hang
the training process.
"""

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from toolkit.errors import UserError, did_you_mean
from toolkit.extension import registered
from toolkit_metric import EXTENSION

METRICS = EXTENSION.metrics
"""Path of each function of this package."""


class Traits(NamedTuple):
    """What a function declares by attributes of these names.

    Args:
        needs_log_probs: It gets, instead of answers, the log-probabilities in nats of each row's ``choices``.
        needs_prompts: It gets, instead of rows, dictionaries with the ``messages`` that the model was asked, ``tools``
            or None, and ``where``, file and row.
        needs_references: Each row must have a reference.
        higher_is_better: Whether the highest value is the best one; for several names, a dictionary.
    """

    needs_log_probs: bool = False
    needs_prompts: bool = False
    needs_references: bool = False
    higher_is_better: bool | dict[str, bool | None] | None = None


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


def parse_metrics(value: str | Sequence[str] | None, flag: str = "--eval.metric") -> list[Metric]:
    """Return the metrics of an option: names, ``NAME:TEXT`` or ``MODULE:FUNCTION``, separated by commas."""
    paths = {name: entry.path for name, entry in registered("metrics").items()}
    metrics: list[Metric] = []
    entries = value.split(",") if isinstance(value, str) else value or []
    for entry in (str(entry).strip() for entry in entries):
        name, colon, argument = entry.partition(":")
        if name in paths:
            metric = Metric(entry, paths[name], argument if colon else None)
            _require_argument(f"{flag} {entry}", name, argument)
        elif name.endswith(".py"):
            raise UserError(f"{flag} {entry}: is a file; write {name.removesuffix('.py')}:{argument}")
        elif name.replace(".", "").isidentifier() and argument.isidentifier():
            metric = Metric(entry, f"{name}.{argument}")
        else:
            hint = did_you_mean(name, paths) or f"; use {', '.join(paths)}, or MODULE:FUNCTION"
            raise UserError(f"{flag} {entry}: no such metric{hint}")
        n = sum(other.path == metric.path for other in metrics)
        metrics.append(metric._replace(suffix=f"_{n + 1}" if n else ""))
    return metrics


def _require_argument(shown: str, name: str, argument: str) -> None:
    """Raise UserError if a function of this package cannot use the text after its name."""
    fix = ""
    try:
        if name == "regex" and re.compile(argument).search(""):
            fix = "the pattern matches an empty answer, so every answer would be right; write regex:PATTERN"
        elif name == "check" and not shlex.split(argument):
            fix = "has no command; write check:COMMAND, such as check:'python checker.py'"
        elif name == "reward" and not argument:
            fix = "has no folder; write reward:FOLDER, a checkpoint of a reward model"
    except (re.error, ValueError) as error:
        fix = str(error)
    if fix:
        raise UserError(f"{shown}: {fix}")
