"""Check rows of user-provided datasets and convert them to :class:`toolkit.data.base.TokenDataset`'s format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.data.base import DataModule, PreparedData, Report, Row, TokenDataset, member, row_count, rows_of
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.models.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from torch import Tensor

MAX_CHECKED_ROWS = 32  # rows checked before a run


class PythonData(DataModule):
    """Data module for Python objects. Python API only: no command-line option creates one.

    Args:
        train: The training rows: :class:`InMemoryDataset`, or :func:`toolkit.data.tokens.iterable.iterable_rows`.
            ``lengths_checked`` are the input tokens of each checked row, ``key`` is a hash of the rows, and ``what``
            describes them.
        val_dataset: Map-style dataset of validation rows, or None.
        max_length: Truncate validation rows to this many input tokens; None keeps their length.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    checks_tokens = True

    def __init__(self, train: Any, val_dataset: Any, max_length: int | None, num_workers: int = 0) -> None:
        if num_workers < 0:
            raise UserError(f"num_workers {num_workers}: must not be negative")
        val = None if val_dataset is None else InMemoryDataset("val_dataset", val_dataset, max_length)
        self.train, self.val, self.num_workers = train, val, num_workers
        self.reads_ahead = num_workers > 0  # the user's object may use a global RNG or not be thread-safe
        self.lengths: list[int] = train.lengths_checked
        self.content_key: str = train.key
        if val is not None or row_count(train) is None:
            self.content_key = hashlib.sha256(f"{train.key} {val.key if val else ''}".encode()).hexdigest()

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        longest = max(self.lengths)
        if max_seq_length and longest > max_seq_length:
            raise UserError(
                f"train.max_seq_length: a row of the dataset has {longest} input tokens, the model takes at most "
                f"{max_seq_length}; truncate the rows, or set train.max_seq_length {max_seq_length}"
            )
        lengths = f"{min(self.lengths)} to {longest} tokens" if self.train.is_ragged else f"{longest} tokens"
        held_out = "" if self.val is None else f", {len(self.val):,} held-out rows"
        summary = f"{self.train.what} of {lengths}{held_out}"
        report(f"Data: {summary}")
        return PreparedData(self.train, self.val, tokenizer, self.content_key, summary)


class InMemoryDataset(TokenDataset):
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


def read_row(item: Any, name: str, max_length: int | None) -> Row:
    """Convert an item to ``{"input_ids": (T,), "labels": (T,)}``, int64.

    Args:
        item: A 1-D tensor of T + 1 tokens, alone or in a 1-tuple, ``(input_ids, labels)``, or a mapping with both.
        max_length: Truncate to this many input tokens; None keeps the length.
    """
    if isinstance(item, tuple) and len(item) == 1:
        (item,) = item
    if isinstance(item, tuple) and len(item) == 2 and all(hasattr(part, "__len__") for part in item):
        item = {"input_ids": item[0], "labels": item[1]}
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


def check_rows(flag: str, data: PreparedData, seq_length: int | None) -> None:
    """Check the first training and validation rows of a user-defined data module."""
    if not isinstance(data, PreparedData):
        raise UserError(f"{flag}: prepare() returns {type(data).__name__}; it must return PreparedData")
    for split, rows in (("train", data.train), ("val", data.val)):
        if rows is None or row_count(rows) == 0:
            continue
        for row in rows_of(rows[0]) if member(rows, "group_size") > 1 else [rows[0]]:
            length = len(read_row(row, f"{flag}: {split}[0]", None)["input_ids"])
            if seq_length is not None and length > seq_length:
                raise UserError(
                    f"{flag}: {split}[0]: has {length} input tokens, but sequences have at most {seq_length}; truncate "
                    "the rows in prepare(), or raise --train.max_seq_length"
                )


def row_bytes(row: Row) -> bytes:
    return row["input_ids"].numpy().tobytes() + row["labels"].numpy().tobytes()


def hash_rows(rows: Iterable[Row]) -> str:
    key = hashlib.sha256()
    for row in rows:
        key.update(f"|{len(row['input_ids'])}|".encode() + row_bytes(row))
    return key.hexdigest()


def require_shifted(rows: Iterable[Row], name: str) -> None:
    """Raise UserError if the labels equal the inputs, instead of the next tokens, in every row."""
    if all(map(_is_not_shifted, rows)):
        raise UserError(
            f"{name}: the labels equal the input_ids; labels[t] must be the token that follows "
            "input_ids[t]: shift them, as in input_ids[:-1] and labels[1:]"
        )


def _to_token_tensor(value: Any, name: str) -> Tensor:
    import torch

    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name}: is of type {type(value).__name__}; it must be a 1-D tensor of tokens") from None
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        shape = f"has shape {tuple(tokens.shape)} and {tokens.dtype}"
        raise UserError(f"{name}: {shape}; it must be a 1-D tensor of integer tokens")
    return tokens.to("cpu", torch.int64)


def _is_not_shifted(row: Row) -> bool:
    """Whether the labels equal the inputs instead of the next tokens. The model would learn to copy."""
    input_ids, labels = row["input_ids"], row["labels"]
    token_mask = labels != IGNORE_INDEX
    is_copied = (labels == input_ids)[token_mask].all()
    is_shifted = (labels[:-1] == input_ids[1:])[token_mask[:-1]].all()
    return bool(token_mask.any() and is_copied and not is_shifted)
