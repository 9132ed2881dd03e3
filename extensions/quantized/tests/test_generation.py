"""Text that is generated during training: the weights are quantized once for all tokens, and nothing else changes."""

import weakref
from contextlib import closing, nullcontext
from unittest import mock

import pytest
import torch
from helpers.initialize import add_lora, initialize
from toolkit_quantized import layers
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from toolkit.distributed.fsdp import gathered_weights
from toolkit.inference.decode import Decoder
from toolkit.inference.generate import complete, generate, generate_batch
from toolkit.inference.sampling import Sampling
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, build_model
from toolkit.models.lora import is_adapter
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.quantize import quantized_layers
from toolkit.training.callbacks.samples import generating

SIZES = {"vocab_size": 128, "block_size": 64, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2}
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32}
N_LAYERS, N_TOKENS = 10, 12
PROMPTS = [torch.arange(1, 4 + i) for i in range(3)]


def build(kind: str = "int4", dtype: str = "float32", is_adapted: bool = True, **sizes) -> GPT:
    """Return a model that quantizes in each forward pass, with adapters that are not zero."""
    qat = {"weights": kind, "group_size": 16, "dtype": dtype}
    model = build_model(ModelConfig(**SIZES | sizes, qat=qat)).eval()
    initialize(model, seed=1)
    if is_adapted:
        add_lora(model, LoRAConfig(r=4, key=True, projection=True, mlp=True, experts=True))
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.data.normal_(0, 0.05, generator=generator)
    assert len(quantized_layers(model)) == N_LAYERS
    return model.eval()


def sample(model: GPT) -> tuple[list[list[int]], list, int]:
    """Return sampled tokens, with their log-probabilities, and how often a weight was quantized."""
    record: list[Decoder] = []
    with mock.patch.object(layers, "quantize", wraps=layers.quantize) as quantize:
        tokens = complete(
            model, PROMPTS, max_new_tokens=N_TOKENS, sampling=Sampling(), seeds=range(3), record=record, is_alone=True
        )
    return tokens, record[0].recorded(), quantize.call_count


def quantized_per_token(model: GPT) -> tuple[list[list[int]], list, int]:
    """Return the same of a device without room for quantized weights."""
    with mock.patch.object(layers, "_has_room", return_value=False):
        return sample(model)


@pytest.mark.parametrize("is_adapted", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(("kind", "dtype"), [("int4", "float32"), ("int8-int4", "bfloat16")])
def test_a_generation_quantizes_once_and_its_numbers_are_the_same(kind, dtype, is_adapted):
    """Also in bf16-mixed, with adapters, and experts. Then it quantizes the weights of an update."""
    model = build(kind, dtype, is_adapted, **EXPERTS)
    with torch.autocast("cpu") if dtype == "bfloat16" else nullcontext():
        *expected, n_calls = quantized_per_token(model)
        assert n_calls == N_LAYERS * N_TOKENS
        assert sample(model) == (*expected, N_LAYERS)
        for name, parameter in model.named_parameters():
            if is_adapter(name) or not is_adapted:
                parameter.data.mul_(1.5)
        *updated, _ = quantized_per_token(model)
        assert sample(model) == (*updated, N_LAYERS)
        assert updated[1] != expected[1]


def test_other_dtypes_of_products_are_not_rounded_to_the_dtype_of_the_scales():
    model = build(dtype="bfloat16")  # but no autocast
    assert sample(model)[:2] == quantized_per_token(model)[:2]


@pytest.fixture
def copies(monkeypatch) -> list[weakref.ref]:
    """References to the quantized weights that generations make."""
    made, quantized_weight = [], layers.FakeQuantized.quantized_weight

    def quantize_and_refer(layer, *args):
        weight = quantized_weight(layer, *args)
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(layers.FakeQuantized, "quantized_weight", quantize_and_refer)
    return made


def test_while_text_is_streamed_the_model_computes_as_before(copies):
    """The caller may train it: gradients flow, and validations have the updated weights."""
    model, ids = build(is_adapted=False), torch.arange(8)[None]
    with closing(generate_batch(model, PROMPTS, max_new_tokens=N_TOKENS)) as stream:
        next(stream)
        assert len(copies) == N_LAYERS and all(copy() is not None for copy in copies)
        model(ids, ids)[0].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        other = build(is_adapted=False)
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model(ids), other(ids))
    assert not any(copy() is not None for copy in copies)  # closed early


def test_a_failed_generation_frees_them(copies):
    model = build()
    with mock.patch.object(Decoder, "step", side_effect=ValueError("in a step")):
        with pytest.raises(ValueError, match="in a step") as error:
            list(generate(model, PROMPTS[0], max_new_tokens=N_TOKENS))
        assert len(copies) == N_LAYERS and not any(copy() is not None for copy in copies)
    assert error.traceback and not any("held" in vars(layer) for layer in model.modules())


def test_sharded_weights_are_held_only_while_they_are_gathered(tmp_path):
    """Otherwise each rank would hold the unsharded model."""
    model = build()
    expected = sample(model)
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for block in model.transformer.h:
            fully_shard(block)
        assert sample(fully_shard(model)) == (*expected[:2], N_LAYERS * N_TOKENS)
        with gathered_weights(model):
            assert sample(model) == expected
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_eager", [True, False], ids=["during training", "compiled"])
def test_compiled_blocks_are_not_compiled_again(is_eager):
    """By generations during training, and without them once. Training does not compile after a generation."""
    torch.compiler.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    model, ids = build(is_adapted=False), torch.arange(8)[None]
    for block in model.transformer.h:
        block.compile(backend=count, dynamic=True)
    numbers = []
    for _ in range(3):
        model.train()
        model(ids, ids)[0].backward()
        numbers.append(len(graphs))
        with generating(model) if is_eager else nullcontext(model.eval()):
            sample(model)
        numbers.append(len(graphs))
    assert numbers[3:] == [numbers[1]] * 3, numbers
    assert not is_eager or numbers[0] == numbers[1]
