"""Optimizers of other packages: what a run does is what the package does, and a resume is bit-equal."""

import importlib.util
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import check_each, slow_except
from helpers.compare_runs import assert_same_weights, losses, rows_of
from helpers.groups import Case, run_group
from helpers.small_runs import text_data
from pytorch_optimizer import SOAP
from schedulefree import AdamWScheduleFree
from toolkit_plan.measure.optimizer import state_bytes

from tests.training.test_run import arguments
from toolkit.checkpoints.run.optimizer_state import _fill
from toolkit.checkpoints.weights import load_state, load_weights
from toolkit.config import FSDPArgs, OptimizerArgs
from toolkit.errors import UserError
from toolkit.models.lora_config import LoRAConfig
from toolkit.objectives.inputs import original_module
from toolkit.training.callbacks import Callback
from toolkit.training.engine import run_training

CLASSES = {"AdamWScheduleFree": AdamWScheduleFree, "SOAP": SOAP}
TRAIN = {"max_steps": 6, "save_interval": 3, "keep_last": 0, "lr_schedule": "constant", "lr_warmup_steps": 2}
OPTIONS = {"SOAP": {"precondition_frequency": 2}}


class Alone(Callback):
    """The package's optimizer on a copy of the weights, with the run's gradients."""

    def __init__(self, name: str) -> None:
        self.name, self.differs = name, False

    def on_train_start(self, trainer) -> None:
        module = original_module(trainer.model)
        self.copies = {p: torch.nn.Parameter(p.detach().clone()) for p in module.parameters()}
        self.names = dict(module.named_parameters())
        groups = [
            {"params": [self.copies[p] for p in group["params"]], "weight_decay": group["weight_decay"]}
            for group in trainer.optimizer.param_groups
        ]
        self.optimizer = CLASSES[self.name](groups, **OPTIONS.get(self.name, {}))
        self._set("train")

    def _set(self, mode: str) -> None:
        if self.name == "AdamWScheduleFree":
            getattr(self.optimizer, mode)()

    def on_before_optimizer_step(self, trainer) -> None:
        for parameter, copy in self.copies.items():
            copy.grad = parameter.grad.clone()

    def on_step_end(self, trainer, metrics) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = metrics["learning_rate"]
        self.optimizer.step()
        self.differs |= any(not torch.equal(parameter, copy) for parameter, copy in self.copies.items())

    def validation_metrics(self, trainer) -> dict[str, float]:
        trained = [copy.detach().clone() for copy in self.copies.values()]
        self._set("eval")
        self.differs |= any(not torch.equal(parameter, copy) for parameter, copy in self.copies.items())
        self.average = {name: self.copies[p].detach().clone() for name, p in self.names.items()}
        self._set("train")
        for copy, weight in zip(self.copies.values(), trained, strict=True):
            copy.data.copy_(weight)  # the run's are restored exactly, which train() does not do
        return {}


@pytest.mark.parametrize("name", CLASSES)
def test_a_run_does_what_the_package_does_and_saves_its_average(corpus, tmp_path, capsys, name):
    alone = Alone(name)
    optimizer = OptimizerArgs(name=name, options=OPTIONS.get(name, {}))
    run_training(arguments(corpus, tmp_path / "run", train=TRAIN, optimizer=optimizer), [alone])
    assert alone.optimizer.param_groups[0]["k" if name == "AdamWScheduleFree" else "step"] == 6 and not alone.differs
    assert ("the first step computes eigenvectors of matrices" in capsys.readouterr().out) == (name == "SOAP")
    saved = load_weights(tmp_path / "run" / "final")
    assert alone.average and all(torch.equal(saved[name], value) for name, value in alone.average.items())


CASES = {
    "full": {},
    "sharded": {"fsdp": FSDPArgs(state_dict_type="sharded")},
    "async": {"train": {"async_save": True}},
    "adapters": {"lora": LoRAConfig(), "command": "finetune_lora", "model_name": None},
}


