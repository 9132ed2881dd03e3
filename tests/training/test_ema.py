"""--train.ema: checkpoints and validation have the average, and training does not notice."""

import shutil

import pytest
import torch
from helpers.cases import check_each, slow_except
from helpers.compare_runs import assert_same_weights, losses, rows_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.training.test_run import arguments
from toolkit.checkpoints.run.optimizer_state import load_optimizer
from toolkit.checkpoints.run.state_dicts import full_state
from toolkit.checkpoints.weights import load_state, load_weights, save_state
from toolkit.config import FSDPArgs, OptimizerArgs
from toolkit.errors import UserError
from toolkit.models.lora_config import LoRAConfig
from toolkit.objectives.inputs import original_module
from toolkit.optim.evaluation_weights import EvaluationWeights
from toolkit.training.callbacks import Callback
from toolkit.training.callbacks.spikes import SkipSpikes
from toolkit.training.engine import run_training

DECAY = 0.8
TRAIN = {"ema": DECAY, "max_steps": 6, "save_interval": 3, "keep_last": 0}


class Oracle(Callback):
    """torch's average of the trained weights, and what a callback sees in validation."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_start(self, trainer) -> None:
        self.average = AveragedModel(original_module(trainer.model), multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def on_step_end(self, trainer, metrics) -> None:
        self.average.update_parameters(original_module(trainer.model))

    def _is_average(self, trainer) -> bool:
        pairs = zip(original_module(trainer.model).parameters(), self.average.module.parameters(), strict=True)
        return all(torch.equal(weight, average) for weight, average in pairs)

    def validation_metrics(self, trainer) -> dict[str, float]:
        self.seen.append(self._is_average(trainer))
        return {}

    def on_validation_end(self, trainer, metrics) -> None:
        self.seen.append(not self._is_average(trainer) or trainer.progress.step == 1)


def test_checkpoints_and_validation_have_torchs_average_and_training_is_the_same(corpus, tmp_path):
    oracle = Oracle()
    evaluation = {"interval": 2, "max_new_tokens": 2}
    run_training(arguments(corpus, tmp_path / "average", train=TRAIN, evaluation=evaluation), [oracle])
    run_training(arguments(corpus, tmp_path / "plain", train=TRAIN | {"ema": None}, evaluation=evaluation))
    saved = load_weights(tmp_path / "average" / "final")
    for name, value in oracle.average.module.state_dict().items():
        assert torch.equal(saved[name], value), name
    assert oracle.seen == [True] * 6
    assert losses(tmp_path / "average") == losses(tmp_path / "plain")
    trained = load_weights(tmp_path / "plain" / "final")
    state = load_state(tmp_path / "average" / "final" / "trainer" / "state.pth")["optimizer"]["state"]
    assert all(torch.equal(state[name]["trained"], trained[name]) for name in state)
    plain = load_state(tmp_path / "plain" / "final" / "trainer" / "state.pth")["optimizer"]["state"]
    assert all(set(plain[name]) == set(state[name]) - {"trained"} for name in state)
    curves = [[row["val_loss"] for row in rows_of(tmp_path / out)] for out in ("average", "plain")]
    assert curves[0] != curves[1]
    run = arguments(
        corpus, tmp_path / "again", train={"max_steps": 1}, evaluation={"initial_validation": True},
        model_name=None, initial_checkpoint_dir=str(tmp_path / "average" / "final"),
    )  # fmt: skip
    run_training(run)
    assert rows_of(tmp_path / "again")[0]["val_loss"] == curves[0][-1]  # what any command reads


CASES = {
    "full": {},
    "sharded": {"fsdp": FSDPArgs(state_dict_type="sharded")},
    "async": {"train": {"async_save": True}},
    "adapters": {"lora": LoRAConfig(), "command": "finetune_lora", "model_name": None},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-master": {"precision": "bf16-master", "train": {"micro_batch_size": 8}},
    "bf16 moments": {"optimizer": OptimizerArgs(state_dtype="bf16")},
    "no state": {"optimizer": OptimizerArgs(name="SGD")},
    "Muon": {"optimizer": OptimizerArgs(name="Muon")},
    "in backward": {
        "optimizer": OptimizerArgs(in_backward=True),
        "train": {"micro_batch_size": 8, "max_norm": 0.0},
    },
}


@pytest.mark.parametrize("name", slow_except(["adapters", "bf16-true"], CASES))
def test_s2_a_resumed_average_is_bit_equal(corpus, tmp_path, name):
    options = dict(CASES[name])
    train = TRAIN | options.pop("train", {})
    if name == "adapters":
        run_training(arguments(corpus, tmp_path / "base", train={"max_steps": 1}))
        options["initial_checkpoint_dir"] = str(tmp_path / "base" / "final")
    for out in ("uninterrupted", "resumed"):
        run_training(arguments(corpus, tmp_path / out, train=train, resume="auto", **options))
        if out == "resumed":
            shutil.rmtree(tmp_path / out / "final")
            run_training(arguments(corpus, tmp_path / out, train=train, resume="auto", **options))
    folders = [tmp_path / out / "final" for out in ("uninterrupted", "resumed")]
    assert losses(folders[1].parent) == losses(folders[0].parent)
    if name == "adapters":
        adapters = [load_state(folder / "lit_model.pth.lora") for folder in folders]
        assert all(torch.equal(adapters[0][key], adapters[1][key]) for key in adapters[0])
    else:
        assert_same_weights(*folders)


def test_skipped_steps_do_not_move_the_average(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(SkipSpikes, "is_spike", lambda *_: next(spikes))

    class SkippingOracle(Oracle):
        skipped = 0

        def on_step_end(self, trainer, metrics) -> None:
            if trainer.skipped_steps == self.skipped:
                super().on_step_end(trainer, metrics)
            self.skipped = trainer.skipped_steps

    spikes, oracle = iter([True, False, False, True, False]), SkippingOracle()
    run_training(arguments(corpus, tmp_path, train=TRAIN | {"max_steps": 5, "skip_spikes": 6.0}), [oracle])
    saved = load_weights(tmp_path / "final")
    assert oracle.skipped == 2
    assert all(torch.equal(saved[name], value) for name, value in oracle.average.module.state_dict().items())


class Late(nn.Module):
    """A model whose second weight gets its first gradient in a later step."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))


