"""Every layout saves the state dict of the undivided model, for every type. One process on fake groups."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from helpers.cases import check_each, slow_except
from helpers.tiny_configs import HF_CONFIGS
from torch import distributed as dist

from toolkit.checkpoints.run import state_dicts
from toolkit.checkpoints.run.state_dicts import full_state, require_complete
from toolkit.distributed import ranks
from toolkit.distributed.fsdp import FullyShardedStrategy
from toolkit.distributed.mesh import Layout
from toolkit.distributed.pipeline import Pipeline
from toolkit.distributed.shards import shard_of
from toolkit.distributed.tensor_parallel import require_divisible, split_model
from toolkit.errors import UserError
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.families import config_from_hf
from toolkit.models.init import Materializer
from toolkit.private_torch import start_fake_group
from toolkit.training.model_spec import ModelSpec

LAYOUTS = [
    Layout(shard=2), Layout(tensor=2), Layout(pipeline=2), Layout(shard=2, tensor=2), Layout(tensor=2, pipeline=2)
]  # fmt: skip


@contextmanager
def fake_ranks(layout: Layout, rank: int) -> Iterator[None]:
    start_fake_group(layout.world_size, rank)
    ranks.set_layout(layout)
    try:
        yield
    finally:
        dist.destroy_process_group()
        ranks.set_layout(None)


def saved_shapes(config: ModelConfig, layout: Layout) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
    """Return the shapes that the ranks of ``layout`` save together, and the undivided model's."""
    shapes: dict[str, torch.Size] = {}
    for stage in range(layout.pipeline):
        spec = ModelSpec(config)
        with fake_ranks(
            layout, next(r for r in range(layout.world_size) if layout.coordinates(r)["pipeline"] == stage)
        ):
            if layout.tensor > 1:
                split_model(spec.module, layout.tensor, 0, ranks.group("tensor"))
            if layout.pipeline > 1:
                Pipeline(spec.module, "1f1b", torch.device("cpu"), nullcontext)
            if layout.shard > 1:
                strategy = FullyShardedStrategy(auto_wrap_policy={Block}, model_parallel=Layout(tensor=layout.tensor))
                strategy.parallel_devices = [torch.device("cpu")] * layout.world_size
                strategy.materialize = Materializer(spec.module, lambda name, shape: torch.zeros(shape))
                strategy.setup_module(spec.module)
            optimizer = torch.optim.SGD(map(shard_of, spec.module.parameters()), lr=0.1)
            with mock.patch.object(state_dicts, "gather_stages", lambda state: state):
                weights, _ = full_state(spec.module, optimizer, spec.tied)
        shapes |= {name: value.shape for name, value in weights.items()}
    return shapes, spec.shapes


def supports(config: ModelConfig, layout: Layout) -> bool:
    is_dense = not (
        config.n_moe_layer or config.latent_attention or (config.norm_qk and config.norm_qk_type == "olmo2")
    )
    try:
        require_divisible(config, layout.tensor)
    except UserError:
        return False
    return (layout.tensor == 1 or is_dense) and (layout.pipeline == 1 or not (config.n_moe_layer or config.n_layer % 2))


@pytest.mark.parametrize("layout", slow_except(LAYOUTS[2:3], LAYOUTS), ids=str)
def test_s1_every_type_saves_the_undivided_state_dict(layout):
    configs = {name: config_from_hf(make().to_dict()) for name, make in HF_CONFIGS.items()}
    configs = {name: config for name, config in configs.items() if supports(config, layout)}
    assert len(configs) > 30

    check_each(lambda name: require_complete(*saved_shapes(configs[name], layout)), configs)


def test_difference_is_named():
    whole = {"a": torch.Size([2]), "b": torch.Size([])}
    with pytest.raises(RuntimeError, match=r"missing b \(\), unknown c \(3\), a is \(1\), not \(2\)"):
        require_complete({"a": torch.Size([1]), "c": torch.Size([3])}, whole)
