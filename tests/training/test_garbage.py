"""Garbage collection during a run: where it is asked for, and as before afterwards."""

import gc
import weakref

import pytest
from helpers.surroundings import get_freeze_count

import toolkit
from toolkit.training import garbage
from toolkit.training.garbage import GarbageCollection


@pytest.fixture(autouse=True)
def _thawed(monkeypatch):
    """As in a user's process; conftest.py freezes what the tests import."""
    monkeypatch.setattr(gc, "get_freeze_count", get_freeze_count)
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    def __init__(self):
        self.own = self


def test_collections_are_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(garbage, "STEPS_BETWEEN_COLLECTIONS", 3)
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count()
    with pytest.raises(RuntimeError), GarbageCollection() as collection:
        assert gc.isenabled() and collection.share == 0
        collection.collect(is_full=False)
        assert not gc.isenabled() and gc.get_freeze_count() > 10_000 and collection.share == 0
        for expected, is_full in [(True, False), (False, False), (True, False), (False, True)]:
            left = weakref.ref(Cycle())
            collection.collect(is_full=is_full)
            assert (left() is not None) == expected
        assert 0 < collection.share < 1
        raise RuntimeError
    assert gc.isenabled() == was_enabled and gc.get_freeze_count() <= was_frozen < 1000


@pytest.mark.parametrize(("frozen", "thaws"), [(0, 1), (375, 1), (100_000, 0)])  # 375: Python 3.12 at its start
def test_steps_collect_young_objects_only(monkeypatch, frozen, thaws):
    calls, generations = [], []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "collect", generations.append)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    with GarbageCollection() as collection:
        collection.collect(is_full=False)
        for _ in range(10_000):  # without validation and save
            collection.collect(is_full=False)
        assert generations == [2] + [1] * 500
        for _ in range(5):
            collection.collect()
    assert calls == (["freeze"] * garbage.MAX_FREEZES + ["unfreeze"]) * thaws


def test_a_run_leaves_the_collector_as_it_was(tmp_path):
    torch = pytest.importorskip("torch")  # test_interpreters.py runs the other test without
    states = []

    class Look(toolkit.Callback):
        def on_step_end(self, trainer, metrics):
            states.append(gc.isenabled())

    config = toolkit.ModelConfig(vocab_size=64, n_layer=1, n_embd=32, block_size=16)
    rows = torch.randint(0, 64, (8, 9))
    toolkit.train(
        config, rows, train={"max_steps": 2, "global_batch_size": 2, "micro_batch_size": 2}, devices=1,
        accelerator="cpu", callbacks=[Look()], eval={"final_validation": False}, out_dir=tmp_path,
    )  # fmt: skip
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert states == [False] * 2
