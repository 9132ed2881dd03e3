"""Lion against its formula, and in runs of toolkit."""

import math
import subprocess
import sys

import pytest
import torch
import yaml
from toolkit_lion.optimizer import Lion

from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.ui.loggers import read_metrics

RUN = ["pretrain", "pico-llama", "--data", "SyntheticTokens", "--optimizer.name", "Lion"]
RUN += ["--callbacks", "MomentumAgreement", "--train.global_batch_size", "4", "--train.micro_batch_size", "2"]
RUN += ["--train.max_steps", "4", "--train.learning_rate", "1e-3", "--train.max_seq_length", "32"]


def test_update_is_that_of_the_paper():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3))
    expected, momentum = weight.detach().clone(), torch.zeros(5, 3)
    optimizer = Lion([weight], lr=0.1, betas=(0.8, 0.95), weight_decay=0.5)
    for _ in range(3):
        weight.grad = torch.randn(5, 3)
        direction = torch.sign(0.8 * momentum + 0.2 * weight.grad)
        expected = expected - 0.1 * (direction + 0.5 * expected)
        momentum = 0.95 * momentum + 0.05 * weight.grad
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)
    with pytest.raises(ValueError, match="betas"):
        Lion([weight], betas=(0.9, 1.0))


def test_interrupted_run_equals_an_uninterrupted_one(tmp_path):
    run = [*RUN, "--devices", "1"]
    assert main([*run, "--out_dir", str(tmp_path / "a"), "--train.save_interval", "2"]) == 0
    step = tmp_path / "a" / "step-00000002"
    assert main([*run, "--out_dir", str(tmp_path / "b"), "--resume", str(step)]) == 0
    whole, resumed = (load_weights(tmp_path / name / "final") for name in "ab")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    shares = [row["momentum_agreement"] for row in read_metrics(tmp_path / "a/logs/metrics.csv")]
    options = yaml.safe_load((tmp_path / "a/final/hyperparameters.yaml").read_text())
    assert options["optimizer"]["betas"] == "auto"  # Lion's, not the command's, which are Adam's
    assert math.isnan(shares[0]) and all(0 < share < 1 for share in shares[1:])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_processes_equal_one(strategy, tmp_path):
    for devices in (1, 2):
        run = [*RUN, "--accelerator", "cpu", "--devices", str(devices), "--out_dir", str(tmp_path / str(devices))]
        more = ["--strategy", strategy] if devices == 2 else []
        subprocess.run([sys.executable, "-m", "toolkit", *run, *more], check=True, capture_output=True)
    one, two = (read_metrics(tmp_path / name / "logs/metrics.csv") for name in "12")
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5 * a["loss"]
        # a sign may differ where gradient or momentum are rounding noise
        assert a["step"] == 1 or abs(a["momentum_agreement"] - b["momentum_agreement"]) < 1e-3
