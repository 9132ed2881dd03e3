"""S2 for complete runs: optimizers with numbers in their parameter groups, and damaged trainer states."""

import re
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from helpers.compare_runs import losses, rows_of
from helpers.sealing import seal
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch.amp import GradScaler

from tests.checkpoints.run.test_optimizer_state import Growing
from tests.training.test_run import arguments
from toolkit.checkpoints.weights import load_state, save_state
from toolkit.config import FSDPArgs, OptimizerArgs
from toolkit.errors import UserError
from toolkit.io.safe_parse import read_yaml
from toolkit.models.lora_config import LoRAConfig
from toolkit.training import launch
from toolkit.training.checkpoint_meta import RunFingerprint
from toolkit.training.engine import run_training

STATE = "trainer/state.pth"


def growing(momentum: float) -> dict:
    return {"optimizer_class": Growing, "optimizer": OptimizerArgs(name="Growing", options={"momentum": momentum})}


@pytest.mark.parametrize(
    ("kind", "momentum"),
    [
        pytest.param("full", 0.0, marks=pytest.mark.slow),
        pytest.param("full", 0.9, marks=pytest.mark.slow),
        ("sharded", 0.9),
        pytest.param("adapters", 0.9, marks=pytest.mark.slow),
        # test_optimizer_state.py checks optimizers without state in every format
        pytest.param("sharded", 0.0, marks=pytest.mark.slow),
        pytest.param("adapters", 0.0, marks=pytest.mark.slow),
    ],
)
def test_s2_param_group_values_survive_a_resume(corpus, tmp_path, kind, momentum):
    options = growing(momentum) | {"fsdp": FSDPArgs(state_dict_type="sharded" if kind == "sharded" else "full")}
    train = {"learning_rate": 1.0}
    if kind == "adapters":
        run_training(arguments(corpus, tmp_path / "base", train={"max_steps": 1}))
        base = str(tmp_path / "base" / "final")
        options |= {
            "model_name": None,
            "initial_checkpoint_dir": base,
            "lora": LoRAConfig(),
            "command": "finetune_lora",
        }
    for out, steps in (("uninterrupted", 6), ("resumed", 3), ("resumed", 6)):
        limits = train | {"max_steps": steps, "lr_schedule": "constant", "save_interval": 3}
        run_training(arguments(corpus, tmp_path / out, train=limits, resume="auto", **options))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "uninterrupted")
    assert len(set(losses(tmp_path / "uninterrupted"))) == 6
    if kind != "sharded":
        states = [load_state(tmp_path / out / "final" / STATE)["optimizer"] for out in ("uninterrupted", "resumed")]
        assert states[0]["param_groups"] == states[1]["param_groups"] and states[0]["param_groups"][0]["k"] == 6


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    run_training(arguments(corpus, folder / "run", train={"max_steps": 2}))
    return folder / "run"


def test_an_option_of_one_launch_only_is_named_with_its_value(tmp_path):
    """Muon takes --optimizer.state_dtype, which has no value in the fingerprint by default."""
    plain, bf16 = {"name": "Muon"}, {"name": "Muon", "state_dtype": "bf16"}
    flag, again = "--optimizer.state_dtype", "give the same, or another --out_dir"
    amsgrad, option = {"name": "Muon", "amsgrad": True}, "--optimizer.options amsgrad"
    for saved, now, message in (
        (bf16, plain, f"{flag}: {tmp_path} was trained with {flag} bf16; {again}"),
        (plain, bf16, f"{flag} bf16: {tmp_path} was trained without it; {again}"),
        (plain, amsgrad, f"{option} true: {tmp_path} was trained without it; {again}"),
        (amsgrad, plain, f"{option}: {tmp_path} was trained with {option} true; {again}"),
        (amsgrad, amsgrad | {"amsgrad": False}, f"{option} false: {tmp_path} was trained with {option} true; {again}"),
    ):
        fingerprint = RunFingerprint({}, "data", 8, 0, "32-true", now)
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            fingerprint.check_matches(asdict(replace(fingerprint, optimizer=saved)), tmp_path)


def set_entry(name, value):
    return lambda state: state.update({name: value})


