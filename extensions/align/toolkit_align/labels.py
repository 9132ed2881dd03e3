"""Read the texts and labels of a classification, and encode the labels as numbers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from toolkit.data.base import LabelSet
from toolkit.data.sft.readers import ClassNames
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
    """How to read the rows of a classification, see :class:`toolkit_align.classification.Classification`.

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
        return {name: column for name, column in names.items() if column}

    def parse(self, row: Any, where: str, class_names: ClassNames) -> Record:
        """Parse a row into a record.

        Args:
            class_names: Names of the labels 0, 1, ... by column, from the data's features.

        Raises:
            EmptyAnswerError: The text or the label is empty.
        """
        (record,) = parse_row(row, where, self.columns, "labeled")
        value, names, model = record.label, class_names.get(self.label_column), self.model_labels
        if names and model and not {*names} <= {*model.names}:
            names = None  # a model of an older version has the numbers
        if isinstance(value, str) and value.startswith("[") and self.problem_type != SINGLE:  # in CSV, a list is JSON
            with suppress(ValueError):
                value = json.loads(value)
        labels = [_check(item, f"{where}: {self.label_column}", names) for item in _items(value)]
        return replace(record, label=labels if isinstance(value, list) else labels[0])

    def encode(
        self, records: Sequence[Record], is_known: np.ndarray, is_trained: np.ndarray, class_names: list[str] | None
    ) -> tuple[np.ndarray, tuple[list[str], str, str]]:
        """Encode the labels of all samples.

        Args:
            records: The samples in order, at least one.
            is_known: (n,), whether each is in the training files, whose labels are the model's.
            is_trained: (n,), whether each is in the training split, whose labels are counted.
            class_names: The names of all labels in order, if the data has them.

        Returns:
            fp32 targets (n, columns): of a single label its index, of several labels 0 or 1 for each, of regression the
            numbers; then the weight of the sample in the loss. And names, problem type and a description of the labels.
        """
        import numpy as np

        model, size = self.model_labels, _vector_size(records)
        problem = self.problem_type or (model.problem_type if model else _infer_problem(records))
        if model is not None and problem != model.problem_type:
            raise UserError(f"{_PROBLEM} {problem}: the model's head is for {model.problem_type}; remove it")
        if self.class_weights is not None and problem != SINGLE:
            raise UserError(f"--data.class_weights {self.class_weights}: is only for one label per text; remove it")
        if problem == REGRESSION:
            return self._encode_numbers(records)
        if problem == MULTI and size and (model is None or len(model.names) == size):  # 0 or 1 for each class
            names = model.names if model else list(map(str, range(size)))
            by_row = [[name for name, has in zip(names, r.label, strict=True) if has] for r in records]
        else:
            by_row = [_names_of(record, problem) for record in records]
            known = {name for labels, is_in in zip(by_row, is_known, strict=True) if is_in for name in labels}
            names = model.names if model else class_names or _sort(known)
        if len(names) < 2 and problem == SINGLE:
            raise UserError(f"--data.label_column {self.label_column}: all rows have the same label {names}; give two")
        index = {n.removesuffix(".0"): i for i, n in enumerate(names) if as_number(n) is not None}
        index |= {name: i for i, name in enumerate(names)}
        for record, labels in zip(records, by_row, strict=True):
            for name in filter(lambda name: name not in index, labels):
                has = f"{'the model' if model else 'the training data'} has only the labels {join_first(names, 10)}"
                raise UserError(f"{record.where}: {self.label_column} {name!r:.60}: {has}")
        rows = [[index[name] for name in labels] for labels in by_row]
        counter = Counter(i for labels, trains in zip(rows, is_trained, strict=True) if trains for i in labels)
        counts = [counter[i] for i in range(len(names))]
        words = (name if re.fullmatch(r"\w*[^\W\d]\w*", name) else repr(name) for name in names)
        shown = [f"{word} {count:,}" for word, count in zip(words, counts, strict=True)]
        text = f"{len(names)} labels: {join_first(shown, 20)} ({problem})"
        if problem == MULTI:
            targets = [[*(float(i in row) for i in range(len(names))), 1] for row in rows]
        else:
            weights = self._weights(names, counts)
            targets = [[float(i), weights[i]] for (i,) in rows]
            if {*counts} == {1} and len(names) > 2:
                text += f"; every text has a different label: see --data.label_column {self.label_column}"
        return np.array(targets, np.float32), (names, problem, text)

    def _encode_numbers(self, records: Sequence[Record]) -> tuple[np.ndarray, tuple[list[str], str, str]]:
        """Encode one number per text, or the same number of them."""
        import numpy as np

        n, origin, name = len(_items(records[0].label)), "the first row", self.label_column
        names = [name] if n == 1 else [f"{name}_{i}" for i in range(n)]
        if self.model_labels:
            names, origin = self.model_labels.names, "the model"
        rows = [list(map(as_number, _items(record.label))) for record in records]
        for record, row in zip(records, rows, strict=True):
            if None in row or len(row) != len(names):
                counts = f"has {len(names)} of them ({_PROBLEM} {REGRESSION})"
                raise UserError(f"{record.where}: {name} {record.label!r:.60}: must be numbers; {origin} {counts}")
        values = np.array(rows, np.float64)
        text = f"{len(names)} x {name}" if len(names) > 1 else name
        text += f": mean {values.mean():.4g}, from {values.min():.4g} to {values.max():.4g} ({REGRESSION})"
        return np.insert(values, len(names), 1, axis=1).astype(np.float32), (names, REGRESSION, text)

    def _weights(self, names: list[str], counts: list[int]) -> list[float]:
        """Return the weight of each label; "balanced" is scikit-learn's, n / (labels x n of the label)."""
        if self.class_weights == "balanced":
            return [sum(counts) / (len(names) * max(1, count)) for count in counts]
        weights = self.class_weights or {}
        for name in weights.keys() - {*names}:
            raise UserError(f"--data.class_weights {name}: no such label; the labels are {join_first(names, 10)}")
        return [weights.get(name, 1.0) for name in names]


