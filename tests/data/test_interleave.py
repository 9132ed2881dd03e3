"""The order of a mixture's rows: shares, seeks, changed weights."""

import json

import numpy as np
import pytest
import torch

from toolkit.data.base import mean_length
from toolkit.data.interleave import (
    PERIOD,
    ConcatenatedRows,
    MixtureOrder,
    MixtureRows,
    SourceRows,
    slots_per_source,
)
from toolkit.data.loader import train_batches
from toolkit.data.tokens.synthetic import SyntheticRows
from toolkit.errors import DataError, UserError

WEIGHTS = ({"a": 0.75, "b": 0.25}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 0.9, "b": 0.0, "c": 0.0999, "d": 1e-4})


class UnequalRows(SyntheticRows):
    """Rows of 1 to ``block_size`` - 1 tokens."""

    @property
    def lengths(self):
        return np.random.default_rng(self.seed).integers(1, self.block_size, self.num_rows)

    def __getitem__(self, index):
        return {name: tokens[: self.lengths[index]] for name, tokens in super().__getitem__(index).items()}


def sources(weights, rows=1000, kind=SyntheticRows, max_epochs=None, tokens=16):
    found = [
        (name, weight, kind(vocab_size=100, num_rows=rows + i, seed=i, block_size=tokens + 1))
        for i, (name, weight) in enumerate(weights.items())
    ]
    means = [mean_length(dataset) for _, _, dataset in found]
    return [
        SourceRows(name, dataset, weight, max_epochs, mean)
        for (name, weight, dataset), mean in zip(found, means, strict=True)
    ]


def order_of(weights, state=None, change_weights=False, **options) -> MixtureOrder:
    return MixtureRows(sources(weights, **options), change_weights).order(7, state or {})


def source_of(order: MixtureOrder, ids: np.ndarray) -> np.ndarray:
    return np.searchsorted(order.first_ids, ids, side="right") - 1


def test_shares_are_exact_to_a_row_or_two_at_every_position():
    for weights in WEIGHTS:
        order = order_of(weights)
        sources_read = source_of(order, order.ids(np.arange(2 * PERIOD + 1234)))
        counts = np.cumsum(sources_read[:, None] == np.arange(len(weights)), axis=0)
        exact = np.arange(1, len(sources_read) + 1)[:, None] * np.array(list(weights.values()))
        assert np.abs(counts - exact).max() <= 1 + len(weights) / 2, weights
        assert (counts[-1] == order.counts(len(sources_read))).all()


def test_each_source_gives_its_own_rows_once_per_epoch_whatever_the_weights():
    for weights in WEIGHTS[:2]:
        order = order_of(weights)
        ids = order.ids(np.arange(PERIOD + 5000))
        for i, source in enumerate(order.sources):
            own = ids[source_of(order, ids) == i] - order.first_ids[i]
            n = len(source.rows)
            assert sorted(own[:n]) == list(range(n)) and sorted(own[n : 2 * n]) != own[n : 2 * n].tolist()
            if i < 2:  # the same order in both mixtures
                alone = order_of({"a": 0.5, "b": 0.5}).orders[i].ids(np.arange(len(own)))
                assert (own == alone).all()


def test_s2_any_position_can_be_reached_at_once():
    for weights in WEIGHTS:
        ids = order_of(weights).ids(np.arange(PERIOD + 500))
        for start in (1, 999, PERIOD + 100):
            resumed = order_of(weights, state=order_of(weights).state(start))
            assert (resumed.ids(np.arange(start, PERIOD + 500)) == ids[start:]).all()
            assert resumed.state(start + 33) == order_of(weights).state(start + 33)


