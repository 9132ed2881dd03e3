"""--qat.weights in training: adapters, memory, what is saved, resumed and refused."""

import pytest
import torch
from helpers.initialize import add_lora, initialize
from torch import nn
from torch.func import functional_call
from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, build_model
from toolkit.models.lora import is_adapter, without_adapters
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.lora_layers import AdaptedLayer

INT4 = {"weights": "int4", "group_size": 16, "dtype": "float32"}
SIZES = {"vocab_size": 128, "block_size": 32, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2}
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32}
LORA = LoRAConfig(r=4, key=True, projection=True, mlp=True, experts=True)
IDS = torch.arange(48).view(2, 24) * 7 % 128


def build(qat: dict | None = INT4, lora: LoRAConfig | None = None, **sizes) -> GPT:
    """Return an initialized model, with adapters that are not zero."""
    model = build_model(ModelConfig(**SIZES | sizes, qat=qat))
    initialize(model, seed=1)
    if lora is not None:
        add_lora(model, lora)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.data.normal_(0, 0.05, generator=generator)
    return model


def fake_quantized(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with torchao's int4 values; autograd knows its gradient."""
    quantizer = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=16, is_symmetric=True))
    return quantizer(weight.flatten(0, -2)).view_as(weight)


def merged(layer: nn.Module, adapters_on: bool = True) -> torch.Tensor:
    """Return W + scaling B A, with the rows of each adapter."""
    weight = layer.weight
    if not isinstance(layer, AdaptedLayer) or not adapters_on:
        return weight
    rows = list(weight.split(1, dim=-2))
    for adapter in layer.adapters:
        product = layer.scaling * adapter.B @ adapter.A
        for i, row in zip(adapter.rows, product.split(1, dim=-2), strict=True):
            rows[i] = rows[i] + row
    return torch.cat(rows, dim=-2)


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_model_computes_as_a_plain_one_of_torchaos_weights(lora, sizes):
    """Loss, and gradients of everything that is trained; fused query, key and value with two adapters."""
    model, plain = build(lora=lora, **sizes), build(None, **sizes)
    quantized = [name for name, layer in model.named_modules() if hasattr(layer, "weight_fake_quantizer")]
    assert len(quantized) == 2 * 5

    def expected(adapters_on: bool = True) -> torch.Tensor:
        weights = {n: p for n, p in model.named_parameters() if not is_adapter(n)}
        weights |= {f"{n}.weight": fake_quantized(merged(model.get_submodule(n), adapters_on)) for n in quantized}
        return functional_call(plain, weights, (IDS, IDS))[0]

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert (lora is not None) == all(is_adapter(name) for name in trained)
    reference = expected()
    gradients = torch.autograd.grad(reference, list(trained.values()))
    loss = model(IDS, IDS)[0]
    loss.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max(), msg=name)
    if lora is not None:
        with torch.no_grad(), without_adapters(model):
            assert model(IDS, IDS)[0].item() == pytest.approx(expected(adapters_on=False).item(), rel=1e-6)
            assert abs(model(IDS, IDS)[0] - loss) > 1e-3


@pytest.mark.parametrize("kind", ["int4", "int8-int4"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_layer_saves_its_input_and_its_parameters(lora, kind):
    """No copy of the weight, in bf16 autocast as well."""
    model = build(INT4 | {"weights": kind, "dtype": "bfloat16"}, lora, **EXPERTS)
    x, ends = torch.randn(24, 64, requires_grad=True), torch.tensor([8, 9, 20, 24], dtype=torch.int32)
    block = model.transformer.h[0]
    for layer, arguments in ((block.attn.proj, ()), (block.mlp.experts.fc_1, (ends,))):
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, saved=saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu"):
            layer(x, *arguments)
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        nbytes = sum(tensor.nbytes for address, tensor in saved.items() if address not in own)
        assert nbytes == x.numel() * 2 + sum(argument.nbytes for argument in arguments), (layer, lora)
