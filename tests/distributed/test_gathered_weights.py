"""Weights that are gathered once, for forward passes without gradients that need no other rank."""

import os
import time
from collections import Counter

import pytest
import torch
from helpers.cases import slow_except
from helpers.groups import free_port, start_ranks
from toolkit_plan.measure.gathered import fsdp_memory
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.parameters import stored_parameters
from toolkit_plan.measure.trace import StepMemory
from torch import distributed as dist
from torch.autograd import profiler_legacy
from torch.distributed.fsdp import FSDPModule

from toolkit.config import DDPArgs, FSDPArgs
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.fsdp import gathered_weights
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import plan_strategy
from toolkit.distributed.world import WorldInfo
from toolkit.inference.generate import complete
from toolkit.inference.sampling import Sampling
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import add_lora, is_adapter
from toolkit.models.lora_config import LoRAConfig

# sharding, precision, tied embeddings, adapters, recomputation, compiled; and the units that are gathered
CASES = {
    "untied": (("FULL_SHARD", "32-true", False, False, False, False), 6),
    "tied, mixed, recomputed": (("FULL_SHARD", "bf16-mixed", True, False, True, False), 4),
    "untied, mixed": (("FULL_SHARD", "bf16-mixed", False, False, False, False), 5),
    "kept": (("SHARD_GRAD_OP", "32-true", True, False, False, False), 4),
    "adapters": (("FULL_SHARD", "bf16-true", False, True, False, False), 6),
    "compiled": (("FULL_SHARD", "32-true", False, False, False, True), 6),
    "replicas": (("HYBRID_SHARD", "32-true", False, False, False, False), 6),
    "not sharded": (("NO_SHARD", "32-true", False, False, False, False), 0),
}


def build(tied: bool, precision: str, lora: bool) -> GPT:
    model = GPT(ModelConfig(vocab_size=90, padded_vocab_size=96, n_embd=32, n_layer=3, n_head=4, block_size=64,
                            tie_embeddings=tied, bias=True))  # fmt: skip
    if lora:
        add_lora(model, LoRAConfig(r=2))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        dtype = torch.bfloat16 if precision == "bf16-true" and not is_adapter(name) else torch.float32
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.3).to(dtype)
    return model


def groups_of(model):
    units = [part for part in model.modules() if isinstance(part, FSDPModule)]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]


def settings_and_bytes(model) -> tuple[list[bool], int]:
    """Return which units free their weights after a forward pass, and the bytes of unsharded weights."""
    groups = groups_of(model)
    outputs = {id(t.untyped_storage()): t for g in groups for p in g.fsdp_params for t in p.all_gather_outputs}
    return [g._reshard_after_forward for g in groups], sum(t.untyped_storage().size() for t in outputs.values())


def answers_of(model, rank: int, n_tokens: int):
    """Return the answers to the prompts of a rank, of different number on each rank, and their log-probabilities."""
    prompts, record = [torch.arange(1, 4 + i) for i in range(rank + 1)], []
    tokens = complete(model, prompts, max_new_tokens=n_tokens, sampling=Sampling(), seeds=range(rank + 1),
                      is_alone=True, record=record, cuda_graph=False)  # fmt: skip
    return tokens, record[0].log_probs


def rank_main(rank: int, port: int, name: str, size: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank % 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    (sharding, precision, tied, lora, recomputes, compiles), n_units = CASES[name]
    nodes = size // 2
    options = FSDPArgs(sharding_strategy=sharding)
    plan = plan_strategy("fsdp", options, DDPArgs(), devices=2, num_nodes=nodes, accelerator="cpu",
                         precision=precision, model_parallel=Layout())  # fmt: skip
    world = WorldInfo(2, nodes, *divmod(rank, 2), "manual", starts_processes=False)
    fabric = build_fabric(plan, world, accelerator="cpu", precision=precision, fsdp=options, ddp=DDPArgs(),
                          block_classes={Block})  # fmt: skip
    fabric.launch()
    eager = torch.compiler.set_stance("force_eager")

    def sharded() -> GPT:
        module = build(tied, precision, lora)
        if recomputes:
            checkpoint_blocks(module, (Block,), "full")
        for block in module.transformer.h if compiles else ():
            block.compile(backend="eager")
        return fabric.setup(module, move_to_device=False)

    def train(model) -> float:
        model.train()
        loss, n = model(torch.arange(1, 9)[None], torch.arange(2, 10)[None])
        fabric.backward(loss / n)
        model.zero_grad()
        return loss.item()

    plain, model, alone = sharded(), sharded(), build(tied, precision, lora).eval()
    loss = train(plain)
    expected_state = settings_and_bytes(plain)
    assert expected_state[1] == 0
    with torch.no_grad(), fabric.autocast(), eager:
        expected = answers_of(alone, rank, 6), answers_of(alone, rank, 24)
        model.eval()
        torch.autograd._enable_profiler_legacy(profiler_legacy.profile().config())
        with gathered_weights(model):  # before the first forward pass
            found = answers_of(model, rank, 6), answers_of(model, rank, 24)
            gathered = settings_and_bytes(model)[1]
        events = [event for events in torch.autograd._disable_profiler_legacy() for event in events]
    assert settings_and_bytes(model)[1] == 0
    counts = Counter(event.name() for event in events if event.kind() == "push")
    assert counts["gloo:all_gather"] == n_units, counts
    for (tokens, log_probs), (wanted, exact) in zip(found, expected, strict=True):
        assert tokens == wanted
        torch.testing.assert_close(log_probs, exact, rtol=0, atol=0)
    assert train(model) == loss
    assert settings_and_bytes(model) == expected_state
    inputs = MemoryInputs(
        alone.config, precision, plan, 1, 1, 64, {"name": "AdamW"}, "cpu", LoRAConfig(r=2) if lora else None
    )
    planned = fsdp_memory(inputs, alone, stored_parameters(inputs, alone), StepMemory()).all_weights
    assert gathered == planned > 0, (gathered, planned)

    def fail(*_) -> None:
        raise ValueError("in a forward pass")

    handle = model.transformer.h[1].attn.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in a forward pass"), gathered_weights(model), torch.no_grad(), eager:
        answers_of(model, rank, 6)
    handle.remove()
    assert settings_and_bytes(model) == expected_state
    assert train(model) == loss
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # otherwise gloo's threads may free tensors during interpreter exit


@pytest.mark.parametrize("name", slow_except(["tied, mixed, recomputed"], CASES))
def test_weights_are_gathered_once_per_unit_and_freed(name):
    size = 4 if CASES[name][0][0] == "HYBRID_SHARD" else 2
    start_ranks(rank_main, (free_port(), name, size), size)
