"""GPU specifications from data sheets, and the fractions of the peaks that training reaches."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import UserError


class Generation(NamedTuple):
    """What GPUs of a generation have in common: fractions of the peak that kernels reach in training.

    Args:
        products: Large matrix products.
        forward, backward: Fused attention with head size 128.
        flash: Speed of torch's FlashAttention 2 relative to fused attention. On Hopper and later, cuDNN is faster.
        masked: Speed of the attention kernel that supports masks, relative to fused attention.
        unaligned: 16-bit products of matrices whose rows are not aligned to 16 bytes, such as logits of an odd
            vocabulary.
        has_bf16: Whether the GPU supports bfloat16; otherwise its peak is for float16.
    """

    products: float
    forward: float
    backward: float
    flash: float = 1.0
    masked: float = 0.55
    unaligned: float = 0.4
    has_bf16: bool = True


GENERATIONS = {
    # Products: an H200 was measured at 769 to 798 TFLOP/s (8192 x 8192 x 8192, torch 2.11), an H100 at 798; under the
    # power that a training step draws, they reach about 0.72 of the peak. Attention: less than the 617 (cuDNN) and 362
    # TFLOP/s (FlashAttention 2) that were published for the forward pass on an H100, heads of 128, T = 2048. Unaligned
    # products: an H100 was measured at 118 TFLOP/s (4096 x 768 x 50257).
    "Hopper": Generation(0.72, 0.50, 0.40, flash=0.65, unaligned=0.12),
    # Unaligned products: nanoGPT's step on an A100 became 25 % faster with a vocabulary of 50304.
    "A100": Generation(0.82, 0.60, 0.50),
    # The peaks of Ada and GeForce are reached; the clocks vary.
    "Ada": Generation(0.85, 0.60, 0.50),
    # Before Ampere, torch has no FlashAttention 2 and uses the memory-efficient kernel, with and without masks. Its
    # forward pass on a T4: a kernel that reaches 0.66 of the peak was measured 1.95 times as fast (causal, heads of
    # 128, github.com/Dao-AILab/flash-attention/pull/2379). Assumed: the same ratio for the backward pass and on a V100.
    "Volta": Generation(0.85, 0.34, 0.28, masked=1.0, has_bf16=False),
}
"""Assumed rates. Hopper stands for Blackwell, too, Ada for the other GPUs since Ampere, and Volta for Turing."""


class GpuSpec(NamedTuple):
    """GPU specifications.

    From the vendor's data sheet (sparse figures halved, links per direction), except the memory, which the driver
    reports. The network is the vendor's reference: 8 x 400 Gb/s (DGX H100), 8 x 200 Gb/s (DGX A100), otherwise 100 Gb/s
    per node of 8.

    Args:
        peak: Dense bfloat16 tensor-core FLOP/s.
        fp8: Dense fp8 tensor-core FLOP/s, with fp32 accumulation; 0 without.
        fp32: FLOP/s in fp32 without TF32, which toolkit does not use.
        bandwidth: Memory bandwidth in bytes/s.
        memory: Memory in bytes.
        link: Bytes/s to the other GPUs of a node.
        link_name: NVLink or PCIe.
        network: Bytes/s per GPU between nodes.
        network_name: The network's name, for display.
        generation: What it has in common with others.
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
    generation: Generation

    @property
    def marketed_gb(self) -> int:
        """Memory in the product name. The driver reports slightly less, in GiB."""
        return next(size for size in (16, 24, 32, 40, 48, 80, 94, 96, 141, 180) if size * 2**30 >= self.memory)


def _read_table() -> dict[str, GpuSpec]:
    with (Path(__file__).parent / "gpus.csv").open() as file:
        rows: Iterable[dict[str, Any]] = csv.DictReader(file, quoting=csv.QUOTE_NONNUMERIC)
        return {row.pop("name"): GpuSpec(**row | {"generation": GENERATIONS[row["generation"]]}) for row in rows}


GPUS = _read_table()
"""GPUs by name. The first name found in ``torch.cuda.get_device_name()`` applies, so longer names come first."""


def find_gpu(name: str, accelerator: str = "cuda", option: str = "--speed") -> tuple[str, GpuSpec]:
    """Return the table name and specs of the GPU in ``option``, by its name as a user, vendor or driver writes it.

    Case, spaces, hyphens, NVIDIA, GeForce, RTX, SXM and the memory type are ignored. The memory size must match.
    """
    if accelerator in ("cpu", "mps"):
        raise UserError(f"{option} {name}: not supported with --accelerator {accelerator}; remove one of them")
    size = re.search(r"(\d+)\s*GB", name, re.I)
    matches = [gpu for gpu in GPUS if _key(gpu) == _key(name)]
    fitting = [gpu for gpu in matches if size is None or int(size[1]) == GPUS[gpu].marketed_gb]
    if fitting:
        best = max(fitting, key=lambda gpu: GPUS[gpu].memory)
        return best, GPUS[best]
    near = f"with other memory: {' or '.join(matches)}" if matches else f"known are {', '.join(GPUS)}"
    raise UserError(f"{option} {name}: unknown GPU; {near}")


def _key(name: str) -> str:
    """Return a name without vendor, form factor and memory: "NVIDIA A100-SXM4-80GB" is "a100"."""
    words = r"nvidia|tesla|geforce|rtx|sxm\d?|hbm\d?e?|\d+\s*gb\b|[\s_-]"
    return re.sub(words, "", name.lower())


def gpu_of_driver(name: str) -> GpuSpec | None:
    """Return the specs of the GPU that the driver calls ``name``; None if it is not in the table."""
    # laptops have other GPUs of the same names
    return next((gpu for known, gpu in GPUS.items() if re.search(rf"\b{known}\b(?! Laptop)", name, re.I)), None)
