"""Data that defines its sample order, and data that cannot be read."""

import threading

import pytest
from helpers.cases import slow_except
from helpers.compare_runs import losses
from helpers.failing_data import Endless, EndlessRows

from toolkit.config import EvalArgs, OptimizerArgs, TrainArgs
from toolkit.errors import DataError, UserError
from toolkit.planning.run_args import RunArgs
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.engine import run_training


def run(out, steps: int, data: Endless, **options) -> list[float]:
    train = {"global_batch_size": 4, "micro_batch_size": 2, "max_seq_length": 16, "max_steps": steps}
    train |= options.pop("train", {})
    arguments = {
        "command": "pretrain", "model_name": "pico-llama", "data": data, "train": TrainArgs(**train),
        "eval": EvalArgs(), "optimizer": OptimizerArgs(), "out_dir": str(out), "accelerator": "cpu", "devices": 1,
    }  # fmt: skip
    run_training(RunArgs(**arguments | options))
    return losses(out)


def test_s2_order_of_the_data_goes_on_from_its_state(tmp_path):
    """The data has no length, and its order is lost without the state that the checkpoint keeps."""
    schedule = {"lr_schedule": "constant", "lr_warmup_steps": 1}
    undisturbed = run(tmp_path / "a", 6, Endless(vocab_size=300), train=schedule)
    run(tmp_path / "b", 3, Endless(vocab_size=300), train=schedule)
    assert read_meta(tmp_path / "b" / "final")["data"] == {"position": 12}
    assert run(tmp_path / "b", 6, Endless(vocab_size=300), train=schedule, resume="auto") == undisturbed
    with pytest.raises(UserError, match="--train.epochs 1: the number of rows of this data is unknown"):
        run(tmp_path / "c", None, Endless(vocab_size=300), train={"epochs": 1})


@pytest.mark.parametrize("workers", slow_except([1], [0, 1]))
def test_data_that_cannot_be_read_stops_the_run_after_a_checkpoint(tmp_path, workers):
    broken = Endless(vocab_size=300, broken_at=9, broken_rank=0, num_workers=workers)
    with pytest.raises(DataError, match=r"^shard-7.parquet: is damaged.*step-00000002 is saved"):
        run(tmp_path / "run", 6, broken)
    with pytest.raises(UserError, match="^shard-7.parquet: is damaged; download it again$"):  # before the first step
        run(tmp_path / "run", 6, broken, resume="auto")
    assert len(run(tmp_path / "run", 6, Endless(vocab_size=300), resume="auto")) == 6


def test_a_thread_reads_ahead_unless_the_data_forbids_it(tmp_path, monkeypatch):
    seen, read = [], EndlessRows.__getitem__

    def watch(rows, index):
        seen.append((threading.current_thread().name, index))
        return read(rows, index)

    monkeypatch.setattr(EndlessRows, "__getitem__", watch)
    for reads_ahead, expected in ((True, "read-ahead"), (False, "MainThread")):
        monkeypatch.setattr(Endless, "reads_ahead", reads_ahead)
        seen.clear()
        run(tmp_path / expected, 2, Endless(vocab_size=300))
        assert {thread for thread, index in seen if index} == {expected}
        assert len({index for _, index in seen if index}) == 8  # nothing beyond the last step
