"""User-provided map-style datasets as a data module. Python API only: no command-line option creates one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from toolkit.data.base import PreparedData, Report, Row
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.rows import MAX_CHECKED_ROWS, PythonData, read_row, require_shifted, row_bytes
from toolkit.errors import UserError


class InMemoryData(PythonData):
    """Data module for a map-style dataset. For items, see :func:`toolkit.data.tokens.rows.read_row`.

    Args:
        dataset: The training rows. A 1-tuple of a tensor, as from ``TensorDataset``, is unwrapped.
        val_dataset: The validation rows, or None.
        num_workers: Data loading processes; 0 reads in the training process.
        max_length: Truncate rows to this many input tokens; None keeps their length.
    """

    def __init__(self, dataset: Any, val_dataset: Any, num_workers: int, max_length: int | None) -> None:
        if num_workers < 0:
            raise UserError(f"num_workers {num_workers}: must not be negative")
        self.num_workers = num_workers
        self.train = InMemoryDataset("dataset", dataset, max_length)
        self.val = None if val_dataset is None else InMemoryDataset("val_dataset", val_dataset, max_length)
        self.lengths, key = self.train.survey()
        if self.val is not None:
            key = hashlib.sha256(f"{key} {self.val.survey()[1]}".encode()).hexdigest()
        self.content_key = key

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        held_out = "" if self.val is None else f" and {len(self.val):,} held-out"
        summary = f"{len(self.train):,}{held_out} rows of {self.describe_lengths(max_seq_length)}"
        report(f"Data: {summary}")
        return PreparedData(self.train, self.val, tokenizer, self.content_key, summary)


class InMemoryDataset:
    """Adapts a user-provided dataset to :class:`~toolkit.data.base.TokenDataset`. Error messages show ``name``."""

    def __init__(self, name: str, dataset: Any, max_length: int | None) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, str | Mapping):
            raise UserError(
                f"{name} {type(dataset).__name__}: needs len() and [index] starting at 0; provide a list of rows"
            )
        if not len(dataset):
            raise UserError(f"{name}: has no rows")
        self._name, self._dataset, self._max_length = name, dataset, max_length
        self.is_ragged = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return read_row(self._dataset[index], f"{self._name}[{index}]", self._max_length)

    def survey(self) -> tuple[list[int], str]:
        """Check evenly spaced rows. Return their lengths, and a SHA-256 of the rows and the dataset length."""
        last = len(self) - 1
        indices = sorted({round(last * i / (MAX_CHECKED_ROWS - 1)) for i in range(MAX_CHECKED_ROWS)})
        rows = [self[index] for index in indices]
        require_shifted(rows, self._name)
        key = hashlib.sha256(f"rows {len(self)}".encode())
        for index, row in zip(indices, rows, strict=True):
            key.update(f"|{index} {len(row['input_ids'])}|".encode() + row_bytes(row))
        lengths = [len(row["input_ids"]) for row in rows]
        self.is_ragged = min(lengths) != max(lengths)
        return lengths, key.hexdigest()
