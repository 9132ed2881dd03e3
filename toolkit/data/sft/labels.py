"""Read the texts and labels of a classification, and encode the labels as numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from toolkit.data.base import LabelSet
from toolkit.data.sft.schemas import Record, as_number, parse_row
from toolkit.errors import UserError, join_first
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
        model_labels: The labels of the model that is trained or evaluated; None takes the data's.
    """

    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str = "label"
    problem_type: ProblemType | None = None
    class_weights: ClassWeights = None
    model_labels: LabelSet | None = None

    @property
    def columns(self) -> dict[str, str]:
        """The columns of rows by known name."""
        names = {"text": self.text_column, "text_pair": self.text_pair_column, "label": self.label_column}
        return {name: column for name, column in names.items() if column is not None}

    def parse(self, row: Any, where: str) -> Record:
        """Parse a row into a record.

        Raises:
            EmptyAnswerError: The text or the label is empty.
        """
        (record,) = parse_row(row, where, self.columns, "labeled")
        return replace(record, label=self._read_label(record.label, where))

    def _read_label(self, value: Any, where: str) -> Any:
        """Check a label. In CSV, a list is JSON."""
        if isinstance(value, str) and value.startswith("[") and self.problem_type in (None, MULTI):
            with suppress(ValueError):
                value = json.loads(value)
        for item in value if isinstance(value, list) else [value]:
            is_valid = isinstance(item, str | int | float) and str(item).lower() not in ("nan", "inf", "-inf")
            if not is_valid:
                raise UserError(f"{where}: {self.label_column} {item!r:.40}: must be text, a number, or a list of them")
        return value.strip() if isinstance(value, str) else value

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

        if not records:  # all are dropped
            return np.zeros((0, 2), np.float32), ([], SINGLE, "no labels")
        model_labels = self.model_labels
        problem = self.problem_type or (model_labels.problem_type if model_labels else _infer_problem(records))
        if model_labels is not None and problem != model_labels.problem_type:
            raise UserError(f"{_PROBLEM} {problem}: the model's head is for {model_labels.problem_type}; remove it")
        if self.class_weights is not None and problem != SINGLE:
            raise UserError(f"--data.class_weights {self.class_weights}: is only for one label per text; remove it")
        if problem == REGRESSION:
            numbers = [_to_number(record) for record in records]
            text = f"label: mean {np.mean(numbers):.4g}, from {min(numbers):.4g} to {max(numbers):.4g} ({REGRESSION})"
            targets = np.array([[number, 1] for number in numbers], np.float32)
            return targets, (model_labels.names if model_labels else [self.label_column], REGRESSION, text)
        by_row = [_names_of(record, problem) for record in records]
        counts = Counter(name for names, trains in zip(by_row, is_train, strict=True) if trains for name in names)
        names = model_labels.names if model_labels else _sort(counts)
        if len(names) < 2 and problem == SINGLE:
            raise UserError(f"--data.label_column {self.label_column}: all rows have the same label {names}; give two")
        origin = "the model" if model_labels else "the training data"
        for record, names_of_row in zip(records, by_row, strict=True):
            for name in set(names_of_row) - {*names}:
                has = f"{origin} has only the labels {join_first(names, 10)}"
                raise UserError(f"{record.where}: {self.label_column} {name!r:.60}: {has}")
        index = {name: i for i, name in enumerate(names)}
        text = join_first([f"{name} {counts[name]:,}" for name in names], 20)
        if problem == SINGLE:
            weights = self._weights(names, counts)
            targets = np.array([[index[name], weights[name]] for (name,) in by_row], np.float32)
        else:
            targets = np.array([[*(name in row for name in names), 1] for row in by_row], np.float32)
        return targets, (names, problem, f"{len(names)} labels: {text} ({problem})")

    def _weights(self, names: list[str], counts: Counter[str]) -> dict[str, float]:
        """Return the weight of each label; "balanced" is scikit-learn's, n / (labels x n of the label)."""
        if self.class_weights == "balanced":
            return {name: counts.total() / (len(names) * max(1, counts[name])) for name in names}
        chosen = self.class_weights or {}
        for name in chosen.keys() - {*names}:
            raise UserError(f"--data.class_weights {name}: no such label; the labels are {join_first(names, 10)}")
        return dict.fromkeys(names, 1.0) | chosen


def _infer_problem(records: Sequence[Record]) -> str:
    """Lists are several labels, numbers with a fraction regression, and all others one label."""
    are_lists = [isinstance(record.label, list) for record in records]
    if any(are_lists):
        if not all(are_lists):
            where = records[are_lists.index(False)].where
            raise UserError(f"{where}: the label is no list, as others are; make it one, or set {_PROBLEM}")
        return MULTI
    # a number of JSON that is written with a fraction is a float, also 4.0
    has_fraction = any({*".eE"} & {*str(record.label)} for record in records)
    return REGRESSION if has_fraction and all(as_number(r.label) is not None for r in records) else SINGLE


def _to_number(record: Record) -> float:
    number = as_number(record.label)
    if number is None:
        raise UserError(f"{record.where}: label {record.label!r:.40}: must be a number ({_PROBLEM} {REGRESSION})")
    return number


def _names_of(record: Record, problem: str) -> list[str]:
    """Return the names of a row's labels: strings as they are, numbers and booleans as in JSON."""
    values = record.label if isinstance(record.label, list) else [record.label]
    if values is record.label and problem == SINGLE:
        raise UserError(f"{record.where}: label {values!r:.40}: is a list; set {_PROBLEM} {MULTI}")
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def _sort(names: Counter[str]) -> list[str]:
    """Sort labels: as numbers if all are integers, otherwise as text."""
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)
