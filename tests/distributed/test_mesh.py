"""The layout of the ranks: which of them read the same rows, and the sizes of the dimensions."""

from collections import Counter
from itertools import product

import pytest

from toolkit.config import DDPArgs, FSDPArgs
from toolkit.distributed.mesh import Layout, data_devices
from toolkit.distributed.strategy import plan_strategy
from toolkit.errors import UserError


def test_every_rank_has_a_place_of_its_own_and_tensor_is_innermost():
    layout = Layout(pipeline=2, replicate=3, shard=2, context=2, tensor=2)
    assert (layout.world_size, layout.data_parallel, layout.loss_ranks) == (48, 6, 12)
    places = [tuple(layout.coordinates(rank).values())[::-1] for rank in range(48)]
    assert places == list(product(*map(range, (2, 3, 2, 2, 2))))


def test_n3_ranks_of_one_row_are_those_of_tensor_context_and_pipeline():
    layout = Layout(pipeline=2, replicate=3, shard=2, context=2, tensor=2)
    assert Counter(map(layout.data_rank, range(48))) == dict.fromkeys(range(6), 8)
    assert [layout.data_rank(rank) for rank in (0, 3, 4, 23, 24)] == [0, 0, 1, 5, 0]
    assert [Layout(replicate=2, shard=2).data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_groups_hold_the_ranks_that_differ_in_their_dimensions_only():
    layout = Layout(replicate=2, shard=2, tensor=2)
    assert layout.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("replicate", "shard", "context") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [rank for rank in range(8) if layout.is_first(rank, "tensor", "shard")] == [0, 4]


def test_shards_and_replicas_take_what_model_parallelism_leaves():
    for sizes, devices, num_nodes, replicate, shard in [
        ({"tensor": 4}, 8, 2, 2, 2),
        ({"tensor": 2, "context": 4}, 8, 2, 2, 1),
        ({"context": 16}, 8, 4, 2, 1),  # a context group of two nodes
        ({"pipeline": 2}, 8, 4, 2, 8),
        ({"pipeline": 2}, 8, 1, 1, 4),
        ({"pipeline": 4, "tensor": 2}, 8, 2, 1, 2),  # half a node per stage
        ({"tensor": 2}, 2, 1, 1, 1),
    ]:
        plan = plan_strategy(
            "auto", FSDPArgs(), DDPArgs(), devices=devices, num_nodes=num_nodes, accelerator="cuda",
            precision="32-true", model_parallel=Layout(**sizes),
        )  # fmt: skip
        assert plan.kind == "fsdp"
        assert plan.layout == Layout(replicate=replicate, shard=shard, **sizes)


def test_sizes_that_do_not_divide_the_devices_are_named():
    for sizes, message in [
        ({"tensor": 3}, "--tensor_parallel_size 3: does not divide the 8 devices of a node; use one of 1, 2, 4, 8"),
        ({"tensor": 4, "context": 8}, "--context_parallel_size 8: does not divide 16 devices / 4 tensor parallel; use"),
        ({"pipeline": 3}, "--pipeline_parallel_size 3: does not divide 16 devices"),
    ]:
        with pytest.raises(UserError, match=message):
            data_devices(Layout(**sizes), 8, 2)
