"""User-provided token datasets as a data module. Python API only: no command-line option creates one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.data.base import DataModule, PreparedData
from toolkit.errors import UserError
from toolkit.models.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.data.tokenizer import Tokenizer

_SAMPLE = 32  # rows checked before a run


class InMemoryData(DataModule):
    """A map-style dataset whose items are 1-D tensors of T + 1 tokens, or ``{"input_ids": (T,), "labels": (T,)}``.

    Args:
        dataset: The training rows. A 1-tuple of a tensor, as from ``TensorDataset``, is unwrapped.
        val_dataset: The validation rows, or None.
        num_workers: Data loading processes; 0 reads in the training process.
        max_length: Truncate rows to this many input tokens; None keeps their length.

    Raises:
        UserError: The dataset is empty, or a checked row is invalid.
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

    @property
    def is_ragged(self) -> bool:
        """Whether the checked rows differ in length."""
        return self.train.is_ragged

    def prepare(
        self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Callable[[str], None] = print
    ) -> PreparedData:
        """See :meth:`DataModule.prepare`; there is nothing to prepare."""
        longest = max(self.lengths)
        if max_seq_length and longest > max_seq_length:
            raise UserError(
                f"train.max_seq_length: a row of the dataset has {longest} input tokens, the model takes at most "
                f"{max_seq_length}; truncate the rows, or set train.max_seq_length {max_seq_length}"
            )
        tokens = f"{min(self.lengths)} to {longest}" if self.is_ragged else f"{longest}"
        held_out = "" if self.val is None else f" and {len(self.val):,} held-out"
        summary = f"{len(self.train):,}{held_out} rows of {tokens} tokens"
        report(f"Data: {summary}")
        return PreparedData(self.train, self.val, tokenizer, self.content_key, summary)


class InMemoryDataset:
    """Adapts a user-provided dataset to :class:`~toolkit.data.base.TokenDataset`; ``name`` is for messages."""

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

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return read_row(self._dataset[index], f"{self._name}[{index}]", self._max_length)

    def survey(self) -> tuple[list[int], str]:
        """Return the lengths of some evenly spaced rows, and a SHA-256 of these rows and the dataset length.

        Raises:
            UserError: A row is invalid.
        """
        last = len(self) - 1
        indices = sorted({round(last * i / (_SAMPLE - 1)) for i in range(_SAMPLE)})
        rows = [self[index] for index in indices]
        if all(map(_is_not_shifted, rows)):
            raise UserError(
                f"{self._name}: the labels equal the input_ids; labels[t] must be the token that follows "
                "input_ids[t]: shift them, as in input_ids[:-1] and labels[1:]"
            )
        digest = hashlib.sha256(f"rows {len(self)}".encode())
        for index, row in zip(indices, rows, strict=True):
            digest.update(f"|{index} {len(row['input_ids'])}|".encode())
            digest.update(row["input_ids"].numpy().tobytes() + row["labels"].numpy().tobytes())
        lengths = [len(row["input_ids"]) for row in rows]
        self.is_ragged = min(lengths) != max(lengths)
        return lengths, digest.hexdigest()


def read_row(item: Any, name: str, max_length: int | None) -> dict[str, Tensor]:
    """Return a user-provided row as inputs and labels, (T,) int64 each, truncated to ``max_length``.

    Raises:
        UserError: The row is invalid; the message begins with ``name``.
    """
    if isinstance(item, tuple) and len(item) == 1:
        (item,) = item
    if isinstance(item, Mapping):
        if missing := {"input_ids", "labels"} - item.keys():
            raise UserError(f"{name}: has no {' and no '.join(sorted(missing))}; its keys are {', '.join(item)}")
        input_ids, labels = (_to_token_tensor(item[key], f"{name}[{key!r}]") for key in ("input_ids", "labels"))
    else:
        block = _to_token_tensor(item, name)
        input_ids, labels = block[:-1], block[1:]
    if not 0 < len(input_ids) == len(labels):
        raise UserError(
            f"{name}: has {len(input_ids)} input tokens and {len(labels)} labels; provide equally many, "
            "or one tensor of at least two tokens"
        )
    if (input_ids < 0).any() or ((labels < 0) & (labels != IGNORE_INDEX)).any():
        raise UserError(f"{name}: contains negative tokens; only labels may be {IGNORE_INDEX}, to mask the loss")
    return {"input_ids": input_ids[:max_length], "labels": labels[:max_length]}


def _to_token_tensor(value: Any, name: str) -> Tensor:
    """Return a 1-D integer sequence as an int64 tensor on the CPU."""
    import torch

    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name}: is of type {type(value).__name__}; it must be a 1-D tensor of tokens") from None
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        shape = f"has shape {tuple(tokens.shape)} and {tokens.dtype}"
        raise UserError(f"{name}: {shape}; it must be a 1-D tensor of integer tokens")
    return tokens.to("cpu", torch.int64)


def _is_not_shifted(row: dict[str, Tensor]) -> bool:
    """Whether the labels equal the inputs instead of the next tokens: the model would learn to copy."""
    input_ids, labels = row["input_ids"], row["labels"]
    token_mask = labels != IGNORE_INDEX
    is_copied = (labels == input_ids)[token_mask].all()
    is_shifted = (labels[:-1] == input_ids[1:])[token_mask[:-1]].all()
    return bool(token_mask.any() and is_copied and not is_shifted)
