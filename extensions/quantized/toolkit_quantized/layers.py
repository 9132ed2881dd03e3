"""Linear layers and experts that compute with quantized weights. Parameters and their names do not change.

With adapters, the quantized weight is that of a merge: W + B A.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from toolkit.errors import require_option
from toolkit.models.config import Fields
from toolkit.models.gpt import GPT
from toolkit.models.lora_layers import AdaptedLayer, LoRALinear, replace_linear
from toolkit.models.mixed_mm import matmul_dtype
from toolkit.models.moe import LoRAStackedLinear, StackedLinear, grouped_outer_product, grouped_product
from toolkit.models.quantize import quantized_layers
from toolkit_quantized.numbers import FakeQuantizer, dequantize, quantize, round_inputs
from toolkit_quantized.qat import GROUP_SIZE

_MAX_SHARE = 0.8  # of a CUDA device's memory, for tensors with held weights


class FakeQuantized(nn.Module):
    """A layer whose weight, (out, in) or (experts, out, in), is quantized in each forward pass."""

    weight: Any  # nn.Parameter
    weight_fake_quantizer: FakeQuantizer
    held: Any = None
    """By dtype of products, what to compute them with instead of the weight, see :class:`HeldWeights`."""
    adapted_by: ClassVar[Any]

    def product(self, x: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """(..., in) -> (..., out); with ``ends``, see :class:`toolkit.models.moe.StackedLinear`."""
        x = x.to(matmul_dtype(x))
        held = self.held and self.held.get(x.dtype)
        weight, a, b, scaling, quantizer = held or (self.weight, *_adapters(self), self.weight_fake_quantizer)
        product: Tensor = _Product.apply(x, weight, a, b, bias, ends, scaling, quantizer)
        return product

    @torch.no_grad()
    def quantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight that the layer computes with, by default in the parameter's dtype."""
        with torch.autocast(self.weight.device.type, enabled=False):
            dense, _ = _quantized(self.weight, *_adapters(self), self.weight_fake_quantizer)
        return dense.to(dtype or self.weight.dtype)


class FakeQuantizedLinear(FakeQuantized, nn.Linear):
    """A linear layer with a quantized weight."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.product(x, self.bias)


class FakeQuantizedStackedLinear(FakeQuantized, StackedLinear):
    """Stacked linear layers with quantized weights."""

    def project(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the output without the biases."""
        return self.product(x, ends=ends)


class LoRAFakeQuantizedLinear(LoRALinear):
    """Adds adapters to :class:`FakeQuantizedLinear`."""

    weight_fake_quantizer: FakeQuantizer

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return FakeQuantizedLinear.forward(self, x)  # type: ignore[arg-type]

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight`` with the adapters merged as in the forward pass, in fp32."""
        return _merge(weight, *self.adapter_factors(), self.scaling, self.weight_fake_quantizer.dtype)

    def adapter_factors(self) -> tuple[Tensor, Tensor]:
        """Return A, (R, in), and B, (out, R)."""
        return self._factors()


class LoRAFakeQuantizedStackedLinear(LoRAStackedLinear):
    """Adds an adapter per expert to :class:`FakeQuantizedStackedLinear`."""

    weight_fake_quantizer: FakeQuantizer

    def forward(self, x: Tensor, ends: Tensor, tokens: Tensor | None = None) -> Tensor:
        """See :class:`toolkit.models.moe.StackedLinear`."""
        return StackedLinear.forward(self, x, ends, tokens)  # type: ignore[arg-type]

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight`` with the adapters merged as in the forward pass, in fp32."""
        return _merge(weight, *self.adapter_factors(), self.scaling, self.weight_fake_quantizer.dtype)

    def adapter_factors(self) -> tuple[Tensor, Tensor]:
        """Return A, (experts, r, in), and B, (experts, out, r)."""
        (adapter,) = self.adapters
        return adapter.A, adapter.B


FakeQuantizedLinear.adapted_by = LoRAFakeQuantizedLinear
FakeQuantizedStackedLinear.adapted_by = LoRAFakeQuantizedStackedLinear
QUANTIZED = (FakeQuantizedLinear, FakeQuantizedStackedLinear)
"""The classes of a linear layer and of stacked ones."""


def attach(model: GPT) -> None:
    """Replace the linear layers of the blocks and of experts, except routers. Parameters and names stay.

    Raises:
        UserError: The groups do not divide the width of a layer.
    """
    quantizer, layers = FakeQuantizer.of(model.config.qat or {}), quantized_layers(model)
    common = math.gcd(*(layer.in_features for _, layer in layers))
    size = min(common & -common, GROUP_SIZE)
    fix = f"use {size}" if size > 1 else "no size divides the widths of all layers"
    for name, layer in layers:
        hint = f"{name} has {layer.in_features} input features, which these groups do not divide; {fix}"
        require_option(layer.in_features % quantizer.group_size == 0, "qat.group_size", quantizer.group_size, hint)
        owner, _, own_name = name.rpartition(".")
        new_class = QUANTIZED[isinstance(layer, StackedLinear)]
        replace_linear(model.get_submodule(owner), own_name, new_class).weight_fake_quantizer = quantizer
    model.note = f"linear layers compute with {describe(model.config.qat or {})}"


def describe(qat: Fields) -> str:
    """Return the weights and inputs of ``ModelConfig.qat`` as a part of a line."""
    *inputs, weights = qat["weights"].split("-")
    inputs_text = f" and inputs rounded to {inputs[0]} per token" if inputs else ""
    return f"{weights} weights in groups of {qat['group_size']}{inputs_text}"


