"""``toolkit plan`` knows the model: parameters of the paper's sizes, and activations as autograd counts them."""

import pytest
import torch
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.memory import plan_memory

from toolkit.config import ActivationCheckpointing
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.families import get_config
from toolkit.models.gpt import build_model, model_on_meta


def saved_bytes(model: torch.nn.Module, ids: torch.Tensor, is_mixed: bool) -> int:
    """Return the bytes of all storages that autograd saves in a forward pass, without parameters."""
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            model(ids, ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        ("32-true", "none"),
        ("bf16-mixed", "full"),
        pytest.param("32-true", "full", marks=pytest.mark.slow),
        pytest.param("bf16-mixed", "none", marks=pytest.mark.slow),
    ],
)
def test_activations_match_autograd(precision, mode: ActivationCheckpointing):
    config = get_config("free-transformer-tiny").with_vocab_size(256)
    options = {"name": "AdamW", "weight_decay": 0.1}
    plan = StrategyPlan("single", None, Layout(), "")
    setup = MemoryInputs(config, precision, plan, 2, 1, 128, options, "cpu", activation_checkpointing=mode)
    model, memory = build_model(config).train(), plan_memory(setup)
    checkpoint_blocks(model, (Block,), mode)
    saved = saved_bytes(model, torch.randint(256, (2, 128)), setup.precision.endswith("-mixed"))
    casts = memory.cast_weights if mode == "none" else 0  # autograd does not save what autocast keeps
    assert memory.activations + casts == pytest.approx(saved, rel=0.1)


def test_sizes_of_the_paper():
    for size, width, vectors in (("1.5b", 1536, 100.7e6), ("8b", 4096, 268.4e6)):
        sizes = {}
        for kind in ("free-transformer", "free-baseline"):
            model = model_on_meta(get_config(f"{kind}-{size}"))
            sizes[kind] = sum(p.numel() for p in model.parameters())
        block = sum(p.numel() for p in model.blocks[0].parameters())
        extra = sizes["free-transformer"] - sizes["free-baseline"]
        assert extra == 65536 * width + block + width + 16 * width and 65536 * width == pytest.approx(vectors, rel=1e-3)
        assert sizes["free-baseline"] == pytest.approx(float(size[:-1]) * 1e9, rel=0.05)
