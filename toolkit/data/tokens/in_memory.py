"""User-provided map-style datasets as a data module. Python API only: no command-line option creates one."""

import hashlib
from collections.abc import Mapping
from typing import Any

from toolkit.data.base import Row
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
        train = InMemoryDataset("dataset", dataset, max_length)
        super().__init__(train, read_val(val_dataset, max_length), num_workers)


class InMemoryDataset:
    """Adapts a user-provided dataset to :class:`~toolkit.data.base.TokenDataset`. Checks evenly spaced rows.

    Args:
        name: Shown in error messages.
    """

    def __init__(self, name: str, dataset: Any, max_length: int | None) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, str | Mapping):
            raise UserError(
                f"{name} {type(dataset).__name__}: needs len() and [index] starting at 0; provide a list of rows"
            )
        if not len(dataset):
            raise UserError(f"{name}: has no rows")
        self._name, self._dataset, self._max_length = name, dataset, max_length
        self.what = f"{len(dataset):,} rows"
        last = len(self) - 1
        indices = sorted({round(last * i / (MAX_CHECKED_ROWS - 1)) for i in range(MAX_CHECKED_ROWS)})
        rows = [self[index] for index in indices]
        require_shifted(rows, name)
        key = hashlib.sha256(f"rows {len(self)}".encode())
        for index, row in zip(indices, rows, strict=True):
            key.update(f"|{index} {len(row['input_ids'])}|".encode() + row_bytes(row))
        self.key = key.hexdigest()
        self.lengths_checked = [len(row["input_ids"]) for row in rows]
        self.is_ragged = len(set(self.lengths_checked)) > 1

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return read_row(self._dataset[index], f"{self._name}[{index}]", self._max_length)


def read_val(dataset: Any, max_length: int | None) -> InMemoryDataset | None:
    return None if dataset is None else InMemoryDataset("val_dataset", dataset, max_length)
