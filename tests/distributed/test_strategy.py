"""Choice of the distributed strategy."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.groups import free_port, start_ranks
from lightning.fabric.strategies import FSDPStrategy
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from toolkit.config import DDPArgs, FSDPArgs
from toolkit.distributed.fabric import build_fabric, single_device_fabric
from toolkit.distributed.fsdp import FullyShardedStrategy, ShardedPrecision, fsdp_strategy
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import plan_strategy
from toolkit.distributed.world import WorldInfo
from toolkit.errors import UserError
from toolkit.models.attention import CausalSelfAttention
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.init import Materializer
from toolkit.private_torch import start_fake_group


def plan(
    strategy="auto",
    sharding="HYBRID_SHARD",
    devices=1,
    nodes=1,
    precision="32-true",
    accelerator="cpu",
    ddp=None,
    tensor=1,
    **fsdp,
):
    return plan_strategy(
        strategy, FSDPArgs(sharding_strategy=sharding, **fsdp), ddp or DDPArgs(),
        devices=devices, num_nodes=nodes, accelerator=accelerator, precision=precision,
        model_parallel=Layout(tensor=tensor),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "kind", "sharding", "layout"),
    [
        ({}, "single", None, Layout()),
        ({"strategy": "fsdp"}, "single", None, Layout()),
        ({"devices": 8}, "fsdp", "FULL_SHARD", Layout(shard=8)),
        ({"devices": 8, "nodes": 2}, "fsdp", "HYBRID_SHARD", Layout(replicate=2, shard=8)),
        ({"devices": 1, "nodes": 4}, "fsdp", "NO_SHARD", Layout(replicate=4)),
        ({"devices": 8, "nodes": 2, "sharding": "FULL_SHARD"}, "fsdp", "FULL_SHARD", Layout(shard=16)),
        ({"devices": 1, "nodes": 4, "sharding": "FULL_SHARD"}, "fsdp", "FULL_SHARD", Layout(shard=4)),
        ({"devices": 2, "nodes": 2, "sharding": "SHARD_GRAD_OP"}, "fsdp", "SHARD_GRAD_OP", Layout(shard=4)),
        ({"devices": 4, "sharding": "NO_SHARD"}, "fsdp", "NO_SHARD", Layout(replicate=4)),
        ({"devices": 8, "shard_size": 4}, "fsdp", "HYBRID_SHARD", Layout(replicate=2, shard=4)),
        ({"devices": 4, "nodes": 2, "shard_size": 8}, "fsdp", "FULL_SHARD", Layout(shard=8)),
        ({"devices": 4, "shard_size": 1}, "fsdp", "NO_SHARD", Layout(replicate=4)),
        ({"devices": 2, "nodes": 2, "strategy": "ddp"}, "ddp", None, Layout(replicate=4)),
    ],
)
def test_n4_every_mesh_is_explicit(options, kind, sharding, layout):
    found = plan(**options)
    assert (found.kind, found.sharding, found.layout) == (kind, sharding, layout)
    assert found.reason and str(found)
    if kind == "fsdp":
        names = {"sharding": "sharding_strategy", "shard_size": "shard_size"}
        fsdp = FSDPArgs(**{names[name]: value for name, value in options.items() if name in names})
        strategy = fsdp_strategy(found, fsdp, "32-true", "cpu", {Block})
        strategy.parallel_devices = [torch.device("cpu")] * options["devices"]
        strategy.num_nodes = options.get("nodes", 1)
        assert strategy.layout == layout


def test_shard_size_must_divide_the_devices():
    for options, size, valid in (
        ({"devices": 4, "nodes": 2}, 8, "one of 1, 2, 4, 8"), ({"devices": 2, "tensor": 2}, 1, "1"),
    ):  # fmt: skip
        message = f"--fsdp.shard_size 3: does not divide the data-parallel size {size}; use {valid}$"
        with pytest.raises(UserError, match=message):
            plan(**options, shard_size=3)
    plan(shard_size=3)  # a config for several devices runs on one


def test_one_device_reports_unused_sharding():
    assert "nothing for --fsdp.sharding_strategy FULL_SHARD" in str(plan(sharding="FULL_SHARD"))
    assert "sharding_strategy" not in str(plan())


def skip_main(rank: int, port: int) -> None:
    """A rank whose gradient overflows, or not."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    precision, weight = ShardedPrecision("16-mixed", "cpu"), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for overflowing, expected in ((1, 1.0), (None, 0.0)):
        precision.scaler.scale(weight.sum()).backward()
        scale = precision.scaler.get_scale()
        if rank == overflowing:
            weight.grad[0] = torch.inf
        precision.unscale_gradients(optimizer)
        precision.optimizer_step(optimizer)
        optimizer.zero_grad()
        assert weight.tolist() == [expected] * 3
        assert precision.scaler.get_scale() == (scale if overflowing is None else scale / 2)
    dist.destroy_process_group()


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_update_of_all():
    start_ranks(skip_main, (free_port(),), 2)


