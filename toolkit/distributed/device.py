"""Where to compute, and in which precision. Without Lightning, whose import takes longer than torch's."""

from __future__ import annotations

import torch

from toolkit.args import Accelerator, Precision
from toolkit.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes by the names that options have for them."""


def pick_accelerator(accelerator: Accelerator) -> str:
    """Return "cpu", "cuda" or "mps".

    Raises:
        UserError: the accelerator that was asked for is not there.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        return next(name for name, there in available.items() if there)
    if not available[accelerator]:
        there = " or ".join(name for name, is_there in available.items() if is_there)
        raise UserError(f"--accelerator {accelerator}: no such device on this machine; use {there} or auto")
    return accelerator


def pick_precision(precision: Precision | None, accelerator: str, on_cuda: Precision = "bf16-mixed") -> Precision:
    """Return the precision to run with: what was asked for, else ``on_cuda`` on CUDA and 32-true elsewhere.

    Where CUDA has no bfloat16 that is 16-mixed.

    Raises:
        UserError: the device cannot do it.
    """
    bf16_cuda = accelerator == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision is None:
        return on_cuda if bf16_cuda else "16-mixed" if accelerator == "cuda" else "32-true"
    if precision == "16-mixed" and accelerator != "cuda":
        raise UserError(f"--precision 16-mixed: needs a CUDA device, and this run is on {accelerator}; use bf16-mixed")
    if precision.startswith("bf16") and accelerator == "cuda" and not bf16_cuda:
        raise UserError(f"--precision {precision}: this CUDA device has no bfloat16; use 16-mixed or 32-true")
    return precision


def count_devices(accelerator: str) -> int | None:
    """Return the number of devices of this machine; None for the CPU, which any number of processes can share."""
    return {"cuda": torch.cuda.device_count(), "mps": 1}.get(accelerator)
