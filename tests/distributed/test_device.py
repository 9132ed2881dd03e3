"""Choices for CUDA devices, as functions of plain values that a CPU can test."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import finish, start

import toolkit
from toolkit.checkpoints.weights import load_weights
from toolkit.distributed import device
from toolkit.distributed.cpu_memory import memory_limit
from toolkit.distributed.device import (
    choose_attention_kernels,
    deterministic_algorithms,
    device_memory,
    fp32_reductions,
    precision_hint,
)
from toolkit.distributed.run_group import choose_backends
from toolkit.errors import UserError
from toolkit.models.attention_dispatch import needs_masks
from toolkit.models.families import get_config
from toolkit.training.checkpointer import rng_state, set_rng_state

CPU = torch.device("cpu")


def test_cudnn_attention_requires_fixed_shapes_without_masks():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for fixed_shapes, has_masks, allowed in [(1, 0, True), (1, 1, False), (0, 0, False), (0, 1, False)]:
            choose_attention_kernels(fixed_shapes=bool(fixed_shapes), has_masks=bool(has_masks))
            assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_bf16_is_advised_where_the_cpu_multiplies_it_fast(monkeypatch):
    for is_fast in (True, False):
        monkeypatch.setattr("toolkit.private_torch.has_fast_bf16", lambda is_fast=is_fast: is_fast)
        assert ("--precision bf16-mixed" in (precision_hint("cpu", "32-true") or "")) == is_fast
        assert not (precision_hint("cpu", "32-true") or "").startswith("note")  # no remark of a report
        assert precision_hint("cpu", "bf16-mixed") is precision_hint("cuda", "32-true") is None


LIBRARIES = """
import sys, warnings
from unittest import mock

import torch
from lightning.fabric.accelerators.cuda import _check_cuda_matmul_precision

from toolkit.distributed import fabric

warnings.simplefilter("always")
gpu = dict(is_available=lambda: True, get_device_capability=lambda *_: (9, 0), get_device_name=lambda _: "H100")
for quiet in (lambda: None, fabric._quiet_libraries):
    with mock.patch.object(fabric, "_quiet_libraries", quiet):
        fabric.single_device_fabric("cpu", "bf16-mixed")
    with mock.patch.multiple(torch.cuda, **gpu):
        _check_cuda_matmul_precision.__wrapped__(torch.device("cuda"))
        if sys.argv[1:]:  # importing it takes as long as importing torch
            from torch._inductor.compile_fx import _warn_tf32_disabled

            _warn_tf32_disabled.__wrapped__()
    # Inductor until torch 2.12
    warnings.warn_explicit("\\nOnline softmax is disabled on the fly", UserWarning, "lowering.py", 1)
    print("----", file=sys.stderr)
