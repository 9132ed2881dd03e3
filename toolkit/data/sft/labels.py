"""Read the texts and labels of a classification, and encode the labels as numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from toolkit.data.base import LabelSet
from toolkit.data.sft.messages import (
    EmptyAnswerError,
    describe_columns,
    describe_type,
    parse_conversation,
    require_string,
    require_unicode,
)
from toolkit.data.sft.schemas import CONVERSATION, Record
from toolkit.errors import UserError, did_you_mean, join_first
from toolkit.models.config_checks import ProblemType

if TYPE_CHECKING:
    import numpy as np

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
ClassWeights = Literal["balanced"] | dict[str, float] | None
_PROBLEM = "--data.problem_type"


@dataclass(frozen=True)
class Labeling:
    """How to read the rows of a classification, see :class:`toolkit.data.sft.classification.Classification`.

    Args:
        known: The labels of the model that is trained or evaluated; None takes those of the data.
    """

    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str = "label"
    problem_type: ProblemType | None = None
    class_weights: ClassWeights = None
    known: LabelSet | None = None

    def parse(self, row: Any, where: str, needs_label: bool = True) -> Record:
        """Parse a row into a record.

        Raises:
            EmptyAnswerError: The text is empty.
        """
        if not isinstance(row, dict):
            raise UserError(f"{where}: is {describe_type(row)}, not an object with a text and a label")
        names = (self.text_column,) if self.text_column else ("text", *CONVERSATION)
        column = next((name for name in names if row.get(name) is not None), None)
        if column is None:
            hint = "set --data.text_column" if self.text_column is None else "see --data.text_column"
            raise UserError(f"{where}: has no {names[0]}; {describe_columns(row)}; {hint}")
        label = self._read_label(row, where) if needs_label else None
        require_unicode(row[column], f"{where}: {column}")
        if isinstance(row[column], list) or column in CONVERSATION:
            if self.text_pair_column is not None:
                raise UserError(
                    f"{where}: {column} is a conversation, which has no pair; remove --data.text_pair_column"
                )
            return Record(parse_conversation(row[column], f"{where}: {column}"), None, where, label=label)
        text = require_string(row[column], f"{where}: {column}")
        if not text.strip():
            raise EmptyAnswerError(f"{where}: has an empty {column}; fix or remove this row")
        if (pair := self.text_pair_column) is not None:
            if row.get(pair) is None:
                raise UserError(f"{where}: has no {pair}; {describe_columns(row)}; see --data.text_pair_column")
            require_unicode(row[pair], f"{where}: {pair}")
            text = f"{text}\n{require_string(row[pair], f'{where}: {pair}')}"
        return Record(None, text, where, has_eos=False, label=label)

    def _read_label(self, row: Any, where: str) -> Any:
        column = self.label_column
        value = row.get(column)
        if value is None or value == "":
            near = did_you_mean(column, row) or f"; {describe_columns(row)}; see --data.label_column"
            raise UserError(f"{where}: has no {column}{near if column not in row else '; fix or remove this row'}")
        if isinstance(value, str) and value.startswith("[") and self.problem_type in (None, MULTI):  # CSV
            with suppress(ValueError):
                value = json.loads(value)
        items = value if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, str | int | float) or (isinstance(item, float) and not math.isfinite(item)):
                raise UserError(f"{where}: {column} {item!r:.40}: must be a string, a finite number or a list of them")
            if isinstance(item, str) and item.strip().lower() in ("nan", "inf", "-inf"):
                raise UserError(f"{where}: {column} {item!r}: is not a label; fix or remove this row")
        return value

    def encode(self, records: Sequence[Record], is_train: np.ndarray) -> tuple[np.ndarray, tuple[list[str], str, str]]:
        """Encode the labels of all samples.

        Args:
            records: The samples in order.
            is_train: (n,), whether each is in the training files, whose labels are the model's.

        Returns:
            fp32 targets (n, columns): of a single label its index, of several labels 0 or 1 for each, of regression the
            number; then the weight of the sample in the loss. And names, problem type and a description of the labels.
        """
        import numpy as np

        problem = self.problem_type or (self.known.problem_type if self.known else _infer_problem(records))
        if self.known is not None and problem != self.known.problem_type:
            raise UserError(f"{_PROBLEM} {problem}: the model's head is for {self.known.problem_type}; remove it")
        if problem == REGRESSION:
            if self.class_weights is not None:
                raise _no_classes(self.class_weights)
            numbers = [_to_number(record) for record in records]
            targets = np.array([[number, 1.0] for number in numbers], np.float32).reshape(-1, 2)
            text = f"label: mean {np.mean(numbers):.4g}, from {min(numbers):.4g} to {max(numbers):.4g} ({REGRESSION})"
            return targets, ([self.label_column] if self.known is None else self.known.names, REGRESSION, text)
        by_row = [_names_of(record, problem) for record in records]
        counts = Counter(name for names, trains in zip(by_row, is_train, strict=True) if trains for name in names)
        names = self.known.names if self.known is not None else _sort(counts)
        if len(names) < (2 if problem == SINGLE else 1):
            raise UserError(f"--data.label_column {self.label_column}: all rows have the same label {names}; give two")
        index = {name: i for i, name in enumerate(names)}
        for record, names_of_row in zip(records, by_row, strict=True):
            if unknown := [name for name in names_of_row if name not in index]:
                of = "the training data" if self.known is None else "the model"
                raise UserError(
                    f"{record.where}: {self.label_column} {unknown[0]!r:.60}: {of} has only the labels "
                    f"{join_first(names, 10)}"
                )
        text = ", ".join(f"{name} {counts[name]:,}" for name in names[:20]) + (", ..." if len(names) > 20 else "")
        described = (names, problem, f"{len(names)} labels: {text} ({problem})")
        if problem == SINGLE:
            weights = self._weights(names, counts)
            ids = [index[names_of_row[0]] for names_of_row in by_row]
            return np.array([[i, weights[i]] for i in ids], np.float32).reshape(-1, 2), described
        if self.class_weights is not None:
            raise _no_classes(self.class_weights)
        targets = np.zeros((len(records), len(names) + 1), np.float32)
        targets[:, -1] = 1
        for line, names_of_row in zip(targets, by_row, strict=True):
            line[[index[name] for name in names_of_row]] = 1
        return targets, described

    def _weights(self, names: list[str], counts: Counter[str]) -> list[float]:
        """Return the weight of each label; "balanced" is scikit-learn's, n / (labels x n of the label)."""
        given = self.class_weights
        if given == "balanced":
            return [sum(counts.values()) / (len(names) * max(1, counts[name])) for name in names]
        for name in given or {}:
            if name not in names:
                raise UserError(f"--data.class_weights {name}: no such label; the labels are {join_first(names, 10)}")
        return [float((given or {}).get(name, 1.0)) for name in names]


