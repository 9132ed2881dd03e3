"""--train.skip_spikes: OLMo's rule, the same decision in every layout, and a resume that is bit-equal."""

import json
import shutil

import pytest
import torch
from helpers.compare_runs import assert_same_weights, column
from helpers.groups import losses
from helpers.processes import finish, flags_for, pretrain
from helpers.steps import one_step
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from tests.optim.test_update import adamw, batch
from toolkit.training.callbacks.spikes import WINDOW, SkipSpikes


def test_rule_is_mean_plus_sigma_standard_deviations_of_the_steps_before():
    rule = SkipSpikes(3.0)
    values = [1.0 + 0.1 * (-1) ** i for i in range(WINDOW // 2)]
    assert not any(rule.is_spike(value, 2.0 * value) for value in [9.0, *values[1:]])  # half a window first
    rule = SkipSpikes(3.0)
    assert not any(rule.is_spike(value, 2.0 * value) for value in values)
    std = torch.tensor(values).std().item()
    assert not SkipSpikes.is_spike(copy_of(rule), 1.0 + 2.99 * std, 2.0)
    assert copy_of(rule).is_spike(1.0 + 3.01 * std, 2.0)
    assert copy_of(rule).is_spike(1.0, 2.0 + 6.02 * std)
    assert not copy_of(rule).is_spike(-50.0, 0.0)  # only upwards
    assert sum(rule.is_spike(3.0, 2.0) for _ in range(200)) < 50  # a lasting change is accepted


def copy_of(rule: SkipSpikes) -> SkipSpikes:
    again = SkipSpikes(rule.sigma)
    again.load_state_dict(rule.state_dict())
    assert again.state_dict() == rule.state_dict()
    return again


@pytest.mark.parametrize("scaled", [False, True])
def test_skipped_step_changes_nothing_and_the_next_one_trains(pico, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    plugins = MixedPrecision("16-mixed", "cpu", scaler=scaler) if scaled else None
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
    model, optimizer = fabric.setup(pico, adamw(pico, fused=not scaled))
    answers = iter([False, True, False])
    seen = []
    for _ in range(3):
        before = [p.clone() for p in pico.parameters()]
        options = {"is_spike": lambda loss, norm: seen.append((loss, norm)) or next(answers)}
        result = one_step(fabric, model, optimizer, [batch(0), batch(1)], 1e-2, max_norm=1.0, **options)
        assert seen[-1] == (result.loss, result.grad_norm)
        assert result.skipped == all(map(torch.equal, before, pico.parameters())) == (len(seen) == 2)
        assert all(p.grad is None for p in pico.parameters())


def run(corpus, out, *flags):
    train = {"max_steps": 80, "save_interval": 0, "log_interval": 1, "skip_spikes": 0.5, "learning_rate": 1e-5}
    process = pretrain(*flags_for(corpus, out, **train), *flags)
    _, err = finish(process)
    assert process.returncode == 0, err
    return [int(step) for step in column(out, "skipped_steps")]


@pytest.mark.slow
def test_s2_resume_is_bit_equal_and_two_ranks_skip_the_same_steps(corpus, tmp_path):
    skipped = run(corpus, tmp_path / "one")
    assert skipped[:64] == [0] * 64 and skipped[-1] > 0
    touch = [{"class_path": "helpers.faulty_callbacks.Touch", "init_args": {"name": "STOP", "step": 70}}]
    run(corpus, tmp_path / "parts", "--callbacks", json.dumps(touch))
    assert (tmp_path / "parts" / "step-00000070").exists()
    assert run(corpus, tmp_path / "parts") == skipped
    assert_same_weights(tmp_path / "one" / "final", tmp_path / "parts" / "final")
    assert losses(tmp_path / "one") == losses(tmp_path / "parts")
    for layout in ("--strategy fsdp", "--strategy ddp", "--pipeline_parallel_size 2"):
        assert run(corpus, tmp_path / "two", "--devices", "2", *layout.split()) == skipped
        assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)  # no rank trained alone
        shutil.rmtree(tmp_path / "two")