def set_numpy_position(position):
    def change(state):
        state["rng"][0]["numpy"][2] = position

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("optimizer"), "optimizer: is missing"),
        (set_entry("optimizer", None), "optimizer: is missing or not a dict"),
        (set_entry("optimizer", {"state": {}, "param_groups": []}), "missing optimizer state of .* and [0-9]+ more"),
        (set_entry("rng", None), "rng: is missing or not a list"),
        (set_entry("rng", [3]), "rng: "),
        (lambda state: state["rng"][0].pop("python"), "rng: "),
        (lambda state: state["rng"][0].update(torch=torch.zeros(3)), "rng: "),
        (lambda state: state["rng"][0].update(numpy=["MT19937"]), "rng: "),
        (set_numpy_position(10**6), "rng: position 1000000"),
        (set_entry("scaler", GradScaler("cpu").state_dict() | {"scale": "x"}), "scaler: scale has another type"),
    ],
)
def test_damaged_trainer_state_is_a_one_line_error(corpus, tmp_path, stopped, change, message, monkeypatch):
    if "scaler" in message:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu"))
        fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
        monkeypatch.setattr(launch, "build_fabric", lambda *args, **options: fabric)
    shutil.copytree(stopped, tmp_path / "run")
    file = tmp_path / "run" / "final" / STATE
    state = torch.load(file, weights_only=True)
    change(state)
    save_state(state, file)
    (tmp_path / "run" / "final" / "COMPLETE").write_text("")
    with pytest.raises(UserError, match=message) as error:
        run_training(arguments(corpus, tmp_path / "run", train={"max_steps": 4}, resume="auto"))
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)


@pytest.mark.slow
def test_s2_scaled_learning_rate_continues_and_another_base_batch_is_reported(corpus, tmp_path, capsys):
    scaled = {"lr_scaling": "sqrt", "lr_base_batch": 2, "lr_warmup_steps": 8, "lr_schedule": "constant"}
    for out, steps in (("uninterrupted", 4), ("resumed", 3), ("resumed", 4)):
        run_training(arguments(corpus, tmp_path / out, train=scaled | {"max_steps": steps}, resume="auto"))
    output = capsys.readouterr().out
    assert output.count("peak learning rate 0.003 x 2 = 0.006, warm-up 2 steps (16 samples)") == 3
    rates = [float(row["learning_rate"]) for row in rows_of(tmp_path / "resumed")]
    assert rates == pytest.approx([3e-3, 6e-3, 6e-3, 6e-3])
    assert losses(tmp_path / "resumed") == losses(tmp_path / "uninterrupted")
    more = scaled | {"max_steps": 5, "lr_base_batch": 8, "lr_warmup_steps": 2}
    run_training(arguments(corpus, tmp_path / "resumed", train=more, resume="auto"))
    assert "LR schedule changed on resume: peak 0.006 -> 0.003" in capsys.readouterr().out


def test_s2_resume_keeps_the_micro_batch_of_its_checkpoint(corpus, tmp_path):
    for out, size, steps in (("uninterrupted", 2, 4), ("resumed", 2, 2), ("resumed", "auto", 4), ("auto", "auto", 1)):
        train = {"max_steps": steps, "micro_batch_size": size, "lr_schedule": "constant"}
        run_training(arguments(corpus, tmp_path / out, train=train, resume="auto"))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "uninterrupted")
    sizes = {out: read_yaml(tmp_path / out / "final/hyperparameters.yaml")["train"] for out in ("resumed", "auto")}
    assert {out: train["micro_batch_size"] for out, train in sizes.items()} == {"resumed": 2, "auto": 4}


def test_resume_on_another_number_of_devices_takes_the_micro_batch_of_auto(corpus, tmp_path):
    train = {"max_steps": 2, "micro_batch_size": 2, "lr_schedule": "constant"}
    run_training(arguments(corpus, tmp_path, train=train))
    meta = tmp_path / "final" / "trainer" / "meta.json"
    text = meta.read_text()
    assert '"data_parallel": 1,' in text
    meta.write_text(text.replace('"data_parallel": 1,', '"data_parallel": 2,'))
    seal(tmp_path / "final")
    run_training(arguments(corpus, tmp_path, train=train | {"max_steps": 3, "micro_batch_size": "auto"}, resume="auto"))
    assert read_yaml(tmp_path / "final/hyperparameters.yaml")["train"]["micro_batch_size"] == 4
