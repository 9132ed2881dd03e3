"""Micro-batches: rows stacked into tensors, with padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.data.base import Row, State
from toolkit.models.attention_kernels import DocumentBounds, Documents, document_bounds
from toolkit.models.labels import IGNORE_INDEX, TOKENS

FILLER = -1  # row index of a filler row, which completes a short batch
PAD_MULTIPLE = 64  # tokens
# Padding is a separate document: no row of the attention mask may be empty.
_FILLERS = {"input_ids": 0, "labels": IGNORE_INDEX, "positions": 0, "documents": -1}


class Padding(NamedTuple):
    """Padding of a micro-batch to its longest row.

    Args:
        multiple: Round lengths up to a multiple of this, in tokens.
        limit: Maximum rounded length in tokens, the model's context length.
        token: Input token id of padding and filler rows.
    """

    multiple: int = 1
    limit: int | None = None
    token: int = 0

    def width(self, longest: int) -> int:
        rounded = -(-longest // self.multiple) * self.multiple
        return max(longest, rounded if self.limit is None else min(rounded, self.limit))


NO_ROUNDING = Padding()


def choose_padding(device_type: str, is_ragged: bool, limit: int | None, divisor: int = 1) -> Padding:
    """Round lengths up on CUDA, where each new length triggers kernel selection and fragments memory.

    On CPU, lengths are not rounded: padding costs as much as real tokens. ``limit`` is the context length, or None if
    unknown. ``divisor`` must divide every length.
    """
    should_round = device_type == "cuda" and is_ragged and limit is not None
    multiple = math.lcm(PAD_MULTIPLE if should_round else 1, divisor)
    return Padding(multiple, limit)


@dataclass
class Batch:
    """One micro-batch of one rank.

    Args:
        input_ids: (B, T) int64.
        labels: (B, T) int64, aligned with the logits: the next token, or -100 where the loss is masked.
        ids: Row indices; -1 for a filler row.
        n_tokens: Number of supervised tokens.
        n_inputs: Number of input tokens, excluding filler rows and padding.
    """

    input_ids: Tensor
    labels: Tensor
    ids: list[int]
    n_tokens: int
    n_inputs: int
    packed: dict[str, Tensor] = field(default_factory=dict)
    """For packed rows: "positions" and "documents", (B, T) int64 each."""
    sample_keys: list[int] = field(default_factory=list)
    """A key per row that does not depend on the layout; -1 for a filler row. In training, the position in the sample
    stream (unique across epochs, unchanged after a resume); in validation, the row index."""
    bounds: DocumentBounds | None = None
    """Boundaries of packed documents, for attention kernels without a mask."""
    counts: dict[str, int] = field(default_factory=dict)
    """Loss normalizers: supervised tokens and the objective's other counts."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Numbers of the rows by name, (B,) fp32 each; 0 for a filler row. "targets": (n, columns) fp32, a line for each of
    the n supervised tokens."""

    def __post_init__(self) -> None:
        self.counts = {TOKENS: self.n_tokens} | self.counts

    def __getstate__(self) -> State:
        """Return the state with NumPy arrays: workers would send tensors through /dev/shm, which may be too small."""
        return vars(self._map(Tensor.numpy))

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)
        vars(self).update(vars(self._map(torch.from_numpy)))

    def inputs(
        self, device: torch.device, with_keys: bool = False, with_bounds: bool = False
    ) -> dict[str, Tensor | Documents]:
        """Return the model's forward arguments on ``device``.

        ``with_keys`` adds sample_keys, (B,) int64. ``with_bounds`` adds the bounds to the documents of packed rows.
        """
        tensors = {"input_ids": self.input_ids, "labels": self.labels, **self.packed}
        if with_keys:
            tensors["sample_keys"] = torch.tensor(self.sample_keys)
        inputs: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        if with_bounds and self.bounds is not None:
            inputs["documents"] = Documents(inputs["documents"], self.bounds.to(device))
        return inputs

    def value(self, name: str, device: torch.device) -> Tensor:
        """Return a number of each row, (B,) fp32; 0 for a filler row."""
        if max(self.ids) == FILLER:
            return torch.zeros(len(self.ids), device=device)
        return self.values[name].to(device)

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory, for asynchronous copies to CUDA."""
        return self._map(Tensor.pin_memory)

    def every(self, start: int, step: int) -> Batch:
        """Return every ``step``-th row of an unpacked batch, from ``start`` on."""
        rows = slice(start, None, step)
        n_tokens = int((self.labels[rows] >= 0).sum())
        batch = self._map(lambda tensor: tensor[rows])
        return replace(batch, ids=self.ids[rows], sample_keys=self.sample_keys[rows], n_tokens=n_tokens)

    def padded(self, length: int) -> Batch:
        """Return a copy whose rows are padded to ``length`` tokens."""

        def pad(name: str, tensor: Tensor) -> Tensor:
            return F.pad(tensor, (0, length - tensor.size(1)), value=_FILLERS[name])

        packed = {name: pad(name, tensor) for name, tensor in self.packed.items()}
        bounds = None if self.bounds is None else document_bounds(packed["documents"])
        input_ids, labels = pad("input_ids", self.input_ids), pad("labels", self.labels)
        return replace(self, input_ids=input_ids, labels=labels, packed=packed, bounds=bounds)

    def _map(self, function: Callable[[Any], Any]) -> Batch:
        packed, values = ({k: function(v) for k, v in tensors.items()} for tensors in (self.packed, self.values))
        bounds = self.bounds and self.bounds._replace(cu_seqlens=function(self.bounds.cu_seqlens))
        input_ids, labels = function(self.input_ids), function(self.labels)
        return replace(self, input_ids=input_ids, labels=labels, packed=packed, bounds=bounds, values=values)


