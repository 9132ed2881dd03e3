"""GPU specifications from data sheets, and the fractions of the peaks that training reaches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from toolkit.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch


class KernelRates(NamedTuple):
    """Fractions of a GPU's peak that kernels reach in training.

    Args:
        products: Large matrix products.
        forward, backward: Fused attention with head size 128.
        flash: Speed of torch's FlashAttention 2 relative to fused attention. On Hopper and later, cuDNN is faster.
        masked: Speed of the attention kernel that supports masks, relative to fused attention.
        unaligned: 16-bit products of matrices whose rows are not aligned to 16 bytes, such as logits of an odd
            vocabulary.
    """

    products: float
    forward: float
    backward: float
    flash: float = 1.0
    masked: float = 0.55
    unaligned: float = 0.4


class GpuSpec(NamedTuple):
    """GPU specifications.

    From the vendor's data sheet (sparse figures halved, links per direction), except the memory, which the driver
    reports, and the kernel rates, which are assumptions.

    Args:
        peak: Dense bfloat16 tensor-core FLOP/s.
        fp8: Dense fp8 tensor-core FLOP/s, with fp32 accumulation; 0 without.
        fp32: FLOP/s in fp32 without TF32, which toolkit does not use.
        bandwidth: Memory bandwidth in bytes/s.
        memory: Memory in bytes.
        link: Bytes/s to the other GPUs of a node.
        link_name: NVLink or PCIe.
        network: Bytes/s per GPU between nodes, in the vendor's reference node.
        network_name: The network's name, for display.
        kernels: The fractions of the peak that kernels reach.
        has_bf16: Whether the GPU supports bfloat16; otherwise ``peak`` is for float16.
    """

    peak: float
    fp8: float
    fp32: float
    bandwidth: float
    memory: float
    link: float
    link_name: str
    network: float
    network_name: str
    kernels: KernelRates
    has_bf16: bool = True

    @property
    def marketed_gb(self) -> int:
        """Memory in the product name. The driver reports slightly less, in GiB."""
        return next(size for size in (16, 24, 32, 40, 48, 80, 94, 96, 141, 180) if size * 2**30 >= self.memory)


# Products: an H200 was measured at 769 to 798 TFLOP/s (8192 x 8192 x 8192, torch 2.11), an H100 at 798; under the power
# that a training step draws, they reach about 0.72 of the peak. A100: 0.82, Ada and GeForce 0.85 (their peaks are
# reached, the clocks vary). Attention: less than the 617 (cuDNN) and 362 TFLOP/s (FlashAttention 2) that were published
# for the forward pass on an H100, heads of 128, T = 2048.
# Unaligned products: an H100 was measured at 118 TFLOP/s (4096 x 768 x 50257). Others: nanoGPT's step on an A100, which
# became 25 % faster with a vocabulary of 50304.
# The network: 8 x 400 Gb/s (DGX H100), 8 x 200 Gb/s (DGX A100), otherwise 100 Gb/s per node of 8.
_HOPPER = KernelRates(0.72, 0.50, 0.40, flash=0.65, unaligned=0.12)
_AMPERE = KernelRates(0.82, 0.60, 0.50)
_OTHERS = KernelRates(0.85, 0.60, 0.50)
# Before Ampere, torch has no FlashAttention 2 and uses the memory-efficient kernel, with and without masks. Its
# forward pass on a T4: a kernel that reaches 0.66 of the peak was measured 1.95 times as fast (causal, heads of 128,
# github.com/Dao-AILab/flash-attention/pull/2379). Assumed: the same ratio for the backward pass and for a V100.
_NO_FLASH = KernelRates(0.85, 0.34, 0.28, masked=1.0)
_NDR, _HDR = (50e9, "400 Gb/s InfiniBand per GPU"), (25e9, "200 Gb/s InfiniBand per GPU")
_ETHERNET = (12.5e9 / 8, "100 Gb/s Ethernet per node of 8")
_PCIE4, _PCIE5 = (32e9, "PCIe 4.0"), (64e9, "PCIe 5.0")

GPUS = {
    # The first name found in torch.cuda.get_device_name() applies, so longer names come first.
    "H200 NVL": GpuSpec(835e12, 1671e12, 60e12, 4.8e12, 150.1e9, *_PCIE5, *_HDR, _HOPPER),
    "H200": GpuSpec(989e12, 1979e12, 67e12, 4.8e12, 150.1e9, 450e9, "NVLink", *_NDR, _HOPPER),
    "H100 PCIe": GpuSpec(756e12, 1513e12, 51e12, 2.0e12, 85.0e9, *_PCIE5, *_HDR, _HOPPER),
    "H100 NVL": GpuSpec(835e12, 1671e12, 60e12, 3.9e12, 100.0e9, *_PCIE5, *_HDR, _HOPPER),
    "H100": GpuSpec(989e12, 1979e12, 67e12, 3.35e12, 85.0e9, 450e9, "NVLink", *_NDR, _HOPPER),
    "GH200": GpuSpec(989e12, 1979e12, 67e12, 4.0e12, 101.5e9, 450e9, "NVLink", *_NDR, _HOPPER),
    "B200": GpuSpec(2250e12, 4500e12, 75e12, 8.0e12, 191.5e9, 900e9, "NVLink", *_NDR, _HOPPER),
    "A100-SXM4-40GB": GpuSpec(312e12, 0, 19.5e12, 1.555e12, 42.3e9, 300e9, "NVLink", *_HDR, _AMPERE),
    "A100": GpuSpec(312e12, 0, 19.5e12, 2.039e12, 85.0e9, 300e9, "NVLink", *_HDR, _AMPERE),
    "A10G": GpuSpec(70e12, 0, 35e12, 0.6e12, 23.7e9, *_PCIE4, *_ETHERNET, _OTHERS),
    "A10": GpuSpec(125e12, 0, 31e12, 0.6e12, 23.7e9, *_PCIE4, *_ETHERNET, _OTHERS),
    "L40S": GpuSpec(362e12, 733e12, 91.6e12, 0.864e12, 47.7e9, *_PCIE4, *_ETHERNET, _OTHERS),
    "L4": GpuSpec(121e12, 242e12, 30e12, 0.3e12, 23.7e9, *_PCIE4, *_ETHERNET, _OTHERS),
    "RTX 5090": GpuSpec(209e12, 419e12, 105e12, 1.792e12, 33.7e9, *_PCIE5, *_ETHERNET, _OTHERS),
    "RTX 4090": GpuSpec(165e12, 330e12, 82.6e12, 1.008e12, 25.4e9, *_PCIE4, *_ETHERNET, _OTHERS),
    "RTX 3090": GpuSpec(71e12, 0, 35.6e12, 0.936e12, 25.4e9, *_PCIE4, *_ETHERNET, _OTHERS),
    "RTX A6000": GpuSpec(155e12, 0, 38.7e12, 0.768e12, 51.0e9, *_PCIE4, *_ETHERNET, _OTHERS),
    "V100": GpuSpec(125e12, 0, 15.7e12, 0.9e12, 34.1e9, 150e9, "NVLink", *_ETHERNET, _NO_FLASH, has_bf16=False),
    "T4": GpuSpec(65e12, 0, 8.1e12, 0.3e12, 15.6e9, 16e9, "PCIe 3.0", *_ETHERNET, _NO_FLASH, has_bf16=False),
}


def find_gpu(name: str, accelerator: str = "cuda") -> tuple[str, GpuSpec]:
    """Return the table name and specs of a GPU, given its name as a user, vendor or driver writes it.

    Case, spaces, hyphens, NVIDIA, GeForce, RTX, SXM and the memory type are ignored. The memory size must match.
    """
    if accelerator in ("cpu", "mps"):
        raise UserError(f"--speed {name}: not supported with --accelerator {accelerator}; remove one of them")
    size = re.search(r"(\d+)\s*GB", name, re.I)
    matches = [gpu for gpu in GPUS if _key(gpu) == _key(name)]
    # the driver reports up to 7 % more (in 1e9 bytes) or 2 % less than the name says
    fitting = [k for k in matches if size is None or abs(GPUS[k].memory / 1e9 / int(size[1]) - 1) < 0.1]
    if fitting:
        best = max(fitting, key=lambda gpu: GPUS[gpu].memory)
        return best, GPUS[best]
    near = did_you_mean(_key(name).replace("pcie", ""), GPUS, normalize=_key)
    near = f"; with other memory: {' or '.join(matches)}" if matches else near
    raise UserError(f"--speed {name}: unknown GPU{near}; known: {', '.join(GPUS)}")


def _key(name: str) -> str:
    """Return a name without vendor, form factor and memory: "NVIDIA A100-SXM4-80GB" is "a100"."""
    words = r"nvidia|tesla|geforce|rtx|sxm\d?|hbm\d?e?|\d+\s*gb\b|[\s_-]"
    return re.sub(words, "", name.lower())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's dense peak for the precision, in FLOP/s; None if unknown (a CPU, an unlisted GPU)."""
    if device.type != "cuda" or precision == "32-true":  # 32-true may or may not use TF32
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    gpu = gpu_of_driver(name)
    return None if gpu is None else gpu.peak * mig_fraction(name)


def gpu_of_driver(name: str) -> GpuSpec | None:
    """Return the specs of the GPU that the driver calls ``name``; None if it is not in the table."""
    # laptops have other GPUs of the same names
    return next((gpu for known, gpu in GPUS.items() if re.search(rf"\b{known}\b(?! Laptop)", name, re.I)), None)


def mig_fraction(device_name: str) -> float:
    """Return a MIG instance's fraction of the GPU's compute, in slices of 7; 1 without MIG.

    Names are "NVIDIA H200 MIG 3g.71gb", or "... MIG 1c.3g.71gb" for a compute instance with 1 of the slices.
    """
    slices = re.search(r"\bMIG (\d)[cg]\.", device_name)
    return int(slices[1]) / 7 if slices else 1.0
