"""The point `planner`: what chooses "auto" without one, and a user's in place of the built-in one."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from helpers.cases import check_each

from toolkit import extension
from toolkit.cli import main
from toolkit.commands import pretrain
from toolkit.config.command import parse_object
from toolkit.errors import UserError
from toolkit.extension import Extension
from toolkit.planning.auto import resolve_auto
from toolkit.planning.compiler import choose_compiler
from toolkit.planning.planner import oom_advice, require_memory
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.training_options import run_args

ARGUMENTS = {"model_name": "pythia-14m", "train": {"max_steps": 1}, "model_config": {"vocab_size": 50304}}


def config_of(devices: DeviceSpec, **options):
    return resolve_auto(run_args(**parse_object(pretrain.setup, ARGUMENTS | options)), devices)


@pytest.fixture
def no_planner(monkeypatch):
    monkeypatch.setattr(extension, "all_extensions", lambda: iter([]))


def test_fixed_rules_choose_without_a_planner(no_planner):
    def check(devices: DeviceSpec, strategy: str, reason: str) -> None:
        config = config_of(devices)
        assert (config.strategy.kind, config.batch.micro_batch_size, config.accumulate) == (strategy, 4, "unsharded")
        assert config.reasons["train.micro_batch_size"] == f"auto: up to 4 {reason}"

    unknown = "if memory is unknown before the run"
    check_each(check, [
        (DeviceSpec("cpu", 1, 1, 1e9), "single", "on cpu"),
        (DeviceSpec("cuda", 1, 1, 80e9), "single", "without a planner"),
        (DeviceSpec("cuda", 8, 1, 1e8), "fsdp", "without a planner"),  # unsharded gradients would not fit
        (DeviceSpec("cuda", 8, 1, math.inf), "fsdp", unknown),
    ])  # fmt: skip
    assert choose_compiler(config_of(DeviceSpec("cuda", 1, 1, 80e9))) == (
        "torch", "auto: rows of one length; not for a short run",
    )  # fmt: skip


def test_what_needs_a_planner_is_one_line(no_planner, tmp_path, capsys):
    with pytest.raises(UserError, match="^--preset memory: needs an extension with a planner$"):
        config_of(DeviceSpec("cpu", 1, 1), preset="memory")
    words = "pretrain pico-llama --data SyntheticTokens --data.vocab_size 64 --accelerator cpu --train.max_steps 1"
    assert main([*words.split(), "--out_dir", str(tmp_path / "out"), "--dry_run"]) == 2
    assert capsys.readouterr().err.endswith("--dry_run true: needs an extension with a planner\n")
    assert not (tmp_path / "out").exists()


def test_memory_is_not_checked_and_advice_is_general_without_a_planner(no_planner):
    config = config_of(DeviceSpec("cuda", 1, 1, 1e6))
    with torch.device("meta"):
        require_memory(config, torch.nn.Linear(1000, 1000))
    with pytest.raises(UserError, match="^--train.micro_batch_size 4: out of memory on cuda; use --train.activation_"):
        with oom_advice(config):
            raise MemoryError


def test_a_planner_of_a_user_replaces_the_built_in_one(monkeypatch):
    class Mine:
        resolve_by_memory = staticmethod(lambda args, devices: replace(args, seed=7))

    monkeypatch.setitem(sys.modules, "my_planner", Mine)
    monkeypatch.setitem(extension._module_extensions, "mine", Extension(planner="my_planner"))
    assert config_of(DeviceSpec("cuda", 1, 1, 80e9)).seed == 7
