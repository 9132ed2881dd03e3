"""A rank of a layout on fake tensors, against the memory plan and the collectives that FSDP2 needs."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers.cases import slow_except
from helpers.groups import SERVER, start_server
from toolkit_plan import simulate as simulate_module
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.memory import plan_memory
from toolkit_plan.simulate import simulate

from toolkit.cli import main
from toolkit.config import DDPArgs, FSDPArgs
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan
from toolkit.errors import UserError
from toolkit.models.families import get_config
from toolkit.models.lora_config import LoRAConfig

LLAMA = replace(get_config("Llama-3-8B"), n_layer=4)
LARGE = replace(get_config("Llama-3.1-405B"), n_layer=5)
SMALL_VOCABULARY = replace(get_config("Llama-3-8B"), n_layer=16, vocab_size=32000, padded_vocab_size=32000)
STUDENT, TEACHER = replace(LLAMA, n_layer=2), replace(get_config("Llama-3-70B"), n_layer=4)
LONG = replace(get_config("Llama-3.1-8B"), n_layer=4)
QAT = {"weights": "int4", "group_size": 32, "dtype": "bfloat16"}
FULL, SINGLE, DDP = ("FULL_SHARD", Layout(shard=8)), ("single", Layout()), ("ddp", Layout(replicate=8))
CASES = {
    "full": (*FULL, {}),
    "hybrid": ("HYBRID_SHARD", Layout(replicate=4, shard=2), {"activation_checkpointing": "selective"}),
    "kept weights": ("SHARD_GRAD_OP", Layout(shard=8), {"activation_checkpointing": "none"}),
    "accumulation": (*FULL, {"accumulation": 2}),
    "sharded accumulation": (*FULL, {"accumulation": 2, "fsdp": FSDPArgs(accumulate="sharded")}),
    "bf16": (*FULL, {"precision": "bf16-true"}),
    "fp32": (*FULL, {"precision": "32-true"}),
    "large blocks": (*FULL, {"precision": "bf16-true", "config": LARGE}),
    "large blocks, tied": (
        *FULL,
        {"config": replace(LARGE, vocab_size=8000, padded_vocab_size=8000, tie_embeddings=True)},
    ),
    "experts": (*FULL, {"config": replace(get_config("OLMoE-1B-7B-0924"), n_layer=4)}),
    "experts, adapters": (
        *FULL,
        {
            "config": replace(get_config("OLMoE-1B-7B-0924"), n_layer=4),
            "precision": "bf16-true",
            "lora": LoRAConfig(experts=True, router=True),
        },
    ),
    "experts, 4 bits": (
        *FULL,
        {
            "config": replace(get_config("OLMoE-1B-7B-0924"), n_layer=4),
            "precision": "bf16-true",
            "lora": LoRAConfig(experts=True),
            "quantize": "bnb.nf4",
        },
    ),
    "replicas": ("NO_SHARD", Layout(replicate=8), {}),
    "accumulating replicas": ("NO_SHARD", Layout(replicate=2), {"accumulation": 2}),
    "context": ("FULL_SHARD", Layout(shard=2, context=4), {"activation_checkpointing": "none"}),
    "stages": ("FULL_SHARD", Layout(shard=4, pipeline=4), {"accumulation": 8}),
    "gpipe": ("FULL_SHARD", Layout(shard=4, pipeline=4), {"accumulation": 8, "schedule": "gpipe"}),
    "stages, fp32": ("FULL_SHARD", Layout(shard=4, pipeline=4), {"accumulation": 8, "precision": "32-true"}),
    "stages, all activations": (
        "FULL_SHARD",
        Layout(shard=4, pipeline=4),
        {"accumulation": 8, "precision": "32-true", "activation_checkpointing": "none"},
    ),
    "stages of one device": ("NO_SHARD", Layout(pipeline=4), {"accumulation": 8}),
    "gpipe, small vocabulary": (
        "FULL_SHARD",
        Layout(shard=4, pipeline=4),
        {"accumulation": 8, "schedule": "gpipe", "config": SMALL_VOCABULARY},
    ),
    "stages, adapters": ("FULL_SHARD", Layout(shard=4, pipeline=4), {"accumulation": 8, "lora": LoRAConfig()}),
    "interleaved": ("FULL_SHARD", Layout(shard=4, pipeline=2), {"accumulation": 8, "schedule": "interleaved"}),
    "zbv": (
        "FULL_SHARD",
        Layout(shard=4, pipeline=2),
        {"accumulation": 8, "schedule": "zbv", "activation_checkpointing": "none"},
    ),
    "middle stage": ("FULL_SHARD", Layout(shard=8, pipeline=4), {"accumulation": 64, "config": SMALL_VOCABULARY}),
    "middle stage, zbv": (
        "FULL_SHARD",
        Layout(shard=8, pipeline=4),
        {"accumulation": 32, "schedule": "zbv", "activation_checkpointing": "none", "config": SMALL_VOCABULARY},
    ),
    "stages and context": ("HYBRID_SHARD", Layout(pipeline=2, replicate=2, shard=4, context=2), {"accumulation": 4}),
    "one device": (*SINGLE, {"accumulation": 2}),
    "one device, masters": (*SINGLE, {"accumulation": 2, "precision": "bf16-master"}),
    "one device, fp32": (*SINGLE, {"precision": "32-true", "activation_checkpointing": "none"}),
    "one device, update in the backward pass": (*SINGLE, {"precision": "bf16-true", "in_backward": True}),
    "one device, adapters": (*SINGLE, {"precision": "bf16-true", "lora": LoRAConfig()}),
    "one device, 4 bits": (*SINGLE, {"precision": "bf16-true", "lora": LoRAConfig(), "quantize": "bnb.nf4"}),
    "one device, packed": (*SINGLE, {"packed": True, "micro_batch_size": 2, "activation_checkpointing": "selective"}),
    "ddp": (*DDP, {}),
    "ddp, accumulation": (*DDP, {"accumulation": 2}),
    "ddp, copied": (*DDP, {"ddp": DDPArgs(gradient_as_bucket_view=False)}),
    "ddp, adapters": (*DDP, {"precision": "bf16-true", "lora": LoRAConfig(), "accumulation": 2}),
    "adapters": (*FULL, {"precision": "bf16-true", "lora": LoRAConfig()}),
    "4 bits": (*FULL, {"precision": "bf16-true", "lora": LoRAConfig(), "quantize": "bnb.nf4-dq"}),
    "4 bits, small vocabulary": (
        *SINGLE,
        {"precision": "bf16-true", "lora": LoRAConfig(), "quantize": "bnb.nf4", "config": SMALL_VOCABULARY},
    ),
    "4 bits, mixed": (*DDP, {"lora": LoRAConfig(), "quantize": "bnb.nf4", "config": SMALL_VOCABULARY}),
    "frozen": (*FULL, {"frozen": LLAMA}),
    "frozen, one device": (*SINGLE, {"frozen": LLAMA, "accumulation": 2}),
    "frozen, ddp": (*DDP, {"frozen": TEACHER, "config": STUDENT}),
    "frozen, large": (*FULL, {"frozen": TEACHER, "config": STUDENT, "precision": "bf16-true"}),
    "tensor": ("NO_SHARD", Layout(tensor=8), {"activation_checkpointing": "none"}),
    "tensor and shards": ("FULL_SHARD", Layout(shard=4, tensor=2), {"accumulation": 2}),
    "tensor, replicas": ("NO_SHARD", Layout(replicate=4, tensor=2), {"precision": "bf16-true"}),
    "tensor and adapters": ("FULL_SHARD", Layout(shard=4, tensor=2), {"precision": "bf16-true", "lora": LoRAConfig()}),
    "tensor and context": ("FULL_SHARD", Layout(shard=2, context=2, tensor=2), {"activation_checkpointing": "none"}),
    "tensor and stages": ("FULL_SHARD", Layout(shard=2, pipeline=2, tensor=2), {"accumulation": 4}),
    "offloaded": (*FULL, {"offloads": True}),
    "offloaded, bf16": (*FULL, {"offloads": True, "precision": "bf16-true", "config": LARGE}),
    "offloaded, accumulation": (*FULL, {"offloads": True, "accumulation": 2}),
    "offloaded, one device": ("FULL_SHARD", Layout(), {"offloads": True}),
    "fp8": (*FULL, {"fp8": "tensorwise"}),
    "fp8, rows": (*FULL, {"fp8": "rowwise", "activation_checkpointing": "none"}),
    "quantized": (*FULL, {"config": replace(LLAMA, qat=QAT)}),
    "quantized, one device": (*SINGLE, {"config": replace(LLAMA, qat=QAT), "precision": "32-true"}),
    "quantized, adapters": (*FULL, {"config": replace(LLAMA, qat=QAT), "precision": "bf16-true", "lora": LoRAConfig()}),
    "bf16 residual stream": (*SINGLE, {"residual_dtype": "bf16", "activation_checkpointing": "none"}),
    "stages, bf16 residual stream": (
        "FULL_SHARD",
        Layout(shard=4, pipeline=4),
        {"accumulation": 8, "residual_dtype": "bf16"},
    ),
    "average": (*FULL, {"ema": 0.99, "precision": "bf16-true"}),
    "average, one device": (*SINGLE, {"ema": 0.99, "accumulation": 2}),
    "average, offloaded": (*FULL, {"ema": 0.99, "offloads": True}),
    "schedule-free": (*FULL, {"optimizer": {"name": "AdamWScheduleFree"}}),
    "average, adapters": (*FULL, {"ema": 0.99, "lora": LoRAConfig()}),
    "long context": ("FULL_SHARD", Layout(shard=4, context=2), {"seq_length": 131072, "config": LONG}),
    "zbv, fp32": (
        "FULL_SHARD",
        Layout(shard=4, pipeline=2),
        {"accumulation": 8, "schedule": "zbv", "precision": "32-true", "activation_checkpointing": "none"},
    ),
    "gpipe, adapters": (
        "FULL_SHARD",
        Layout(shard=4, pipeline=4),
        {"accumulation": 8, "schedule": "gpipe", "lora": LoRAConfig()},
    ),
    "layer norms": (*FULL, {"config": get_config("pythia-160m"), "seq_length": 2048, "micro_batch_size": 4}),
}


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Fork the process of a simulation where torch is imported."""
    start_server()
    monkeypatch.setattr(simulate_module, "multiprocessing", SimpleNamespace(get_context=lambda _: SERVER))


