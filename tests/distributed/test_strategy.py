"""Choice of the distributed strategy."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toolkit.config import DDPArgs, FSDPArgs
from toolkit.distributed.fsdp import ShardedStrategy, unit_precision
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import plan_strategy
from toolkit.errors import UserError


def plan(
    strategy="auto",
    sharding="HYBRID_SHARD",
    devices=1,
    nodes=1,
    precision="32-true",
    accelerator="cpu",
    ddp=None,
    **fsdp,
):
    return plan_strategy(
        strategy, FSDPArgs(sharding_strategy=sharding, **fsdp), ddp or DDPArgs(),
        devices=devices, num_nodes=nodes, accelerator=accelerator, precision=precision,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "kind", "sharding", "layout"),
    [
        ({}, "single", None, Layout()),
        ({"strategy": "fsdp"}, "single", None, Layout()),
        ({"devices": 8}, "fsdp", "FULL_SHARD", Layout(shard=8)),
        ({"devices": 8, "nodes": 2}, "fsdp", "HYBRID_SHARD", Layout(replicate=2, shard=8)),
        ({"devices": 1, "nodes": 4}, "ddp", None, Layout(replicate=4)),
        ({"devices": 8, "nodes": 2, "sharding": "FULL_SHARD"}, "fsdp", "FULL_SHARD", Layout(shard=16)),
        ({"devices": 1, "nodes": 4, "sharding": "FULL_SHARD"}, "fsdp", "FULL_SHARD", Layout(shard=4)),
        ({"devices": 2, "nodes": 2, "sharding": "SHARD_GRAD_OP"}, "fsdp", "SHARD_GRAD_OP", Layout(shard=4)),
        ({"devices": 4, "sharding": "NO_SHARD"}, "ddp", None, Layout(replicate=4)),
        ({"devices": 2, "nodes": 2, "strategy": "ddp"}, "ddp", None, Layout(replicate=4)),
    ],
)
def test_n4_every_mesh_is_explicit_and_no_shard_group_has_one_rank(options, kind, sharding, layout):
    found = plan(**options)
    assert (found.kind, found.sharding, found.layout) == (kind, sharding, layout)
    assert found.reason and str(found)
    assert found.kind != "fsdp" or found.shards > 1


def test_one_device_reports_unused_sharding():
    assert "nothing for --fsdp.sharding_strategy FULL_SHARD" in str(plan(sharding="FULL_SHARD"))
    assert "sharding_strategy" not in str(plan())


def test_buffers_get_the_requested_dtype():
    block, root = unit_precision(FSDPArgs(buffer_dtype="bf16"), "bf16-mixed")
    assert block.buffer_dtype == root.buffer_dtype == torch.bfloat16
    strategy = ShardedStrategy(
        {nn.Linear}, Layout(shard=2), "FULL_SHARD", FSDPArgs(buffer_dtype="bf16"), "bf16-mixed", "cpu"
    )
    with pytest.raises(UserError, match="--fsdp.buffer_dtype bf16: has no effect"):
        strategy.setup_module(nn.Linear(2, 2))


def test_replicated_vector_without_gradient_contributes_zeros():
    used, unused, frozen = (nn.Parameter(torch.ones(3)) for _ in range(3))
    used.grad = torch.full((3,), 2.0)
    frozen.requires_grad_(False)
    ShardedStrategy._reduce_replicated_gradients(SimpleNamespace(_replicated=[used, unused, frozen]))
    assert torch.equal(unused.grad, torch.zeros(3)) and torch.equal(used.grad, torch.full((3,), 2.0))
    assert frozen.grad is None
