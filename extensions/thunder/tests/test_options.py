"""Options of the extension, versions, and what is refused; nothing here imports Thunder."""

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from toolkit_thunder import EXTENSION
from toolkit_thunder.options import ThunderArgs, check_run
from toolkit_thunder.versions import THUNDER, _placeholders, require_versions

from toolkit.cli import main
from toolkit.config import DDPArgs, FSDPArgs
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import plan_strategy
from toolkit.dotted_paths import import_object
from toolkit.errors import UserError
from toolkit.extension import extensions


def run_args(compiler="none", strategy="auto", thunder=None, **changes):
    """Return what check_run reads of a run's arguments."""
    found = {"train.activation_checkpointing": "none", "fsdp.auto_wrap": "block", "optimizer.in_backward": False}
    found |= {"quantize": None, "lora": None} | changes
    args = SimpleNamespace(compiler=compiler, strategy=strategy, groups={"thunder": thunder or ThunderArgs()})
    for name, value in found.items():
        *group, field = name.split(".")
        owner = vars(args).setdefault(group[0], SimpleNamespace()) if group else args
        setattr(owner, field, value)
    return args


def test_installed_package_is_known():
    assert EXTENSION in extensions().values()
    assert import_object(EXTENSION.option_groups["thunder"]) is ThunderArgs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding_strategy": "ZERO1"}, "--thunder.sharding_strategy ZERO1: must be one of ZERO2, ZERO3"),
        ({"bucketing_strategy": "block"}, "--thunder.bucketing_strategy block: must be one of NONE, LAYER, BLOCK"),
        ({"jit": False, "executors": "sdpa"}, "--thunder.executors sdpa: has no effect with --thunder.jit false"),
        ({"executors": " "}, "--thunder.executors"),
    ],
)
def test_invalid_options_are_one_line(options, message):
    with pytest.raises(UserError) as caught:
        ThunderArgs(**options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_executors_are_names():
    assert ThunderArgs(executors="sdpa, torch").executor_names == ["sdpa", "torch"]
    assert ThunderArgs(executors=["sdpa"]).executor_names == ["sdpa"] and ThunderArgs().executor_names is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"thunder": ThunderArgs(jit=False)}, "--thunder.jit False: has no effect without a Thunder strategy"),
        ({"thunder": ThunderArgs(executors="sdpa")}, "--thunder.executors sdpa: has no effect without --compiler"),
        (
            {"strategy": "thunder_ddp", "thunder": ThunderArgs("ZERO2")},
            "--thunder.sharding_strategy ZERO2: has no effect without --strategy thunder_fsdp",
        ),
        (
            {"strategy": "thunder_ddp", "compiler": "torch"},
            "--compiler torch: is not supported with --strategy thunder_ddp",
        ),
        ({"compiler": "thunder", "thunder": ThunderArgs(jit=False)}, "--thunder.jit False: has no effect"),
        (
            {"compiler": "thunder", "train.activation_checkpointing": "full"},
            "--train.activation_checkpointing full: is not supported with --compiler thunder",
        ),
        (
            {"strategy": "thunder_fsdp", "lora": object()},
            "finetune_lora: is not supported with --strategy thunder_fsdp",
        ),
        (
            {"strategy": "thunder_ddp", "optimizer.in_backward": True},
            "--optimizer.in_backward true: is not supported with --strategy thunder_ddp",
        ),
    ],
)
def test_combinations_without_effect_are_refused(args, message, monkeypatch):
    monkeypatch.setattr("toolkit_thunder.options.require_versions", lambda needed_by: None)
    with pytest.raises(UserError) as caught:
        check_run(run_args(**args))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    check_run(run_args("thunder")), check_run(run_args(strategy="thunder_fsdp", thunder=ThunderArgs("ZERO2", "BLOCK")))


@pytest.mark.parametrize(
    ("thunder", "torch_version", "message"),
    [
        (None, "2.13.0", f"x: needs lightning-thunder {THUNDER}, found none; run: pip install"),
        ("0.2.5", "2.13.0", f"x: needs lightning-thunder {THUNDER}, found 0.2.5"),
        (THUNDER, "2.14.0+cpu", f"x: lightning-thunder {THUNDER} needs torch 2.11 to 2.13, found 2.14.0"),
        (THUNDER, "2.9.1", f"x: lightning-thunder {THUNDER} needs torch 2.11 to 2.13, found 2.9.1"),
        (THUNDER, "2.11.0+cu128", None),
    ],
)
def test_versions(monkeypatch, thunder, torch_version, message):
    def version(name):
        if (found := {"lightning-thunder": thunder, "torch": torch_version}[name]) is None:
            raise metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(metadata, "version", version)
    if message is None:
        return require_versions("x")
    with pytest.raises(UserError) as caught:
        require_versions("x")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_shim_adds_only_what_is_missing(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "align_as", raising=False)
    monkeypatch.setattr(torch.Tensor, "rename", "of torch", raising=False)
    with _placeholders():
        assert torch.Tensor.align_as.__name__ == "align_as" and torch.Tensor.rename == "of torch"
        with pytest.raises(NotImplementedError, match="align_as"):
            torch.ones(1).align_as(torch.ones(1))
    assert not hasattr(torch.Tensor, "align_as")


def plan(strategy, thunder=None, **changes):
    sizes = {"devices": 2, "num_nodes": 1, "accelerator": "cpu", "precision": "32-true"} | changes
    return plan_strategy(strategy, FSDPArgs(), DDPArgs(), groups={"thunder": thunder or ThunderArgs()}, **sizes)


def test_plans():
    fsdp = plan("thunder_fsdp", ThunderArgs("ZERO2", "BLOCK"), num_nodes=3)
    assert (fsdp.kind, fsdp.layout, fsdp.extension) == ("fsdp", Layout(shard=6), "thunder_fsdp")
    assert str(fsdp) == "thunder_fsdp, 6 devices (ZERO2, buckets BLOCK)"
    options = (ThunderArgs(), ThunderArgs("ZERO2"), ThunderArgs(jit=False))
    shardings = [plan("thunder_fsdp", thunder).sharding for thunder in options]
    assert shardings == ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP"]
    ddp = plan("thunder_ddp", ThunderArgs(jit=False))
    assert (ddp.kind, ddp.layout, ddp.extension) == (
        "ddp",
        Layout(replicate=2),
        "thunder_ddp",
    ) and "not compiled" in str(ddp)
    with pytest.raises(UserError, match="--strategy thunder_ddp: requires several devices; on one use --compiler"):
        plan("thunder_ddp", devices=1)
    with pytest.raises(UserError, match="--precision 16-mixed is not supported with --strategy thunder_fsdp"):
        plan("thunder_fsdp", precision="16-mixed")


def test_command_line_refuses_with_exit_code_2(capsys, tmp_path):
    words = ["pretrain", "pico-llama", "--data", "SyntheticTokens", "--train.max_steps", "1", "--accelerator", "cpu"]
    assert main([*words, "--out_dir", str(tmp_path), "--devices", "1", "--thunder.sharding_strategy", "ZERO2"]) == 2
    error = capsys.readouterr().err
    assert "--thunder.sharding_strategy ZERO2: has no effect without --strategy thunder_fsdp" in error


def test_names_and_options_need_no_torch():
    code = "import toolkit_thunder.options, sys; assert not {'torch', 'thunder'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
