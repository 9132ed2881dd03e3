"""N8: tokens per second, FLOPs and memory, computed from what ran over stated formulas."""

from __future__ import annotations

import re
import sys

import torch
from torch import nn

from toolkit.models.config import ModelConfig
from toolkit.models.lora import is_adapter
from toolkit.models.moe import StackedLinear

PEAK_FLOPS_BF16 = {
    # Dense bfloat16 tensor-core peaks from the makers' data sheets (sparse figures halved). The first name that is
    # part of torch.cuda.get_device_name() counts, so that the longer names stand first.
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
    """Count the weights that take part in a matrix product for every token: linear layers, the head among them.

    A tied head counts once, as the head; an embedding that is only looked up does not count. Of experts those count
    that one token goes through.
    """
    return sum(size for size, _ in _matmul_sizes(model))


def _matmul_sizes(model: nn.Module) -> list[tuple[int, bool]]:
    """Elements per token of each weight, and whether it is trained."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    weights += [p for name, p in model.named_parameters() if is_adapter(name) and p.ndim == 2]
    stacks = [m for m in model.modules() if isinstance(m, StackedLinear)]
    sizes = [(weight.numel(), weight.requires_grad) for weight in weights]
    return sizes + [(m.weight.numel() * m.active // m.weight.size(0), m.weight.requires_grad) for m in stacks]


def flops_per_token(model: nn.Module, config: ModelConfig, seq_length: int, *, causal: bool = False) -> float:
    """FLOPs of forward and backward per token: 6 x matmul parameters + 12 x layers x d x T (PaLM, arXiv 2204.02311, B).

    ``d`` is heads x head size and T the sequence length; where values have another width than keys, d is the mean of
    the two. Frozen parameters count 4 times instead of 6: their own
    gradient is not computed. ``causal`` counts half of the attention term, which is what a causal kernel has to do.
    """
    attention = 6 * config.n_layer * config.n_head * (config.head_size + config.value_size) * seq_length
    linear = sum((6 if is_trained else 4) * size for size, is_trained in _matmul_sizes(model))
    return linear + attention * (0.5 if causal else 1.0)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's dense peak for the precision, in FLOP/s; None where it is not known (a CPU, an unknown GPU)."""
    if device.type != "cuda" or precision == "32-true":  # 32-true may or may not use TF32: no honest single peak
        return None
    name = torch.cuda.get_device_name(device)
    peaks = (peak for known, peak in PEAK_FLOPS_BF16.items() if re.search(rf"\b{known}\b", name, re.I))
    return next((peak * mig_share(name) for peak in peaks), None)


def mig_share(device_name: str) -> float:
    """The share of a GPU's compute that a MIG instance has: so many of 7 slices; 1 of a GPU that is not divided.

    Named "NVIDIA H200 MIG 3g.71gb", or "... MIG 1c.3g.71gb" where a compute instance has 1 of its slices.
    """
    slices = re.search(r"\bMIG (\d)[cg]\.", device_name)
    return int(slices[1]) / 7 if slices else 1.0


def peak_memory_gb(device: torch.device) -> float:
    """The most memory held so far, in GB (1e9 bytes): the allocator's on CUDA, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


class Throughput:
    """Counts tokens and the seconds spent on training steps since the last reading.

    Validation, saving and logging are not part of it: only what :meth:`add` is told.
    """

    def __init__(self, flops_per_token: float | None, peak_flops: float | None) -> None:
        """``peak_flops``: of all devices together, in FLOP/s."""
        self._flops_per_token, self._peak = flops_per_token, peak_flops
        self._tokens, self._seconds = 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds

    def read(self) -> dict[str, float]:
        """Return tokens_per_sec, and mfu where the peak is known; start counting anew."""
        rate = self._tokens / self._seconds if self._seconds else float("nan")
        self._tokens, self._seconds = 0, 0.0
        values = {"tokens_per_sec": rate}
        if self._peak is not None and self._flops_per_token is not None:
            values["mfu"] = self._flops_per_token * rate / self._peak
        return values
