"""Selection of accelerator, precision and kernels. Does not import Lightning, which is slow to import."""

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from toolkit import private_torch
from toolkit.config import AUTO, Accelerator, Auto, Precision
from toolkit.distributed.cpu_memory import memory_limit
from toolkit.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch dtypes by option value."""

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Workspace sizes with which cuBLAS is deterministic; see its documentation on reproducibility."""


def pick_accelerator(accelerator: Accelerator) -> str:
    """Return "cpu", "cuda" or "mps"."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        return next(name for name, is_available in available.items() if is_available)
    if not available[accelerator]:
        choices = " or ".join(name for name, is_available in available.items() if is_available)
        raise UserError(f"--accelerator {accelerator}: no such device on this machine; use {choices} or auto")
    return accelerator


def device_memory(accelerator: str) -> float:
    """Return the accelerator's memory in bytes; infinity if unknown.

    For the CPU: RAM plus swap, or the limit of this process, as of a container, if that is less.
    """
    if accelerator == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    with suppress(OSError):
        if accelerator == "cpu":
            lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            total = sum(int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal")) * 1024
            return min(total, memory_limit())
    return math.inf


def precision_hint(accelerator: str, precision: str) -> str | None:
    """Return a line that suggests bf16-mixed if it would be much faster on this CPU; otherwise None."""
    if (accelerator, precision) != ("cpu", "32-true") or not private_torch.has_fast_bf16():
        return None
    return "faster on this CPU (AMX), but with other numbers: --precision bf16-mixed"


def pick_precision(
    precision: Precision | Auto, accelerator: str, on_cuda: Precision = "bf16-mixed", has_bf16: bool | None = None
) -> Precision:
    """Resolve ``precision`` and raise UserError if the accelerator does not support it.

    auto is ``on_cuda`` on CUDA GPUs with bfloat16, 16-mixed on other CUDA GPUs, and 32-true elsewhere. ``has_bf16``
    says whether the GPU supports bfloat16; None queries this machine's GPU.
    """
    if has_bf16 is None:
        has_bf16 = accelerator == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == AUTO:
        return "32-true" if accelerator != "cuda" else on_cuda if has_bf16 else "16-mixed"
    if precision == "16-mixed" and accelerator != "cuda":
        raise UserError(f"--precision 16-mixed: needs a CUDA device, and this run is on {accelerator}; use bf16-mixed")
    if precision.startswith("bf16") and accelerator == "cuda" and not has_bf16:
        raise UserError(f"--precision {precision}: this GPU has no bfloat16; use auto, 16-mixed or 32-true")
    return precision


def choose_attention_kernels(*, fixed_shapes: bool, has_masks: bool) -> None:
    """Enable or disable cuDNN attention on CUDA in this process.

    torch 2.11 and later prefer cuDNN's kernels on Hopper, where they are the fastest. Each new shape compiles a kernel,
    which takes up to a second. With masks, gradients may be NaN (pytorch 196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(fixed_shapes and not has_masks)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN attention in the block, for shapes that vary. See :func:`choose_attention_kernels`."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def fp32_reductions() -> Iterator[None]:
    """Accumulate 16-bit matrix products in fp32 on CUDA (N2).

    By default cuBLAS may round partial sums to 16 bits, and it splits the inner dimension by the micro-batch size.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use only deterministic algorithms in the block, if ``enabled``. Enter it before the first matrix product."""
    if not enabled:
        yield
        return
    workspace = os.environ.setdefault(CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if workspace not in DETERMINISTIC_WORKSPACES:
        raise UserError(
            f"--deterministic true: needs {CUBLAS_WORKSPACE} {' or '.join(DETERMINISTIC_WORKSPACES)}, not "
            f"{workspace}; unset it"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    benchmark, cudnn.benchmark = cudnn.benchmark, False  # it selects kernels by timing
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        match = re.match(r"(\S+) does not have a deterministic implementation", str(error))
        if match is None:
            raise
        raise UserError(
            f"--deterministic true: {match[1]} has no deterministic implementation on this device; drop --deterministic"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark = benchmark


def count_devices(accelerator: str) -> int | None:
    """Return the number of devices on this machine; None for the CPU, which any number of processes can share."""
    return {"cuda": torch.cuda.device_count(), "mps": 1}.get(accelerator)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's dense peak for the precision, in FLOP/s; None if unknown (a CPU, an unlisted GPU)."""
    if device.type != "cuda" or precision == "32-true":  # 32-true may or may not use TF32
        return None
    from toolkit.distributed.gpus import gpu_of_driver

    name = torch.cuda.get_device_name(device)
    # an instance's compute in slices of 7: "NVIDIA H200 MIG 3g.71gb", "... MIG 1c.3g.71gb" with 1 of its slices
    slices = re.search(r"\bMIG (\d)[cg]\.", name)
    gpu = gpu_of_driver(name)
    return gpu and gpu.peak * (int(slices[1]) / 7 if slices else 1.0)


def can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether torch's fused optimizers support the devices of these parameters."""
    return all(p.device.type in ("cuda", "cpu", "mps") for p in parameters)