def _items(label: Any) -> list[Any]:
    return label if isinstance(label, list) else [label]


def _check(value: Any, where: str, class_names: list[str] | None) -> Any:
    """Check a label: text, a number, or the index of one of ``class_names``, whose name is returned."""
    reason, number = "", 0.0
    if class_names and isinstance(value, int):
        if 0 <= value < len(class_names):
            return class_names[value]
        reason = "has no name in the data's features; remove this row"
    with suppress(ValueError, TypeError, OverflowError):
        number = float(value)
    if not isinstance(value, str | int | float):
        reason = "must be text, a number, or a list of them"
    elif not math.isfinite(number):
        reason = "is no finite number; give a label, or remove this row"
    elif not str(value).isprintable():
        reason = "has characters that cannot be printed; rename this label"
    if reason:
        raise UserError(f"{where} {value!r:.60}: {reason}")
    return value.strip() if isinstance(value, str) else value


def _vector_size(records: Sequence[Record]) -> int:
    """Return the length of labels that are all lists of 0 and 1 of the same length, at least 2; else 0."""
    sizes = {isinstance(r.label, list) and len(r.label) for r in records}
    is_vector = len(sizes) == 1 and all(
        not isinstance(v, str) and v in (0, 1) for r in records for v in _items(r.label)
    )
    return max(sizes) if is_vector and max(sizes) > 1 else 0


def _infer_problem(records: Sequence[Record]) -> str:
    """Numbers with a fraction are regression, also in lists of the same length; other lists several labels, and all
    others one label."""
    are_lists = [isinstance(record.label, list) for record in records]
    if any(are_lists) and not all(are_lists):
        where = records[are_lists.index(False)].where
        raise UserError(f"{where}: the label is no list, as others are; make it one, or set {_PROBLEM}")
    values = [value for record in records for value in _items(record.label)]
    # a number of JSON that is written with a fraction is a float, also 4.0
    has_fraction = any({*".eE"} & {*str(value)} for value in values)
    if has_fraction and not _vector_size(records) and all(as_number(value) is not None for value in values):
        return REGRESSION
    return MULTI if are_lists[0] else SINGLE


def _names_of(record: Record, problem: str) -> list[str]:
    """Return the names of a row's labels: strings as they are, numbers and booleans as in JSON, 1.0 as 1."""
    values, start = _items(record.label), f"{record.where}: label {record.label!r:.60}:"
    if values is record.label and problem == SINGLE:
        raise UserError(f"{start} is a list; set {_PROBLEM} {MULTI}")
    names = [v if isinstance(v, str) else json.dumps(v).removesuffix(".0") for v in values]
    fractions = [v for v in values if problem == MULTI and isinstance(v, float) and not v.is_integer()]
    if fractions or len({*names}) < len(names):
        hint = f"names, or 0 or 1 for each class in lists of the same length; numbers need {_PROBLEM} {REGRESSION}"
        reason = f"{fractions[0]} is not a name" if fractions else "a label is there twice"
        if {*values} <= {0, 1}:
            reason = "has another number of classes than other rows"
        raise UserError(f"{start} {reason}; several labels are {hint}")
    return names


def _sort(names: set[str]) -> list[str]:
    """Sort labels: as numbers if all are integers, otherwise as text."""
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)
