"""N8 honest-throughput: FLOPs of a training step, and the peak of the device, by stated formulas."""

from __future__ import annotations

import re

import torch
from torch import nn

from toolkit.models.config import ModelConfig
from toolkit.models.lora import is_adapter
from toolkit.models.moe import StackedLinear

PEAK_FLOPS_BF16 = {
    # Dense bfloat16 tensor-core peaks from the vendors' data sheets (sparse figures halved). The first name found in
    # torch.cuda.get_device_name() applies, so longer names come first.
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""FLOP/s per device."""


def matmul_parameters(model: nn.Module) -> int:
    """Count the weights that are in a matrix product for every token: linear layers, including the head.

    A tied head counts once; an untied embedding does not count. Of experts, only the active ones per token count.
    """
    return sum(size for size, _ in _matmul_sizes(model))


def _matmul_sizes(model: nn.Module) -> list[tuple[int, bool]]:
    """Return the elements used per token of each weight, and whether it is trainable."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    weights += [p for name, p in model.named_parameters() if is_adapter(name) and p.ndim == 2]
    stacks = [m for m in model.modules() if isinstance(m, StackedLinear)]
    sizes = [(weight.numel(), weight.requires_grad) for weight in weights]
    return sizes + [(m.weight.numel() * m.active // m.weight.size(0), m.weight.requires_grad) for m in stacks]


def flops_per_token(model: nn.Module, config: ModelConfig, seq_length: float, *, causal: bool = False) -> float:
    """FLOPs of forward and backward per token: 6 x matmul parameters + 12 x layers x d x T (PaLM, arXiv 2204.02311, B).

    ``d`` is heads x head size and T the sequence length; if the widths of values and keys differ, d is their mean.
    Frozen parameters count 4 times instead of 6, because they have no gradient. ``causal`` counts half of the attention
    term, as computed by a causal kernel. What activation checkpointing recomputes does not count: these are the FLOPs
    of the model, not of the hardware.
    """
    attention = 6 * config.n_layer * config.n_head * (config.head_size + config.value_size) * seq_length
    linear = sum((6 if is_trained else 4) * size for size, is_trained in _matmul_sizes(model))
    return linear + attention * (0.5 if causal else 1.0)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's dense peak for the precision, in FLOP/s; None if unknown (a CPU, an unlisted GPU)."""
    if device.type != "cuda" or precision == "32-true":  # 32-true may or may not use TF32
        return None
    name = torch.cuda.get_device_name(device)
    peaks = (peak for known, peak in PEAK_FLOPS_BF16.items() if re.search(rf"\b{known}\b", name, re.I))
    return next((peak * mig_fraction(name) for peak in peaks), None)


def mig_fraction(device_name: str) -> float:
    """Return a MIG instance's fraction of the GPU's compute, in slices of 7; 1 without MIG.

    Names are "NVIDIA H200 MIG 3g.71gb", or "... MIG 1c.3g.71gb" for a compute instance with 1 of the slices.
    """
    slices = re.search(r"\bMIG (\d)[cg]\.", device_name)
    return int(slices[1]) / 7 if slices else 1.0