@pytest.mark.parametrize("first", [{"a": 0.75, "b": 0.25}, {"a": 1.0, "b": 0.0}])
def test_changed_weights_count_from_where_they_begin_and_sources_go_on_where_they_were(first):
    second, position = {"a": 0.1, "b": 0.9}, 12_345
    state = json.loads(json.dumps(order_of(first).state(position)))
    with pytest.raises(UserError, match="weights are a 0.1, b 0.9, but a .*, b .* in the checkpoint"):
        order_of(second, state=state)
    changed = order_of(second, state=state, change_weights=True)
    before, after = order_of(first).ids(np.arange(position)), changed.ids(position + np.arange(20_000))
    together = np.concatenate([before, after])
    for i in range(2):
        own = together[source_of(changed, together) == i] - changed.first_ids[i]
        assert (own == changed.orders[i].ids(np.arange(len(own)))).all()
    assert changed.shares(position + 20_000) == pytest.approx(second, abs=1e-4)
    again = order_of(second, state=changed.state(position + 500))  # no longer a change
    assert (again.ids(position + np.arange(500, 1000)) == after[500:1000]).all()
    assert again.shares(position + 20_000) == changed.shares(position + 20_000)


def test_weights_are_shares_of_tokens():
    weights = {"a": 0.75, "b": 0.25}
    long, short = sources(weights, tokens=64)[0], sources(weights, kind=UnequalRows)[1]
    rows = MixtureRows([long, short], False)
    order, n = rows.order(0, {}), 50_000
    tokens = np.zeros(2)
    np.add.at(tokens, source_of(order, ids := order.ids(np.arange(n))), rows.lengths[ids])
    assert list(order.shares(n).values()) == pytest.approx(tokens / tokens.sum(), rel=1e-12)
    assert tokens / tokens.sum() == pytest.approx([0.75, 0.25], abs=1e-3)
    assert rows.mean_length == pytest.approx(tokens.sum() / n, rel=1e-3)
    for position in (n + 1, 40, n):  # also backwards
        assert order.shares(position) == rows.order(0, {}).shares(position)


def test_a_source_that_would_end_is_refused_before_the_run_or_ends_it():
    order = order_of({"a": 0.75, "b": 0.25}, max_epochs=2)
    assert "1.95 epochs in this run" in order.describe(2600)[0]
    with pytest.raises(UserError, match=r"sources\.a\.max_epochs 2: the source has 16,000 tokens and .* read 33,600 "):
        order.describe(2800)
    ids = order.ids(np.arange(2600))
    assert len(set(ids)) < len(ids)  # a repeats
    with pytest.raises(DataError, match=r"sources\.a\.max_epochs 2"):
        order.ids(np.arange(2600, 2700))


def test_weight_of_less_than_a_row_is_refused():
    with pytest.raises(UserError, match=r"sources\.b\.weight 1e-06: is less than one row in 100,000; raise it"):
        slots_per_source(sources({"a": 1 - 1e-6, "b": 1e-6}))


def test_rows_of_different_lengths_keep_theirs():
    both = *sources({"a": 1}, rows=50), *sources({"b": 1}, rows=50, kind=UnequalRows)
    rows = ConcatenatedRows([source.rows for source in both])
    assert len(rows) == 100 and rows.is_ragged
    assert [len(rows[i]["input_ids"]) for i in range(len(rows))] == rows.lengths.tolist()


class PackedRows(SyntheticRows):
    """Rows of two documents."""

    def __getitem__(self, index):
        half = torch.arange(self.block_size - 1) // 8
        return super().__getitem__(index) | {"documents": half, "positions": torch.arange(self.block_size - 1) % 8}


def test_rows_without_packing_are_one_document_beside_packed_ones():
    packed, plain = sources({"a": 0.5}, kind=PackedRows), sources({"b": 0.5})
    rows = MixtureRows([*packed, *plain])
    batches = train_batches(
        rows, rows.order(0, {}), start_position=0, total_positions=None, global_batch_size=4, micro_batch_size=4,
        rank=0, world_size=1, num_workers=0,
    )  # fmt: skip
    (batch,) = next(batches)
    for i, row_id in enumerate(batch.ids):
        row = rows[row_id]
        expected = row.get("documents", torch.zeros(16)), row.get("positions", torch.arange(16))
        assert batch.packed["documents"][i].tolist() == expected[0].tolist()
        assert batch.packed["positions"][i].tolist() == expected[1].tolist()
    assert {row_id < 1000 for row_id in batch.ids} == {True, False}
