"""Interleave several datasets in fixed proportions, see :class:`toolkit.data.Mixture`.

The stream repeats a pattern of ``PERIOD`` rows in which source i has ``slots[i]`` evenly spaced rows. Each source keeps
the row order that it has without the mixture. A stream position maps directly to a source and a position in that
source. The proportions hold at every point of a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from toolkit.data.base import (
    Row,
    State,
    TokenDataset,
    is_ragged,
    largest_token,
    mean_length,
    member,
    preview,
    row_count,
    row_lengths,
    sample_order,
)
from toolkit.data.order import SampleOrder
from toolkit.errors import DataError, UserError

PERIOD = 100_000  # rows
# Bits per row id for sources with arbitrary ids: 2**23 files with 2**32 rows each. 8 bits remain for the source.
ID_BITS = 55


@dataclass(frozen=True)
class SourceRows:
    """The training rows of one source.

    Args:
        name: Name of the source.
        rows: The dataset.
        weight: Fraction of the mixture's tokens, 0 to 1.
        max_epochs: Maximum epochs over the source in a run; None for no limit.
        mean_length: Mean input tokens per row.
    """

    name: str
    rows: TokenDataset
    weight: float
    max_epochs: float | None
    mean_length: float


def interleave(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source index of each slot, and the number of earlier slots with the same source.

    Each source's slots are evenly spaced: the slots, (sum(counts),) int64, are sorted by (j + 0.5) / counts[i], for row
    j of source i. In any prefix, a source has its share of the rows to within about half a row per source in the
    mixture.
    """
    rows = [np.arange(count) for count in counts]
    positions = np.concatenate([(row + 0.5) / max(1, len(row)) for row in rows])
    order = np.argsort(positions, kind="stable")
    return np.repeat(np.arange(len(counts)), counts)[order], np.concatenate(rows)[order]


def slots_per_source(sources: Sequence[SourceRows]) -> np.ndarray:
    """Return each source's rows per ``PERIOD``, (n_sources,) int64, with largest-remainder rounding.

    Weights are fractions of tokens, so a source with short rows gets more rows.
    """
    rows_per_token = np.array([source.weight / source.mean_length for source in sources])
    exact = PERIOD * rows_per_token / rows_per_token.sum()
    slots = np.floor(exact).astype(np.int64)
    largest = np.argsort(slots - exact, kind="stable")  # remainders, largest first
    slots[largest[: PERIOD - slots.sum()]] += 1
    for source, count in zip(sources, slots, strict=True):
        if source.weight and not count:
            raise UserError(
                f"--data.sources.{source.name}.weight {source.weight:g}: is less than one row in {PERIOD:,}; raise it, "
                "or give 0"
            )
    return slots


class ConcatenatedRows(TokenDataset):
    """A concatenation of datasets; see :class:`toolkit.data.base.TokenDataset`.

    Args:
        datasets: At most 256 datasets. Row ids have gaps if a dataset has no length or defines an order.

    Attributes:
        is_dense: Whether row ids have no gaps.
    """

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        self.datasets = list(datasets)
        self.is_dense = not any(row_count(rows) is None or member(rows, "order") is not None for rows in datasets)
        if self.is_dense:
            self.first_ids = np.cumsum([0, *map(len, datasets[:-1])], dtype=np.int64)
        else:
            self.first_ids = np.arange(len(datasets), dtype=np.int64) << ID_BITS
        self.is_ragged = any(map(is_ragged, datasets)) or len(set(map(mean_length, datasets))) > 1

    def __len__(self) -> int:
        """Return the number of rows. Raise TypeError if a dataset has no length."""
        return sum(map(len, self.datasets))

    def __getitem__(self, index: int) -> Row:
        dataset = int(np.searchsorted(self.first_ids, index, side="right")) - 1
        return self.datasets[dataset][index - int(self.first_ids[dataset])]

    def largest_token(self) -> int:
        return max(map(largest_token, self.datasets))

    @cached_property
    def lengths(self) -> np.ndarray | None:  # type: ignore[override]
        """Input tokens per row, (n,) int64; None if equal for all rows or if row ids have gaps."""
        if not (self.is_ragged and self.is_dense):
            return None
        fixed = (np.full(len(rows), round(mean_length(rows))) for rows in self.datasets)
        lengths = (row_lengths(rows) for rows in self.datasets)
        return np.concatenate([same if each is None else each for each, same in zip(lengths, fixed, strict=True)])


