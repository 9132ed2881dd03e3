"""A rank of a layout on fake tensors, against the memory plan and the collectives that FSDP2 needs."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers.cases import slow_except
from helpers.groups import SERVER, start_server

from toolkit.cli import main
from toolkit.config import FSDPArgs
from toolkit.diagnostics import simulate as simulate_module
from toolkit.diagnostics.simulate import simulate
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan
from toolkit.errors import UserError
from toolkit.measure.inputs import MemoryInputs
from toolkit.measure.memory import plan_memory
from toolkit.models.families import get_config
from toolkit.models.lora_config import LoRAConfig

LLAMA = replace(get_config("Llama-3-8B"), n_layer=4)
LARGE = replace(get_config("Llama-3.1-405B"), n_layer=5)
SMALL_VOCABULARY = replace(get_config("Llama-3-8B"), n_layer=16, vocab_size=32000, padded_vocab_size=32000)
FULL = ("FULL_SHARD", Layout(shard=8))
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
    values["fsdp"] = replace(values["fsdp"], sharding_strategy=sharding)
    return MemoryInputs(strategy=StrategyPlan("fsdp", sharding, layout, ""), **values)


@pytest.mark.parametrize("case", slow_except(["hybrid"], CASES))
def test_planned_memory_is_within_5_percent_of_the_simulated(case):
    setup = inputs(*CASES[case])
    memory = plan_memory(setup)
    simulated = simulate(setup)
    assert memory.total - memory.context == pytest.approx(simulated.peak, rel=0.05), simulated
    if case == "hybrid":
        calls = {(name, where): n for name, where, n, _ in simulated.collectives}
        units = LLAMA.n_layer + 2  # the head stays gathered; the embedding is not needed in the backward pass
        assert calls["allgather_base", "shard"] == 2 * LLAMA.n_layer + 2
        assert calls["reduce_scatter_base", "shard"] == calls["allreduce", "replicate"] == units
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
    assert shown.err == "simulating rank 0 of 1024 ...\n"
    simulated = json.loads(shown.out)["simulated"]
    total, planned = simulated["memory_gb"]["total"]
    assert simulated["ranks"] == 1024 and planned == pytest.approx(total, rel=0.05)
    assert simulated["memory_gb"]["sharded weights"][0] > 0.005


def test_what_is_not_simulated_is_one_line(monkeypatch):
    setup = inputs(*CASES["full"])
    ddp, tensor = replace(setup.strategy, kind="ddp"), replace(setup.strategy, layout=Layout(shard=4, tensor=2))
    one = replace(setup.strategy, kind="single", layout=Layout())
    for strategy, text in ((ddp, "use --strategy fsdp"), (one, "use --devices 8"), (tensor, "--tensor_parallel_size")):
        with pytest.raises(UserError, match=text):
            simulate(replace(setup, strategy=strategy))
    with pytest.raises(UserError, match="a frozen model is not supported"):
        simulate(replace(setup, frozen=LLAMA))
    monkeypatch.setattr(simulate_module, "ProcessPoolExecutor", mock.Mock(side_effect=BlockingIOError(11, "no more")))
    with pytest.raises(UserError, match=r"no process \(.*no more\); raise the limits"):
        simulate(setup)
