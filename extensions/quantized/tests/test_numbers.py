"""The numbers of quantized weights: torchao's, in training, in files and in transformers."""

import pytest
import torch
from toolkit_quantized.layers import _merge
from toolkit_quantized.numbers import FakeQuantizer, dequantize, quantize
from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer
from torchao.quantization.qat.linear import FakeQuantizedLinear as TorchaoLinear

from toolkit.models.config import ModelConfig
from toolkit.models.gpt import build_model
from toolkit.private_torch import configure_compiler

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
TINY = {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4, "block_size": 32}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_and_scales_are_those_of_torchao(bits, dtype):
    torch.manual_seed(0)
    weight = torch.randn(64, 96) * 0.02
    weight[0], weight[1, :32] = 0, torch.arange(32) - 16.0
    values, scale, is_clipped = quantize(weight, FakeQuantizer(bits, False, 32, dtype))
    kind = getattr(torch, f"int{bits}")
    fake = IntxFakeQuantizer(IntxFakeQuantizeConfig(kind, group_size=32, is_symmetric=True))
    rounded = weight.to(dtype)
    expected = fake(rounded)
    assert torch.equal(scale, fake.scale.float()) and torch.equal(dequantize(values, scale).to(dtype), expected)
    assert is_clipped.any() and values[is_clipped].eq(2 ** (bits - 1) - 1).all()
    error = (dequantize(values, scale) - rounded).abs() / scale.repeat_interleave(32, 1)
    assert error.max() <= 0.51 + 2**-8 * 2**bits / 2  # half a step, and the rounding of the scale


@pytest.mark.parametrize("weights", ["int4", "int8", "int8-int4"])
def test_a_layer_computes_as_torchao(weights):
    torch.manual_seed(0)
    model = build_model(ModelConfig(**TINY, qat={"weights": weights, "group_size": 32, "dtype": "float32"}))
    ours = model.transformer.h[0].mlp.proj
    kind = torch.int4 if weights.endswith("4") else torch.int8
    inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if "-" in weights else None
    numbers = IntxFakeQuantizeConfig(kind, group_size=32, is_symmetric=True)
    theirs = TorchaoLinear(256, 64, bias=False, activation_config=inputs, weight_config=numbers)
    theirs.weight.data.copy_(ours.weight)
    outputs = []
    for layer in (ours, theirs):
        x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(1))
        x[0].clamp_(-2.9, 2.9)[:, :2] = torch.tensor([3.0, -3.0])  # clipped: both are half-way between two integers
        y = layer(x.requires_grad_())
        (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
        outputs.append((y, x.grad, layer.weight.grad))
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    assert torch.equal(outputs[0][0], outputs[1][0])


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]
)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 4), (torch.float16, 8), (torch.float32, 8)])
def test_compiled_layers_have_the_integers_of_the_export(device, dtype, bits, request):
    """With adapters. Without is_exact, Inductor omits the rounding to 16 bits: other scales and integers."""
    torch.compiler.reset()
    configure_compiler(any_length=False, is_exact=True)
    request.addfinalizer(lambda: configure_compiler(any_length=False, is_exact=False))
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator).to(device) for shape in ((256, 256), (4, 256), (256, 4)))

    def compute(weight, a, b):
        return quantize(_merge(weight, a, b, 2.0, dtype), FakeQuantizer(bits, False, 32, dtype))

    for compiled, expected in zip(torch.compile(compute)(weight, a, b), compute(weight, a, b), strict=True):
        assert torch.equal(compiled, expected)
