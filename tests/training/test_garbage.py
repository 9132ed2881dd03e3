"""Garbage collection during a run: where it is asked for, and as before afterwards."""

import gc
import weakref

import pytest

import toolkit
from toolkit.training import garbage
from toolkit.training.garbage import GarbageCollection


class Cycle:
    def __init__(self):
        self.own = self


def test_collections_are_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(garbage, "STEPS_BETWEEN_COLLECTIONS", 3)
    was_enabled = gc.isenabled()
    with pytest.raises(RuntimeError), GarbageCollection() as collection:
        assert gc.isenabled()
        collection.collect(is_due=False)
        assert not gc.isenabled() and gc.get_freeze_count() > 10_000
        for expected, is_due in [(True, False), (False, False), (True, False), (False, True)]:
            left = weakref.ref(Cycle())
            collection.collect(is_due=is_due)
            assert (left() is not None) == expected
        raise RuntimeError
    assert (gc.isenabled(), gc.get_freeze_count()) == (was_enabled, 0)


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