def inputs(sharding: str, layout: Layout, options: dict) -> MemoryInputs:
    values = {"config": LLAMA, "precision": "bf16-mixed", "micro_batch_size": 1, "accumulation": 1, "seq_length": 4096,
              "optimizer": {"name": "AdamW", "weight_decay": 0.1}, "activation_checkpointing": "full"}  # fmt: skip
    values = {"fsdp": FSDPArgs()} | values | options
    strategy = StrategyPlan("fsdp", sharding, layout, "", offloads=values.pop("offloads", False))
    if sharding in ("single", "ddp"):
        strategy = replace(strategy, kind=sharding, sharding=None)
    else:
        values["fsdp"] = replace(values["fsdp"], sharding_strategy=sharding)
    return MemoryInputs(strategy=strategy, **values)


@pytest.mark.parametrize("case", slow_except(["hybrid"], CASES))
def test_planned_memory_is_within_5_percent_of_the_simulated(case):
    setup = inputs(*CASES[case])
    memory = plan_memory(setup)
    simulated = simulate(setup)
    assert 0.95 < (memory.total - memory.context) / simulated.peak < 1.05, simulated
    if case == "hybrid":
        calls = {(name, where): n for name, where, n, _ in simulated.collectives}
        units = LLAMA.n_layer + 2  # the head stays gathered; the embedding is not needed in the backward pass
        assert calls["allgather_base", "shard"] == 2 * LLAMA.n_layer + 2
        assert calls["reduce_scatter_base", "shard"] == calls["allreduce", "replicate"] == units
    if case == "ddp, accumulation":  # in the buckets, and of earlier micro-batches
        assert simulated.memory["gradients"] == pytest.approx(memory.gradients, rel=0.01)
    if case == "middle stage":
        assert simulated.rank == 8
    if case == "stages and context":  # weights are gathered once; per micro-batch, two layers' keys and values, twice
        calls = {(name, where): n for name, where, n, _ in simulated.collectives}
        assert calls["allgather_base", "context x shard"] == 3 and calls["allgather_base", "context"] == 4 * 2 * 2
        assert calls["send", "pipeline"] == calls["recv", "pipeline"] == 4


