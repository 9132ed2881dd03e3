"""Read the texts and labels of a classification, and encode the labels as numbers."""

from __future__ import annotations

import json
import math
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
        items = value if isinstance(value, list) else [value]
        labels = [_check(item, f"{where}: {self.label_column}", names) for item in items]
        return replace(record, label=labels if items is value else labels[0])

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
        shown = [f"{name} {count:,}" for name, count in zip(names, counts, strict=True)]
        text = f"{len(names)} labels: {join_first(shown, 20)} ({problem})"
        if problem == MULTI:
            targets = [[*(i in row for i in range(len(names))), 1] for row in rows]
        else:
            weights = self._weights(names, counts)
            targets = [[i, weights[i]] for (i,) in rows]
            if max(counts) == 1 and len(names) > 2:
                text += f"; each text has a label of its own: see --data.label_column {self.label_column}"
        return np.array(targets, np.float32), (names, problem, text)

    def _encode_numbers(self, records: Sequence[Record]) -> tuple[np.ndarray, tuple[list[str], str, str]]:
        """Encode one number per text, or the same number of them."""
        import numpy as np

        rows = [_to_numbers(record) for record in records]
        names = [self.label_column] if len(rows[0]) == 1 else [f"{self.label_column}_{i}" for i in range(len(rows[0]))]
        names = self.model_labels.names if self.model_labels else names
        for record, row in zip(records, rows, strict=True):
            if len(row) != len(names):
                counts = f"{len(row)} numbers, but the {'model' if self.model_labels else 'first row'} has {len(names)}"
                raise UserError(f"{record.where}: {self.label_column} {record.label!r:.60}: has {counts}")
        values = np.array(rows)
        columns = zip(names, values.T, strict=True)
        texts = [f"{name}: mean {v.mean():.4g}, from {v.min():.4g} to {v.max():.4g}" for name, v in columns]
        targets = np.concatenate([values, np.ones((len(rows), 1))], 1)
        return targets.astype(np.float32), (names, REGRESSION, f"{join_first(texts)} ({REGRESSION})")

    def _weights(self, names: list[str], counts: list[int]) -> list[float]:
        """Return the weight of each label; "balanced" is scikit-learn's, n / (labels x n of the label)."""
        if self.class_weights == "balanced":
            return [sum(counts) / (len(names) * max(1, count)) for count in counts]
        weights = self.class_weights or {}
        for name in weights.keys() - {*names}:
            raise UserError(f"--data.class_weights {name}: no such label; the labels are {join_first(names, 10)}")
        return [weights.get(name, 1.0) for name in names]


def _check(value: Any, where: str, class_names: list[str] | None) -> Any:
    """Check a label: text, a number, or the index of one of ``class_names``, whose name is returned."""
    if class_names and isinstance(value, int):
        if not 0 <= value < len(class_names):
            raise UserError(f"{where} {value}: has no name in the data's features; remove this row")
        value = class_names[value]
    if not isinstance(value, str | int | float):
        raise UserError(f"{where} {value!r:.40}: must be text, a number, or a list of them")
    is_finite = True
    with suppress(ValueError, OverflowError):
        is_finite = math.isfinite(float(value))
    if not is_finite:
        raise UserError(f"{where} {value!r:.40}: is no finite number; give a label, or remove this row")
    if isinstance(value, str) and not value.isprintable():
        raise UserError(f"{where} {value!r:.60}: has characters that cannot be printed; rename this label")
    return value.strip() if isinstance(value, str) else value


def _vector_size(records: Sequence[Record]) -> int:
    """Return the length of labels that are all lists of 0 and 1 of the same length, at least 2; else 0."""
    sizes = {len(r.label) if isinstance(r.label, list) else 0 for r in records}
    is_vector = len(sizes) == 1 and max(sizes) > 1
    is_vector = is_vector and all(not isinstance(v, str) and v in (0, 1) for r in records for v in r.label)
    return max(sizes) if is_vector else 0


def _infer_problem(records: Sequence[Record]) -> str:
    """Numbers with a fraction are regression, also in lists of the same length; other lists several labels, and all
    others one label."""
    are_lists = [isinstance(record.label, list) for record in records]
    if any(are_lists) and not all(are_lists):
        where = records[are_lists.index(False)].where
        raise UserError(f"{where}: the label is no list, as others are; make it one, or set {_PROBLEM}")
    if all(are_lists) and _vector_size(records):
        return MULTI
    values = [value for record in records for value in (record.label if are_lists[0] else [record.label])]
    # a number of JSON that is written with a fraction is a float, also 4.0
    has_fraction = any({*".eE"} & {*str(value)} for value in values)
    is_regression = has_fraction and all(as_number(value) is not None for value in values)
    return REGRESSION if is_regression else MULTI if are_lists[0] else SINGLE


def _to_numbers(record: Record) -> list[float]:
    numbers = [as_number(value) for value in (record.label if isinstance(record.label, list) else [record.label])]
    if None in numbers or not numbers:
        raise UserError(f"{record.where}: label {record.label!r:.40}: must be a number ({_PROBLEM} {REGRESSION})")
    return [number for number in numbers if number is not None]


def _names_of(record: Record, problem: str) -> list[str]:
    """Return the names of a row's labels: strings as they are, numbers and booleans as in JSON, 1.0 as 1."""
    values = record.label if isinstance(record.label, list) else [record.label]
    if values is record.label and problem == SINGLE:
        raise UserError(f"{record.where}: label {values!r:.40}: is a list; set {_PROBLEM} {MULTI}")
    names = [v if isinstance(v, str) else json.dumps(v).removesuffix(".0") for v in values]
    hint = f"names, or 0 or 1 for each class in lists of the same length; numbers need {_PROBLEM} {REGRESSION}"
    for v, name in zip(values, names, strict=True):
        is_fraction = problem == MULTI and isinstance(v, float) and not v.is_integer()
        if is_fraction or names.count(name) > 1:
            reason = "is not a name" if is_fraction else "is there twice"
            raise UserError(f"{record.where}: label {values!r:.60}: {name} {reason}; several labels are {hint}")
    return names


def _sort(names: set[str]) -> list[str]:
    """Sort labels: as numbers if all are integers, otherwise as text."""
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)