"""


@pytest.mark.parametrize("also", [[], pytest.param(["inductor"], marks=pytest.mark.slow)], ids=str)
def test_messages_of_libraries_about_our_settings_are_not_shown(tmp_path, also):
    (tmp_path / "libraries.py").write_text(LIBRARIES)
    process = start(str(tmp_path / "libraries.py"), *also)  # not forked: these tests have set up the libraries' loggers
    _, err = finish(process)
    assert process.returncode == 0, err
    shown, quiet, _ = err.split("----\n")
    for text in ("bfloat16 Automatic Mixed", "using a CUDA device", "Online softmax"):
        assert text in shown
    assert ("TensorFloat32 tensor cores" in shown) == bool(also)
    assert quiet == ""


def test_masks_are_needed_for_windows_shorter_than_the_rows():
    llama, gemma = get_config("pico-llama"), get_config("gemma-2-2b")
    window = gemma.sliding_window_size
    cases = [(llama, 10**6, False), (gemma, window, False), (gemma, window + 1, True), (gemma, None, True)]
    assert [needs_masks(config, length) for config, length, _ in cases] == [expected for *_, expected in cases]
    assert needs_masks(None, 8)  # a user-provided module


def test_minimum_torch_version_is_the_first_whose_fully_shard_is_supported():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    major, minor = re.search(r'"torch>=(\d+)\.(\d+)"', text).groups()
    assert (int(major), int(minor)) >= (2, 11)  # grouped_mm has been there since 2.10


def test_nccl_gets_its_device():
    assert choose_backends(CPU) == {"backend": "gloo"}
    device = torch.device("cuda", 3)
    assert choose_backends(device) == {"backend": "cpu:gloo,cuda:nccl", "device_id": device}


def test_rng_state_covers_the_device_of_the_run(monkeypatch):
    """A CPU run on a machine with GPUs does not touch them; a run on one GPU does not touch another."""
    states = {torch.device("cuda", 1): torch.tensor([1]), torch.device("cuda", 0): torch.tensor([0])}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.__setitem__(device, state + 1))
    assert rng_state(CPU)["cuda"] is None
    state = rng_state(torch.device("cuda", 1))
    assert state["cuda"].item() == 1
    set_rng_state(state, CPU)
    assert states[torch.device("cuda", 1)].item() == 1
    set_rng_state(state, torch.device("cuda", 1))
    assert [int(value) for value in states.values()] == [2, 0]


def test_expandable_segments_is_the_default_and_user_settings_win():
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    code = f"import os, toolkit; print(*(os.environ.get(name, '-') for name in {names}))"
    clean = {name: value for name, value in os.environ.items() if name not in names}
    for given, expected in [
        ({}, "expandable_segments:True -"),
        ({names[0]: "backend:native"}, "backend:native -"),
        ({names[1]: "backend:native"}, "- backend:native"),
    ]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=clean | given, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_16_bit_products_are_summed_in_fp32_during_a_run_only(monkeypatch):
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    with pytest.raises(RuntimeError, match="another error"), fp32_reductions():
        assert [getattr(matmul, name) for name in names] == [False, False] != before
        raise RuntimeError("another error")
    assert [getattr(matmul, name) for name in names] == before


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield monkeypatch
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_algorithms_are_strict_inside_and_restored_after(environment):
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    environment.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="another error"), deterministic_algorithms(True):
        raise RuntimeError("another error")


def test_operation_without_deterministic_implementation_is_named(environment):
    with pytest.raises(UserError, match="^--deterministic true: put_ has no deterministic implementation on this"):
        with deterministic_algorithms(True):
            torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
    environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    with pytest.raises(UserError, match="^--deterministic true: needs CUBLAS_WORKSPACE_CONFIG :4096:8 or :16:8, not"):
        with deterministic_algorithms(True):
            pass


NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_s2_deterministic_runs_are_bit_equal_and_resume_bit_equal(accelerator, tmp_path, environment):
    config = toolkit.ModelConfig(vocab_size=64, block_size=96, n_layer=2, n_head=2, n_embd=64)
    rows = [torch.randint(0, 64, (40 + n,), generator=torch.Generator().manual_seed(n)) for n in range(40)]

    def train(name: str, **options) -> dict[str, torch.Tensor]:
        steps = {"max_steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "save_interval": 3}
        options |= {"accelerator": accelerator, "devices": 1, "deterministic": True, "out_dir": tmp_path / name}
        return load_weights(toolkit.train(config, rows, train=steps, **options).checkpoint)

    uninterrupted, repeated = train("uninterrupted"), train("repeated")
    resumed = train("resumed", resume=str(tmp_path / "uninterrupted" / "step-00000003"))
    for name, weight in uninterrupted.items():
        assert torch.equal(weight, repeated[name]) and torch.equal(weight, resumed[name]), name


def test_memory_limit_is_the_least_of_the_groups_above(tmp_path):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert memory_limit(tmp_path) == math.inf
    write("proc/self/cgroup", "0::/user/job\n")
    write("sys/fs/cgroup/user/job/memory.max", "max\n")
    assert memory_limit(tmp_path) == math.inf
    write("sys/fs/cgroup/user/memory.max", "4000\n")
    write("sys/fs/cgroup/memory.max", "5000\n")
    assert memory_limit(tmp_path) == 4000
    write("proc/self/cgroup", "3:cpu:/job\n2:memory:/docker/1\n")  # version 1
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "3000\n")  # as a container sees its own group
    assert memory_limit(tmp_path) == 3000
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    assert memory_limit(tmp_path) == math.inf


def test_the_memory_of_a_container_is_its_limit(monkeypatch):
    on_host = device_memory("cpu")
    monkeypatch.setattr(device, "memory_limit", lambda: on_host / 8)
    assert device_memory("cpu") == on_host / 8