def test_plan_prints_the_simulation_of_many_ranks(capsys):
    words = ["plan", "pretrain", "pythia-14m", "--devices", "8", "--num_nodes", "128", "--strategy", "fsdp",
             "--train.max_steps", "1", "--train.global_batch_size", "1024", "--simulate", "true"]  # fmt: skip
    assert main([*words, "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.endswith("simulating rank 0 of 1024 ...\n")
    simulated = json.loads(shown.out)["simulated"]
    total, planned = simulated["memory_gb"]["total"]
    assert simulated["ranks"] == 1024 and planned == pytest.approx(total, rel=0.05)
    assert simulated["memory_gb"]["weights"][0] > 0.005


def test_what_is_not_simulated_is_one_line(monkeypatch):
    setup = inputs(*CASES["ddp"])
    extension = replace(setup.strategy, extension="mine")
    for changes, text in (
        ({"strategy": extension}, "does not support --strategy mine; use --strategy fsdp"),
        ({"precision": "bf16-master"}, "bf16-master with ddp; use --precision bf16-mixed"),
    ):
        with pytest.raises(UserError, match=text):
            simulate(replace(setup, **changes))
    start = mock.Mock(side_effect=BlockingIOError(11, "no more"))
    monkeypatch.setattr(SERVER.Process, "start", start)
    with pytest.raises(UserError, match=r"no process \(.*no more\); raise the limits"):
        simulate(setup)


def test_an_error_in_the_child_is_the_users_or_ours():
    setup = inputs(*FULL, {"config": replace(LLAMA, block_size=16)})
    with pytest.raises(ValueError, match="exceeds the model's block_size 16"):
        simulate(setup)


def test_an_interrupted_simulation_leaves_no_process(monkeypatch):
    receiver = mock.Mock(recv=mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(SERVER, "Pipe", lambda duplex: (receiver, SERVER.SimpleQueue()._writer), raising=False)
    with pytest.raises(KeyboardInterrupt):
        simulate(inputs(*CASES["hybrid"]))
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize("reaches_all", [True, False], ids=["of a terminal", "of one process"])
def test_ctrl_c_ends_a_simulation_with_one_line_and_code_130(reaches_all):
    words = ["plan", "pretrain", "Llama-3-8B", "--devices", "8", "--train.max_steps", "1", "--simulate", "true"]
    command = [sys.executable, "-m", "toolkit", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert any("simulating rank 0" in line for line in process.stderr)
        (os.killpg if reaches_all else os.kill)(process.pid, signal.SIGINT)
        assert process.communicate()[1] == "toolkit plan: interrupted\n"
    assert process.returncode == 130
    deadline = time.monotonic() + 60  # multiprocessing's tracker ends when it sees that its pipe is closed
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
