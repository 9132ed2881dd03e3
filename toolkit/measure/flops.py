"""N8 honest-throughput: FLOPs of a training step, by a stated formula, and the peak of the device."""

import re
from collections.abc import Iterator

import torch
from torch import nn

from toolkit.measure.gpus import gpu_of_driver
from toolkit.models.config import ModelConfig
from toolkit.models.head import Score
from toolkit.models.lora import TRAINED_SCORE, is_adapter
from toolkit.models.moe import StackedLinear


def matmul_parameters(model: nn.Module) -> int:
    """Count the weights used in a matmul for every token: linear layers, including the head.

    A tied head counts once; an untied embedding does not count. Of experts, only the active ones per token count.
    """
    return sum(size for size, _ in _matmul_sizes(model))


def _matmul_sizes(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Return for each weight the elements used per token, and whether it is trainable."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Score):  # read once per text
            yield module.weight.numel(), module.weight.requires_grad
        elif isinstance(module, StackedLinear):
            stacks = (p for p in module.parameters() if p.ndim == 3)  # weights and adapters
            yield from ((p.numel() * module.active // p.size(0), p.requires_grad) for p in stacks)
    yield from (
        (p.numel(), p.requires_grad)
        for name, p in model.named_parameters()
        if is_adapter(name) and p.ndim == 2 and name != TRAINED_SCORE
    )


def flops_per_token(
    model: nn.Module, config: ModelConfig, seq_length: float, *, causal: bool = False, forward_only: bool = False
) -> float:
    """Return FLOPs per token: 6 x matmul parameters + 12 x layers x d x T (PaLM, arXiv 2204.02311, appendix B).

    This counts the forward and backward pass. ``d`` is heads x head size and T the sequence length; if the widths of
    values and keys differ, d is their mean. Frozen parameters count 4 times instead of 6, because they have no
    gradient. ``causal`` halves the attention term, as in a causal kernel. Recomputation does not count.
    ``forward_only`` counts a forward pass: a third, or half of frozen parameters.
    """
    attention = 6 * config.n_layer * config.n_head * (config.head_size + config.value_size) * seq_length
    per_parameter = (2, 2) if forward_only else (4, 6)
    linear = sum(per_parameter[is_trained] * size for size, is_trained in _matmul_sizes(model))
    return linear + attention * (0.5 if causal else 1.0) / (3 if forward_only else 1)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's dense peak for the precision, in FLOP/s; None if unknown (a CPU, an unlisted GPU)."""
    if device.type != "cuda" or precision == "32-true":  # 32-true may or may not use TF32
        return None
    name = torch.cuda.get_device_name(device)
    # an instance's compute in slices of 7: "NVIDIA H200 MIG 3g.71gb", "... MIG 1c.3g.71gb" with 1 of its slices
    slices = re.search(r"\bMIG (\d)[cg]\.", name)
    gpu = gpu_of_driver(name)
    return gpu and gpu.peak * (int(slices[1]) / 7 if slices else 1.0)