def test_s2_a_weight_without_a_gradient_is_averaged_from_the_first_step_on(tmp_path):
    def build() -> tuple[Late, torch.optim.Optimizer, EvaluationWeights]:
        model = Late()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, EvaluationWeights(optimizer, DECAY)

    def step(parts, n: int) -> None:
        model, optimizer, averages = parts
        model.early.grad = torch.full((2, 2), float(n))
        model.late.grad = torch.full((2, 2), float(n)) if n > 2 else None
        optimizer.step()
        averages.update()

    first, resumed = build(), build()
    oracle = AveragedModel(first[0], multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for n in (1, 2):
        step(first, n)
        oracle.update_parameters(first[0])
    with first[2].active():
        weights, saved = full_state(*first[:2], {})
        save_state({"optimizer": saved}, tmp_path / "state.pth")
        resumed[0].load_state_dict(weights)
    saved = load_state(tmp_path / "state.pth")["optimizer"]
    model, optimizer, averages = resumed
    load_optimizer(model, optimizer, saved, tmp_path, tmp_path, may_be_empty=False)
    averages.restore()
    for n in (3, 4):
        step(first, n)
        step(resumed, n)
        oracle.update_parameters(first[0])
    for parts in (first, resumed):
        assert torch.equal(parts[0].late, first[0].late) and not torch.equal(parts[0].late, torch.ones(2, 2))
        with parts[2].active(), parts[2].active():
            for name, value in oracle.module.named_parameters():
                assert torch.equal(parts[0].get_parameter(name), value), name


def test_a_resume_with_another_decay_is_refused(corpus, tmp_path):
    run_training(arguments(corpus, tmp_path / "average", train=TRAIN | {"max_steps": 1}))
    run_training(arguments(corpus, tmp_path / "plain", train={"max_steps": 1}))

    def check(out, ema, message):
        with pytest.raises(UserError, match=message):
            run_training(arguments(corpus, tmp_path / out, train={"max_steps": 2, "ema": ema}, resume="auto"))

    check_each(
        check,
        [
            ("average", None, r"^--train.ema: .* was trained with --train.ema 0.8; give the same"),
            ("average", 0.9, r"^--train.ema 0.9: .* was trained with --train.ema 0.8; give the same"),
            ("plain", 0.9, r"^--train.ema 0.9: .* was trained without it; give the same"),
        ],
    )
