"""Runs on a real Ray cluster of this machine: equal to one process, and to themselves after a worker was killed."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.groups import losses

from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.errors import UserError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

README = Path(__file__).parents[1] / "README.md"
WORDS = [
    "pretrain", "pico-llama", "--accelerator", "cpu", "--data", "SyntheticTokens", "--train.global_batch_size", "4",
    "--train.micro_batch_size", "2", "--train.max_steps", "6", "--train.save_interval", "2", "--train.max_seq_length",
    "32", "--train.learning_rate", "1e-3", "--out_dir",
]  # fmt: skip
KILL = textwrap.dedent("""
    import os
    import signal
    from pathlib import Path

    import torch

    import toolkit

    HAD_GROUP = torch.distributed.is_initialized()  # when the options are read

    class KillOnce(toolkit.Callback):
        def on_train_start(self, trainer):
            with open(f"attempts{trainer.fabric.global_rank}", "a") as file:
                print(trainer.progress.step, HAD_GROUP, file=file)

        def on_step_end(self, trainer, metrics):
            first = Path("attempts1").read_text().count("\\n") == 1
            if trainer.progress.step == 3 and trainer.fabric.global_rank == 1 and first:
                os.kill(os.getpid(), signal.SIGKILL)
""")


@pytest.fixture(scope="module")
def cluster():
    import ray

    folder = tempfile.mkdtemp(prefix="ray")  # the paths of its sockets have at most 107 characters
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory):
    import toolkit_ray

    folder = tmp_path_factory.mktemp("whole")
    return toolkit_ray.train([*WORDS, str(folder / "run")], num_workers=2), folder / "run"


def test_n3_two_workers_equal_one_process(whole, tmp_path):
    result, out_dir = whole
    assert main([*WORDS, str(tmp_path / "one"), "--devices", "1"]) == 0
    assert len(losses(out_dir)) == 6 and losses(out_dir) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert result.path == str(out_dir) and result.checkpoint.path == str(out_dir / "final")
    assert result.metrics["step"] == 6 and result.metrics["loss"] == losses(out_dir)[-1]
    assert sorted(path.name for path in out_dir.glob("step-*")) == ["step-00000002", "step-00000004"]


def test_s2_a_killed_worker_restarts_and_the_run_ends_equal(whole, tmp_path, monkeypatch):
    import toolkit_ray
    from ray.train import FailureConfig, RunConfig

    monkeypatch.chdir(tmp_path)
    Path("kill_once.py").write_text(KILL)
    words = [*WORDS, "run", "--callbacks", "kill_once.KillOnce"]
    run_config = RunConfig(failure_config=FailureConfig(max_failures=1))
    result = toolkit_ray.train(words, num_workers=2, run_config=run_config)
    assert Path("attempts0").read_text() == Path("attempts1").read_text() == "0 False\n2 False\n"
    assert run_config.name != "run" and result.checkpoint.path == str(tmp_path / "run" / "final")
    weights, expected = load_weights(tmp_path / "run" / "final"), load_weights(whole[1] / "final")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert losses(tmp_path / "run") == losses(whole[1])


def test_mistakes_start_no_worker():
    import toolkit_ray

    with pytest.raises(UserError, match="options serve: must start with a training command: pretrain, finetune_full"):
        toolkit_ray.train(["serve", "checkpoint"])
    with pytest.raises(UserError, match="train.max_step: no such option; did you mean"):
        toolkit_ray.train({"model": "pico-llama", "train": {"max_step": 1}})


def test_the_file_of_the_readme_runs(cluster, tmp_path):
    (code,) = (block.partition("```")[0] for block in README.read_text().split("```python\n")[1:])
    (tmp_path / "train_on_ray.py").write_text(code)
    done = subprocess.run([sys.executable, "train_on_ray.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/out/ray/final" in done.stdout and (tmp_path / "out" / "ray" / "final" / "COMPLETE").exists()