class MixtureRows(ConcatenatedRows):
    """A mixture's training rows.

    Args:
        change_weights: Whether a run may resume with changed weights.
    """

    def __init__(self, sources: Sequence[SourceRows], change_weights: bool = False) -> None:
        super().__init__([source.rows for source in sources])
        self.sources, self.change_weights = list(sources), change_weights
        # harmonic mean: weights are fractions of tokens, not of rows
        self.mean_length = 1 / sum(source.weight / source.mean_length for source in sources)

    @property
    def preview(self) -> ConcatenatedRows:  # type: ignore[override]
        """Sample rows of all sources, for inspect_data."""
        return ConcatenatedRows(list(map(preview, self.datasets)))

    def order(self, seed: int, state: State) -> MixtureOrder:
        weights = {source.name: source.weight for source in self.sources}
        if state and state["weights"] != weights and not self.change_weights:
            raise UserError(
                f"--data.sources: weights are {describe_weights(weights)}, but {describe_weights(state['weights'])} "
                "in the checkpoint; restore those, or set --data.change_weights true to continue with the new ones"
            )
        return MixtureOrder(self.sources, self.first_ids, seed, state)


def describe_weights(weights: dict[str, float]) -> str:
    """Format weights for a message, such as ``web 0.75, code 0.25``."""
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())