def test_replicated_vector_without_gradient_contributes_zeros():
    used, unused, frozen = (nn.Parameter(torch.ones(3)) for _ in range(3))
    used.grad = torch.full((3,), 2.0)
    frozen.requires_grad_(False)
    strategy = SimpleNamespace(_replicated=[used, unused, frozen], root_device=torch.device("cpu"))
    FullyShardedStrategy._complete_gradients(strategy, nn.Module())
    assert torch.equal(unused.grad, torch.zeros(3)) and torch.equal(used.grad, torch.full((3,), 2.0))
    assert frozen.grad is None


def test_fsdp_frees_what_initialized_the_weights():
    """Which draws ahead: a pipeline's stage leaves values that it never asks for."""
    with torch.device("meta"):
        model = GPT(ModelConfig(vocab_size=64, n_layer=2, n_embd=32, n_head=4, block_size=16))
    start_fake_group(2, 0)
    try:
        strategy = FullyShardedStrategy(auto_wrap_policy={Block})
        strategy.parallel_devices = [torch.device("cpu")] * 2
        strategy.materialize = Materializer(model, lambda name, shape: torch.zeros(shape))
        values = weakref.ref(strategy.materialize)
        strategy.setup_module(model)
        assert values() is None
    finally:
        dist.destroy_process_group()


def test_fsdp_is_fabrics_strategy_as_litgpt_constructs_it():
    """See ``litgpt/pretrain.py``. Nothing else is passed that Fabric's class would read."""
    documented = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full", sharding_strategy="HYBRID_SHARD")
    world, device = WorldInfo(2, 1, 0, 0, "manual", False), {"accelerator": "cpu", "precision": "32-true"}
    for name in ("auto", "fsdp"):
        found = plan_strategy(name, FSDPArgs(), DDPArgs(), devices=2, num_nodes=1, **device)
        fabric = build_fabric(found, world, fsdp=FSDPArgs(), ddp=DDPArgs(), block_classes={Block}, **device)
        strategy = fabric.strategy
        assert isinstance(strategy, FSDPStrategy)
        for attribute in ("_state_dict_type", "sharding_strategy", "cpu_offload", "mixed_precision"):
            assert getattr(strategy, attribute) == getattr(documented, attribute), attribute
        (wrapped, expected) = (vars(s._fsdp_kwargs["auto_wrap_policy"]) for s in (strategy, documented))
        assert wrapped == expected and strategy._fsdp_kwargs.keys() == documented._fsdp_kwargs.keys()
    with pytest.raises(NotImplementedError, match=r"use run.save\(name\)"):
        strategy.save_checkpoint("x", {})


def test_one_device_does_not_initialize_mpi():
    """Where mpi4py is installed, Fabric's search for a cluster does, which aborts the process without ssh."""
    plan = plan_strategy("auto", FSDPArgs(), DDPArgs(), devices=1, num_nodes=1, accelerator="cpu", precision="32-true")
    options = {"accelerator": "cpu", "precision": "32-true", "fsdp": FSDPArgs(), "ddp": DDPArgs()}
    with mock.patch("lightning.fabric.connector.MPIEnvironment.detect", side_effect=AssertionError):
        build_fabric(plan, WorldInfo(1, 1, 0, 0, "manual", False), block_classes={Block}, **options)
        single_device_fabric("cpu", "32-true")


def test_n4_arguments_of_the_constructor_determine_the_mesh_and_the_units():
    for arguments, layout, units in (
        ({}, Layout(replicate=2, shard=2), [GPT, *[Block] * 2]),
        ({"sharding_strategy": "FULL_SHARD"}, Layout(shard=4), [GPT, *[Block] * 2]),
        ({"sharding_strategy": "NO_SHARD"}, Layout(replicate=4), [GPT, *[Block] * 2]),
        ({"device_mesh": (4, 1)}, Layout(replicate=4), [GPT, *[Block] * 2]),
        ({"auto_wrap_policy": {CausalSelfAttention}}, Layout(replicate=2, shard=2), [GPT, *[CausalSelfAttention] * 2]),
    ):
        strategy = FullyShardedStrategy(**({"auto_wrap_policy": {Block}} | arguments))
        strategy.parallel_devices, strategy.num_nodes = [torch.device("cpu")] * 2, 2
        model = GPT(ModelConfig(vocab_size=64, n_layer=2, n_embd=32, n_head=4, block_size=16, tie_embeddings=True))
        start_fake_group(4, 0)
        try:
            strategy.setup_module(model)
        finally:
            dist.destroy_process_group()
        assert strategy.layout == layout
        assert model.transformer.wte.weight.to_local().shape == (64 // layout.shard, 32)
        found = [part for part in model.modules() if isinstance(part, FSDPModule)]
        assert len(found) == len(units) and all(map(isinstance, found, units))