def freeze(model: GPT, device: torch.device | str, dtype: torch.dtype | None) -> Fields | None:
    """Replace the weights by their quantized values on ``device`` in ``dtype``, one by one, with adapters merged.

    Returns what the model still quantizes.
    """
    qat = model.config.qat or {}
    *inputs, _ = qat["weights"].split("-")
    for name, layer in [(name, layer) for name, layer in model.named_modules() if isinstance(layer, FakeQuantized)]:
        layer.weight.data = layer.to(device).quantized_weight().to(dtype)
        layer.weight_fake_quantizer = replace(layer.weight_fake_quantizer, bits=None)
        owner, _, own_name = name.rpartition(".")
        new_class = (QUANTIZED if inputs else (nn.Linear, StackedLinear))[isinstance(layer, StackedLinear)]
        replace_linear(model.get_submodule(owner), own_name, new_class, layer.weight)
    return qat | {"weights": f"{inputs[0]}-none"} if inputs else None


class HeldWeights:
    """Quantized weights of a model for many forward passes, see :class:`toolkit.models.quantizer.Quantizer`.

    Each has the dtype of the run's products. Sharded weights, which each rank would hold complete, and those for which
    a CUDA device has no room are left out.
    """

    def __init__(self, model: GPT) -> None:
        self._held: dict[Any, Any] = {}
        for layer in model.modules():
            if not isinstance(layer, FakeQuantized) or isinstance(layer.weight, DTensor):
                continue
            quantizer = layer.weight_fake_quantizer
            if quantizer.bits and _has_room(layer.weight):
                weight = layer.quantized_weight(quantizer.dtype)
                self._held[layer] = {quantizer.dtype: (weight, None, None, 1.0, replace(quantizer, bits=None))}

    def __enter__(self) -> None:
        for layer, held in self._held.items():
            layer.held = held

    def __exit__(self, *_: object) -> None:
        for layer in self._held:
            del layer.held  # as if it had never been set: otherwise compiled blocks would be compiled again


def _has_room(weight: Tensor) -> bool:
    """Whether a quantized copy of a weight leaves memory for the forward pass."""
    return not weight.is_cuda or torch.cuda.memory_allocated() < _MAX_SHARE * torch.cuda.mem_get_info()[1]


class _Product(torch.autograd.Function):
    """x @ quantized weight. The backward pass quantizes again: the forward pass saves only inputs and parameters.

    The gradient passes the rounding unchanged (straight-through), and is zero where a value is clipped, as torchao's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        bias: Tensor | None,
        ends: Tensor | None,
        scaling: float,
        quantizer: FakeQuantizer,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b, ends)
        ctx.scaling, ctx.quantizer = scaling, quantizer
        with torch.autocast(x.device.type, enabled=False):  # it is off in the backward pass
            dense, _ = _quantized(weight, a, b, scaling, quantizer)
        inputs, dense = round_inputs(x)[0] if quantizer.rounds_inputs else x, dense.to(x.dtype)
        if ends is None:
            return F.linear(inputs, dense, None if bias is None else bias.to(x.dtype))
        return grouped_product(inputs, dense.transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, ends = ctx.saved_tensors
        needs_x, needs_weight, needs_adapters, _, needs_bias, *_ = ctx.needs_input_grad
        dense, is_clipped = _quantized(weight, a, b, ctx.scaling, ctx.quantizer)
        dense, grad_output = dense.to(x.dtype), grad_output.contiguous()
        grad_x = grad_weight = grad_a = grad_b = grad_bias = None
        inputs, is_input_clipped = round_inputs(x) if ctx.quantizer.rounds_inputs else (x, None)
        if needs_x:
            grad_x = grad_output @ dense if ends is None else grouped_product(grad_output, dense, ends)
            grad_x = grad_x if is_input_clipped is None else grad_x.masked_fill(is_input_clipped, 0)
        if needs_weight or needs_adapters:
            if ends is None:
                grad = grad_output.flatten(0, -2).t() @ inputs.flatten(0, -2)
            else:
                grad = grouped_outer_product(grad_output, inputs, ends)
            grad = grad if is_clipped is None else grad.masked_fill(is_clipped, 0)
            grad_weight = grad.to(weight.dtype) if needs_weight else None
            if needs_adapters:
                grad = ctx.scaling * grad.float()
                grad_a, grad_b = b.float().mT @ grad, grad @ a.float().mT
        if needs_bias:
            grad_bias = grad_output.flatten(0, -2).sum(0)
        return grad_x, grad_weight, grad_a, grad_b, grad_bias, None, None, None


def _adapters(layer: Any) -> tuple[Tensor | None, Tensor | None, float]:
    """Return A, B and their scale; None without adapters."""
    if not isinstance(layer, AdaptedLayer) or layer.adapters_off:
        return None, None, 1.0
    return *layer.adapter_factors(), layer.scaling  # type: ignore[operator]


def _merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return weight + scaling * b @ a in fp32, with the values of ``dtype`` that a merged checkpoint has."""
    weight, a, b = (factor.to(dtype).float() for factor in (weight, a, b))  # FSDP gathers each in this dtype
    product = torch.addmm if weight.ndim == 2 else torch.baddbmm
    return product(weight, b, a, alpha=scaling).to(dtype).float()


def _quantized(
    weight: Tensor, a: Tensor | None, b: Tensor | None, scaling: float, quantizer: FakeQuantizer
) -> tuple[Tensor, Tensor | None]:
    """Return the weight with quantized values, in fp32, and where it is clipped, both in the weight's shape."""
    if a is not None and b is not None:
        weight = _merge(weight, a, b, scaling, quantizer.dtype)
    if quantizer.bits is None:
        return weight, None
    values, scale, is_clipped = quantize(weight.flatten(0, -2), quantizer)
    return dequantize(values, scale).view_as(weight), is_clipped.view_as(weight)
