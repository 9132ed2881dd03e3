"""The rows of several datasets as one stream in fixed shares, see :class:`toolkit.data.Mixture`.

The sources take turns in a pattern of ``PERIOD`` rows that repeats: source i has ``slots[i]`` of them, evenly spread.
Each source keeps the row order that it has without the mixture. A position of the stream maps directly to a source and
a position in it, and the shares hold at any point of a run, not only at its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from toolkit.data.base import TokenDataset, is_ragged, mean_length, row_count, row_lengths, sample_order
from toolkit.data.order import SampleOrder
from toolkit.errors import DataError, UserError

PERIOD = 100_000  # rows
ID_BITS = 55  # row ids of a source with arbitrary ids: 2**23 files of 2**32 rows
MAX_SOURCES = 1 << (63 - ID_BITS)


@dataclass(frozen=True)
class SourceRows:
    """The training rows of one source.

    Args:
        name: Name of the source.
        rows: The dataset.
        weight: Its share of the tokens, 0 to 1.
        max_epochs: How often a run may read it; None: as often as it takes.
        mean_length: Mean input tokens of a row.
    """

    name: str
    rows: TokenDataset
    weight: float
    max_epochs: float | None
    mean_length: float


def interleave(counts: Sequence[int]) -> np.ndarray:
    """Return the source of each of ``sum(counts)`` slots, int64. Each source's slots are evenly spread.

    Slot j of source i is at (j + 0.5) / counts[i] of the length. In any prefix the share of a source is exact to
    about a row per two sources.
    """
    positions = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources[np.argsort(positions, kind="stable")]


def ranks_within(sources: np.ndarray, n_sources: int) -> np.ndarray:
    """Return for each slot how many earlier slots have the same source."""
    ranks = np.empty_like(sources)
    for source in range(n_sources):
        (slots,) = np.nonzero(sources == source)
        ranks[slots] = np.arange(len(slots))
    return ranks


def slots_per_source(sources: Sequence[SourceRows]) -> np.ndarray:
    """Return each source's rows per ``PERIOD``, (n_sources,) int64, by the method of the largest remainder.

    Weights are shares of tokens, so a source of short rows gets more rows.
    """
    rows_per_token = np.array([source.weight / source.mean_length for source in sources])
    exact = PERIOD * rows_per_token / rows_per_token.sum()
    slots = np.floor(exact).astype(np.int64)
    largest = np.argsort(slots - exact, kind="stable")  # remainders, largest first
    slots[largest[: PERIOD - slots.sum()]] += 1
    for source, count in zip(sources, slots, strict=True):
        if source.weight and not count:
            raise UserError(
                f"--data.sources.{source.name}.weight {source.weight:g}: is less than one of {PERIOD:,} rows; raise it "
                "or give 0"
            )
    return slots


class ConcatenatedRows:
    """The rows of several datasets, one after the other; see :class:`toolkit.data.base.TokenDataset`.

    Args:
        datasets: At most ``MAX_SOURCES``. Rows are numbered with gaps if a dataset has no length or defines an order.

    Attributes:
        is_dense: Whether rows are numbered without gaps.
    """

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        self.datasets = list(datasets)
        self.is_dense = not any(row_count(rows) is None or hasattr(rows, "order") for rows in datasets)
        if self.is_dense:
            self.first_ids = np.cumsum([0, *map(len, datasets[:-1])], dtype=np.int64)
        else:
            self.first_ids = np.arange(len(datasets), dtype=np.int64) << ID_BITS
        self.is_ragged = any(map(is_ragged, datasets)) or len(set(map(mean_length, datasets))) > 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        dataset = int(np.searchsorted(self.first_ids, index, side="right")) - 1
        return self.datasets[dataset][index - int(self.first_ids[dataset])]

    @cached_property
    def lengths(self) -> np.ndarray | None:
        """Input tokens of each row, (n,) int64; None if all have the same, or rows are numbered with gaps."""
        if not (self.is_ragged and self.is_dense):
            return None
        fixed = (np.full(len(rows), round(mean_length(rows))) for rows in self.datasets)
        lengths = (row_lengths(rows) for rows in self.datasets)
        return np.concatenate([same if each is None else each for each, same in zip(lengths, fixed, strict=True)])


class CountedRows(ConcatenatedRows):
    """Datasets of known length."""

    def __len__(self) -> int:
        return sum(map(len, self.datasets))


class MixtureRows(ConcatenatedRows):
    """The training rows of all sources.

    Args:
        change_weights: Whether a run may resume with other weights than before.
    """

    def __init__(self, sources: Sequence[SourceRows], change_weights: bool) -> None:
        super().__init__([source.rows for source in sources])
        self.sources, self.change_weights = list(sources), change_weights
        # over the stream: weights are shares of tokens
        self.mean_length = 1 / sum(source.weight / source.mean_length for source in sources)

    @property
    def preview(self) -> CountedRows:
        """Sample rows of all sources, for inspect_data."""
        return CountedRows([getattr(rows, "preview", rows) for rows in self.datasets])

    def order(self, seed: int, state: dict[str, Any]) -> MixtureOrder:
        weights = {source.name: source.weight for source in self.sources}
        if state and state["weights"] != weights and not self.change_weights:
            raise UserError(
                f"--data.sources: weights are {describe_weights(weights)}, but {describe_weights(state['weights'])} "
                "in the checkpoint; restore those, or set --data.change_weights true to continue with the new ones"
            )
        return MixtureOrder(self.sources, self.first_ids, seed, state)


class CountedMixtureRows(MixtureRows, CountedRows):
    """Sources of known length: an epoch has as many rows as all of them together."""


def mixture_rows(sources: Sequence[SourceRows], change_weights: bool = False) -> Any:
    """Return the training rows, a :class:`MixtureRows`; they have a length if all sources have one."""
    is_counted = all(row_count(source.rows) is not None for source in sources)
    return (CountedMixtureRows if is_counted else MixtureRows)(sources, change_weights)


def describe_weights(weights: dict[str, float]) -> str:
    """Return names and weights for a message: ``web 0.75, code 0.25``."""
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())


class MixtureOrder:
    """See :class:`toolkit.data.order.SampleOrder`.

    Args:
        first_ids: The index of each source's first row, (n_sources,).
        seed: Seed of the run; each source derives its seed from this and its name.
        state: State from the checkpoint; {} at the start of a run.
    """

    def __init__(self, sources: Sequence[SourceRows], first_ids: np.ndarray, seed: int, state: dict[str, Any]) -> None:
        self.sources, self.first_ids = sources, first_ids
        self.weights = {source.name: source.weight for source in sources}
        start = {name: {"position": 0, "order": {}} for name in self.weights}
        source_states: dict[str, Any] = state["sources"] if state else start
        self.orders = [
            sample_order(source.rows, _source_seed(seed, source.name), source_states[source.name]["order"])
            for source in sources
        ]
        # Each source's position where the current weights took effect.
        began = {name: saved["position"] for name, saved in source_states.items()}
        if state and state["weights"] == self.weights:
            began = state["began"]
        self._base = np.array([began[name] for name in self.weights], dtype=np.int64)
        self.began = int(self._base.sum())
        self.slots = slots_per_source(sources)
        self._pattern = interleave(self.slots.tolist())
        self._ranks = ranks_within(self._pattern, len(sources))
        self._counters = [_TokenCounter(*pair) for pair in zip(sources, self.orders, strict=True)]
        self._tokens_before = self._tokens(self._base)

    def ids(self, positions: np.ndarray) -> np.ndarray:
        periods, slot = np.divmod(np.asarray(positions, dtype=np.int64) - self.began, PERIOD)
        source_of = self._pattern[slot]
        positions = self._base[source_of] + periods * self.slots[source_of] + self._ranks[slot]  # in each source
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
                f"--data.sources.{source.name}.max_epochs {source.max_epochs:g}: all of its {count:,} rows have been "
                "read that often; raise it, give this source a lower weight, or end the run here"
            )

    def state(self, position: int) -> dict[str, Any]:
        counts = self.counts(position).tolist()
        source_states = {
            name: {"position": count, "order": order.state(count)}
            for name, count, order in zip(self.weights, counts, self.orders, strict=True)
        }
        began = dict(zip(self.weights, self._base.tolist(), strict=True))
        return {"weights": self.weights, "began": began, "sources": source_states}

    def counts(self, position: int) -> np.ndarray:
        """Return the rows of each source before ``position``, since the start of the run, (n_sources,) int64."""
        periods, slot = divmod(position - self.began, PERIOD)
        in_period = np.bincount(self._pattern[:slot], minlength=len(self.sources))
        return self._base + periods * self.slots + in_period

    def shares(self, position: int) -> dict[str, float]:
        """Return each source's share of the tokens since the weights took effect, by name; {} before the first row."""
        tokens = self._tokens(self.counts(position)) - self._tokens_before
        return dict(zip(self.weights, (tokens / tokens.sum()).tolist(), strict=True)) if tokens.any() else {}

    def _tokens(self, counts: np.ndarray) -> np.ndarray:
        pairs = zip(self._counters, counts.tolist(), strict=True)
        return np.array([counter.tokens_until(count) for counter, count in pairs], dtype=np.float64)

    def epochs(self, position: int) -> dict[str, float | None]:
        """Return how often each source has been read before ``position``; None where its length is unknown."""
        sizes = [row_count(source.rows) for source in self.sources]
        counts = self.counts(position).tolist()
        pairs = zip(self.weights, counts, sizes, strict=True)
        return {name: None if size is None else count / size for name, count, size in pairs}

    def describe(self, end: int | None) -> list[str]:
        """Return a log line per source: its weight, and its epochs in a run up to position ``end`` (None: unknown)."""
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
            often = "" if epochs is None else f", {epochs:.2f} epochs in this run"
            lines.append(
                f"Source {source.name}: {source.weight:.2%} of the tokens; {rows} of "
                f"{source.mean_length:,.4g} tokens{often}"
            )
        return lines


class _TokenCounter:
    """Counts the input tokens of a source's rows in their order, a little further with each call."""

    def __init__(self, source: SourceRows, order: SampleOrder) -> None:
        self._source, self._order = source, order
        self._lengths = row_lengths(source.rows)
        self._last = (0, 0)  # a number of rows, and their tokens

    def tokens_until(self, n_rows: int) -> float:
        """Return the tokens of the first ``n_rows`` rows of the run."""
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