def _no_classes(value: Any) -> UserError:
    return UserError(f"--data.class_weights {value}: is only for one label per text ({SINGLE}); remove it")


def _infer_problem(records: Sequence[Record]) -> str:
    """Lists are several labels, numbers with a fraction regression, and all others one label."""
    are_lists = [isinstance(record.label, list) for record in records]
    if any(are_lists):
        if not all(are_lists):
            where = records[are_lists.index(False)].where
            raise UserError(f"{where}: the label is no list, as others are; make it one, or set {_PROBLEM}")
        return MULTI
    numbers = [_as_number(record.label) for record in records]
    is_number = all(number is not None for number in numbers)
    # a number of JSON that is written with a fraction is a float, also 4.0
    has_fraction = any(isinstance(r.label, float) or "." in str(r.label) for r in records)
    return REGRESSION if is_number and has_fraction else SINGLE


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool | list):
        return None
    with suppress(ValueError):
        return float(value)
    return None


def _to_number(record: Record) -> float:
    number = _as_number(record.label)
    if number is None:
        raise UserError(f"{record.where}: label {record.label!r:.40}: must be a number ({_PROBLEM} {REGRESSION})")
    return number


def _names_of(record: Record, problem: str) -> list[str]:
    """Return the names of a row's labels: strings as they are, numbers and booleans as in JSON."""
    value = record.label
    if isinstance(value, list) and problem == SINGLE:
        raise UserError(f"{record.where}: label {value!r:.40}: is a list; set {_PROBLEM} {MULTI}")
    values = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(item if isinstance(item, str) else json.dumps(item) for item in values))


def _sort(names: Counter[str]) -> list[str]:
    """Sort labels: as numbers if all are integers, otherwise as text."""
    are_integers = all(name.lstrip("-").isdecimal() for name in names)
    return sorted(names, key=(lambda name: (int(name), name)) if are_integers else None)  # type: ignore[arg-type]