@pytest.mark.parametrize("case", slow_except(["sharded"], CASES))
@pytest.mark.parametrize("name", slow_except(["AdamWScheduleFree"], CLASSES))
def test_s2_a_resume_is_bit_equal(corpus, tmp_path, name, case):
    options = dict(CASES[case]) | {"optimizer": OptimizerArgs(name=name, options=OPTIONS.get(name, {}))}
    train = TRAIN | options.pop("train", {})
    if case == "adapters":
        run_training(arguments(corpus, tmp_path / "base", train={"max_steps": 1}))
        options["initial_checkpoint_dir"] = str(tmp_path / "base" / "final")
    run_training(arguments(corpus, tmp_path / "run", train=train, **options))
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "final")
    run_training(arguments(corpus, tmp_path / "resumed", train=train, resume="auto", **options))
    folders = [tmp_path / out / "final" for out in ("run", "resumed")]
    assert losses(tmp_path / "resumed") == losses(tmp_path / "run")
    if case == "adapters":
        adapters = [load_state(folder / "lit_model.pth.lora") for folder in folders]
        assert all(torch.equal(adapters[0][key], adapters[1][key]) for key in adapters[0])
    else:
        assert_same_weights(*folders)


def test_a_schedule_free_run_has_a_constant_rate_and_says_so(corpus, tmp_path):
    options = {"optimizer": OptimizerArgs(name="AdamWScheduleFree")}

    def run(out: str, **train) -> None:
        run_training(arguments(corpus, tmp_path / out, train={"max_steps": 3, "lr_warmup_steps": 0} | train, **options))

    run("default")
    assert len({row["learning_rate"] for row in rows_of(tmp_path / "default")}) == 1
    for schedule in ("linear", "wsd"):
        with pytest.raises(UserError, match=f"--train.lr_schedule {schedule} is not supported with a schedule-free"):
            run(schedule, lr_schedule=schedule)
    with pytest.raises(UserError, match=r"--train.ema 0.9 is not supported with a schedule-free optimizer: the opt"):
        run("average", ema=0.9)


def test_lists_of_matrices_are_restored_on_the_device_and_planned():
    parameter = torch.nn.Parameter(torch.zeros(6, 4, device="meta"))
    part, state = SimpleNamespace(parameter=parameter), {"Q": None}
    _fill(state, {"Q": [torch.zeros(6, 6), []]}, part, is_torch_optimizer=False)
    assert state["Q"][0].is_meta and state["Q"][1] == []
    moments_and_matrices = 4 * (2 * 6 * 4 + 2 * (6 * 6 + 4 * 4))
    assert state_bytes({"name": "SOAP"}, torch.float32, (6, 4)) == moments_and_matrices


def test_a_missing_package_is_one_line(monkeypatch, refusal):
    find_spec = importlib.util.find_spec

    def check(name: str, package: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda n, *rest: None if n == package else find_spec(n, *rest))
        assert f"--optimizer.name {name}: needs {package}; run: pip install '{package}>=" in refusal(
            "pretrain", "pico-llama", "--optimizer.name", name, "--train.max_steps", "1"
        )

    check_each(check, [("AdamWScheduleFree", "schedulefree"), ("SOAP", "pytorch_optimizer")])


@pytest.mark.slow
def test_n3_two_ranks(tmp_path, corpus):
    """Schedule-free updates each element independently; SOAP needs complete matrices, so auto takes ddp."""
    shared = ["pico-llama", "--accelerator", "cpu", *text_data(corpus), "--train.global_batch_size", "8"]
    shared += ["--train.micro_batch_size", "2", "--train.max_seq_length", "32", "--train.max_steps", "6"]
    shared += ["--train.save_interval", "3", "--train.keep_last", "0"]
    for size in (1, 2):
        run_group(tmp_path, size, [Case(f"{name}-{size}", ["--optimizer.name", name]) for name in CLASSES], shared)
    for name, tolerance in (("AdamWScheduleFree", 1e-5), ("SOAP", 1e-4)):  # eigenvectors amplify rounding
        assert losses(tmp_path / f"{name}-2") == pytest.approx(losses(tmp_path / f"{name}-1"), rel=tolerance)
    shutil.rmtree(tmp_path / "AdamWScheduleFree-2" / "final")
    before = losses(tmp_path / "AdamWScheduleFree-2")
    again = Case("AdamWScheduleFree-2", ["--optimizer.name", "AdamWScheduleFree", "--resume", "auto"])
    run_group(tmp_path, 2, [again], shared)
    assert losses(tmp_path / "AdamWScheduleFree-2") == before