def batch_texts(texts: Sequence[tuple[list[int], list[bool]]], padding: Padding = NO_ROUNDING) -> Batch:
    """Return a batch of texts, each token ids with a loss mask."""
    rows: list[Row | None] = []
    for ids, loss_mask in texts:
        tokens = torch.tensor(ids)
        labels = tokens.masked_fill(~torch.tensor(loss_mask), IGNORE_INDEX)
        rows.append({"input_ids": tokens[:-1], "labels": labels[1:]})
    numbers = list(range(len(rows)))
    return collate(rows, numbers, numbers, 0, padding)


def collate(rows: list[Row | None], ids: list[int], keys: list[int], longest: int, padding: Padding) -> Batch:
    """Stack rows into (B, T), padded to the longest row, or to ``longest`` if all are None. None is a filler row.

    Padding is neither supervised nor counted (N2).
    """
    actual_rows = [row for row in rows if row is not None]
    width = padding.width(max((len(row["input_ids"]) for row in actual_rows), default=longest))
    is_packed = any("documents" in row for row in actual_rows)
    fillers = _FILLERS | {"input_ids": padding.token}
    names = fillers if is_packed else ("input_ids", "labels")
    tensors = {name: torch.full((len(rows), width), fillers[name], dtype=torch.int64) for name in names}
    for i, row in enumerate(rows):
        if row is not None:
            length = len(row["input_ids"])
            parts: Row = {"positions": torch.arange(length), "documents": 0} | row  # an unpacked row is one document
            for name, tensor in tensors.items():
                tensor[i, :length] = parts[name]
    n_inputs = sum(len(row["input_ids"]) for row in actual_rows)
    input_ids, labels = tensors.pop("input_ids"), tensors.pop("labels")
    n_tokens = int((labels != IGNORE_INDEX).sum())
    bounds = document_bounds(tensors["documents"]) if is_packed else None
    numbers: list[dict[str, float]] = [{} if row is None else row.get("values", {}) for row in rows]
    values = {
        name: torch.tensor([of_row.get(name, 0) for of_row in numbers], dtype=torch.float32)
        for name in dict.fromkeys(name for of_row in numbers for name in of_row)
    }
    if targets := [row["targets"] for row in actual_rows if "targets" in row]:
        values["targets"] = torch.cat(targets)
    return Batch(input_ids, labels, ids, n_tokens, n_inputs, tensors, keys, bounds, values=values)