class MixtureOrder:
    """The sample order of a mixture; see :class:`toolkit.data.order.SampleOrder`.

    Args:
        first_ids: Row id of each source's first row, (n_sources,) int64.
        seed: Seed of the run. Each source's seed is derived from it and the source name.
        state: State from the checkpoint; {} at the start of a run.
    """

    def __init__(self, sources: Sequence[SourceRows], first_ids: np.ndarray, seed: int, state: State) -> None:
        self.sources, self.first_ids = sources, first_ids
        self.weights = {source.name: source.weight for source in sources}
        start = {name: {"position": 0, "order": {}} for name in self.weights}
        source_states: State = state["sources"] if state else start
        self.orders = [
            sample_order(source.rows, _source_seed(seed, source.name), source_states[source.name]["order"])
            for source in sources
        ]
        # Each source's position when the current weights took effect.
        began = {name: saved["position"] for name, saved in source_states.items()}
        if state and state["weights"] == self.weights:
            began = state["began"]
        self._base = np.array([began[name] for name in self.weights], dtype=np.int64)
        self.began = int(self._base.sum())
        self.slots = slots_per_source(sources)
        self._pattern, self._occurrences = interleave(self.slots.tolist())
        self._counters = [_TokenCounter(*pair) for pair in zip(sources, self.orders, strict=True)]
        self._tokens_before = self._tokens(self._base)

    def ids(self, positions: np.ndarray) -> np.ndarray:
        periods, slot = np.divmod(np.asarray(positions, dtype=np.int64) - self.began, PERIOD)
        source_of = self._pattern[slot]
        # within each source
        positions = self._base[source_of] + periods * self.slots[source_of] + self._occurrences[slot]
        row_ids = np.empty_like(positions)
        for i in np.unique(source_of):
            in_source = source_of == i
            self._require_rows(self.sources[i], positions[in_source])
            row_ids[in_source] = self.first_ids[i] + self.orders[i].ids(positions[in_source])
        return row_ids

    def _require_rows(self, source: SourceRows, positions: np.ndarray) -> None:
        count = row_count(source.rows)
        if source.max_epochs is not None and count is not None and positions.max() >= source.max_epochs * count:
            raise DataError(
                f"--data.sources.{source.name}.max_epochs {source.max_epochs:g}: the {count:,} rows of the source have "
                "been read that often; raise max_epochs, lower the weight of the source, or end the run at this step"
            )

    def state(self, position: int) -> State:
        counts = self.counts(position).tolist()
        source_states = {
            name: {"position": count, "order": order.state(count)}
            for name, count, order in zip(self.weights, counts, self.orders, strict=True)
        }
        began = dict(zip(self.weights, self._base.tolist(), strict=True))
        return {"weights": self.weights, "began": began, "sources": source_states}

    def counts(self, position: int) -> np.ndarray:
        """Return the number of rows read from each source before ``position``, (n_sources,) int64."""
        periods, slot = divmod(position - self.began, PERIOD)
        in_period = np.bincount(self._pattern[:slot], minlength=len(self.sources))
        return self._base + periods * self.slots + in_period

    def shares(self, position: int) -> dict[str, float]:
        """Return each source's fraction of tokens since the weights took effect; {} before the first row."""
        tokens = self._tokens(self.counts(position)) - self._tokens_before
        return dict(zip(self.weights, (tokens / tokens.sum()).tolist(), strict=True)) if tokens.any() else {}

    def _tokens(self, counts: np.ndarray) -> np.ndarray:
        pairs = zip(self._counters, counts.tolist(), strict=True)
        return np.array([counter.tokens_until(count) for counter, count in pairs], dtype=np.float64)

    def epochs(self, position: int) -> dict[str, float | None]:
        """Return each source's fractional epoch at ``position``; None if the source length is unknown."""
        sizes = [row_count(source.rows) for source in self.sources]
        counts = self.counts(position).tolist()
        pairs = zip(self.weights, counts, sizes, strict=True)
        return {name: None if size is None else count / size for name, count, size in pairs}

    def describe(self, end: int | None) -> list[str]:
        """Return a log line per source with weight and epochs. The run ends at position ``end``; None if unknown."""
        lines = []
        ends = {} if end is None else self.epochs(end)
        for source in self.sources:
            size, epochs = row_count(source.rows), ends.get(source.name)
            if size and epochs and source.max_epochs is not None and epochs > source.max_epochs:
                has = round(size * source.mean_length)
                raise UserError(
                    f"--data.sources.{source.name}.max_epochs {source.max_epochs:g}: the source has {has:,} tokens and "
                    f"this run would read {round(epochs * has):,} ({epochs:.2f} epochs); give it a lower weight, "
                    "shorten the run, or raise max_epochs"
                )
            rows = "an unknown number of rows" if size is None else f"{size:,} rows"
            often = "" if epochs is None else f", {epochs:.4g} epochs in this run"
            lines.append(
                f"Source {source.name}: {source.weight:.2%} of the tokens; {rows} of "
                f"{source.mean_length:,.4g} tokens{often}"
            )
        return lines


class _TokenCounter:
    """Counts a source's input tokens in sample order, incrementally between calls."""

    def __init__(self, source: SourceRows, order: SampleOrder) -> None:
        self._source, self._order = source, order
        self._lengths = row_lengths(source.rows)
        self._last = (0, 0)  # (n_rows, n_tokens) of the previous call

    def tokens_until(self, n_rows: int) -> float:
        """Return the number of tokens in the run's first ``n_rows`` rows from this source."""
        if self._lengths is None:
            return n_rows * self._source.mean_length
        epoch = n_rows // len(self._lengths)
        start = epoch * len(self._lengths)
        if not start <= self._last[0] <= n_rows:
            self._last = (start, epoch * int(self._lengths.sum()))
        row, tokens = self._last
        tokens += int(self._lengths[self._order.ids(np.arange(row, n_rows))].sum())
        self._last = (n_rows, tokens)
        return tokens


def _source_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")
