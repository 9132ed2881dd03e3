"""Runs whose only limit is ``--train.max_time``, on a clock that a test controls."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.compare_runs import rows_of
from helpers.groups import Case, run_group

from toolkit.checkpoints.weights import load_weights
from toolkit.config import EvalArgs, OptimizerArgs, TrainArgs
from toolkit.data import TextFiles
from toolkit.planning.run_args import RunArgs
from toolkit.training import engine
from toolkit.training.engine import run_training
from toolkit.training.run import Callback, Run


class Recorded(Callback):
    """Replays learning rates by step, as metrics.csv has them."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates = rates

    def on_train_start(self, trainer: Run) -> None:
        rates = self.rates

        class Schedule(type(trainer.schedule)):
            def learning_rate(self, step: int, seconds: float = 0.0) -> float:
                return rates[step + 1]

        trainer.schedule = Schedule(**vars(trainer.schedule))


@pytest.fixture(scope="module")
def train(corpus) -> Iterator[Callable[..., list[dict[str, float]]]]:
    """A function that trains and returns the rows of metrics.csv. Each reading of the clock takes 150 ms."""
    ticks = iter(range(10**9))
    clock = SimpleNamespace(perf_counter=lambda: 0.15 * next(ticks))
    data = TextFiles(train_data_path=str(corpus), vocab_size=300)
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "max_seq_length": 32, "learning_rate": 3e-3}

    def run(out: Path, *callbacks: Callback, resume: bool = False, **options) -> list[dict[str, float]]:
        args = RunArgs(
            command="pretrain", model_name="pico-llama", data=data, train=TrainArgs(**sizes, **options),
            eval=EvalArgs(interval=10), optimizer=OptimizerArgs(), out_dir=str(out), accelerator="cpu", devices=1,
            resume=resume,
        )  # fmt: skip
        run_training(args, callbacks)
        return [{name: float(cell or "nan") for name, cell in row.items()} for row in rows_of(out)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "time", clock)
        yield run


@pytest.fixture(scope="module")
def half(train, tmp_path_factory) -> tuple[Path, list[dict[str, float]]]:
    out = tmp_path_factory.mktemp("half") / "run"
    return out, train(out, max_time=0.25)


def test_n5_schedule_and_end_follow_the_time(half, capsys):
    out, rows = half
    rates = [row["learning_rate"] for row in rows]
    peak = rates.index(max(rates))
    assert len(rows) > 20 and 0 < rates[0] < 1.5e-3 and rates[peak] > 2.9e-3
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(3e-4)  # not before the end: the step before has more
    assert rates[-2] > 3e-4
    assert 15 <= rows[-1]["seconds"] < 16  # without validation and saves
    assert {path.name for path in out.iterdir() if (path / "COMPLETE").exists()} == {"final"}


def test_replay_of_the_recorded_rates_is_bit_equal(half, train, tmp_path):
    out, rows = half
    rates = {int(row["step"]): row["learning_rate"] for row in rows}
    again = train(tmp_path / "again", Recorded(rates), max_steps=len(rates))
    assert [row["learning_rate"] for row in again] == list(rates.values())
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    first, second = (load_weights(folder / "final") for folder in (out, tmp_path / "again"))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_budget_counts_all_launches(half, train, tmp_path):
    """A finished run stays finished; with a larger budget it continues at the share that is used."""
    out, rows = half
    before = (out / "logs" / "metrics.csv").read_bytes()
    train(out, resume=True, max_time=0.25)
    assert (out / "logs" / "metrics.csv").read_bytes() == before
    longer = train(out, resume=True, max_time=0.5)
    assert len(longer) > len(rows) and 30 <= longer[-1]["seconds"] < 31
    first, share = longer[len(rows)]["learning_rate"], rows[-1]["seconds"] / 30
    assert first == pytest.approx(3e-4 + 2.7e-3 * 0.5 * (1 + math.cos(math.pi * (share - 0.05) / 0.95)))


@pytest.mark.slow
def test_n4_all_ranks_use_the_clock_of_the_first(corpus, tmp_path, monkeypatch):
    (tmp_path / "clocks.py").write_text(
        "import json, time\nfrom types import SimpleNamespace\n"
        "from toolkit.distributed import ranks\nfrom toolkit.training import engine\n"
        "from toolkit.training.run import Callback\n"
        "class FastClock(Callback):\n"
        "    rates = []\n"
        "    def on_train_start(self, trainer):\n"
        "        factor = 1 + 2 * ranks.global_rank()\n"
        "        engine.time = SimpleNamespace(perf_counter=lambda: factor * time.perf_counter())\n"
        "    def on_step_end(self, trainer, metrics):\n"
        "        rates = ranks.all_gather_object(trainer.optimizer.param_groups[0]['lr'])\n"
        "        self.rates.append(rates)\n"
        "    def on_train_end(self, trainer):\n"
        "        (trainer.out_dir / 'rates.json').write_text(json.dumps(self.rates))\n"
    )
    monkeypatch.chdir(tmp_path)
    shared = [
        "pico-llama", "--accelerator", "cpu", "--data", "TextFiles", "--data.train_data_path", str(corpus),
        "--data.vocab_size", "300", "--train.global_batch_size", "8", "--train.max_seq_length", "32",
        "--train.max_time", "0.05", "--strategy", "fsdp", "--callbacks", "clocks.FastClock",
    ]  # fmt: skip
    run_group(tmp_path, 2, [Case("run", [])], shared)
    rates = json.loads((tmp_path / "run" / "rates.json").read_text())
    assert len(rates) > 2 and all(first == second for first, second in rates)
