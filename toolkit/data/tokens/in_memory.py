"""User-provided map-style datasets as a data module. Python API only: no command-line option creates one."""

from typing import Any

from toolkit.data.tokens.rows import InMemoryDataset, PythonData
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
        super().__init__(InMemoryDataset("dataset", dataset, max_length), val_dataset, max_length, num_workers)
