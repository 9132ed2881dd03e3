"""Matmuls of 16-bit factors with fp32 output, if the device supports them."""

import functools
import warnings

import torch
from torch import Tensor

from toolkit.errors import first_line
from toolkit.private_torch import has_no_data


def mm_out_fp32(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out = a @ b. If supported, 16-bit factors give an unrounded fp32 ``out``."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and _has_fp32_results(a):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(a @ b)


def addmm_fp32_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b with an fp32 total."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif not _has_fp32_results(a):
        total += a @ b
    elif has_no_data(total):  # addmm with out_dtype has no kernel for meta and fake tensors; mm allocates as little
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _has_fp32_results(a: Tensor) -> bool:
    return a.device.type == "cuda" and (has_no_data(a) or _check_fp32_results(a.device, a.dtype))


def matmul_dtype(x: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of matmuls of x in ``dtype``, by default its own: autocast's if it is enabled."""
    device = x.device.type
    # torch 2.11 compiles torch.amp.is_autocast_available only with a graph break
    is_autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_autocast else dtype or x.dtype


@functools.cache
def _check_fp32_results(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matmuls with ``out_dtype`` match matmuls of fp32 factors.

    Older versions of torch do not support accumulation into fp32. Syncs the device once per process.
    """
    generator = torch.Generator().manual_seed(0)
    a, b, start = (torch.randn(64, 64, generator=generator, dtype=torch.float32).to(device) for _ in range(3))
    a, b = a.to(dtype), b.to(dtype)
    out, total = torch.empty_like(start), start.clone()
    try:
        torch.mm(a, b.t(), out_dtype=torch.float32, out=out)
        torch.addmm(total, a.t(), b, out_dtype=torch.float32, out=total)
        torch.testing.assert_close(out, a.float() @ b.float().t(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(total, start + a.float().t() @ b.float(), rtol=1e-3, atol=1e-3)
    except Exception as error:  # the message depends on the version of torch
        warnings.warn(f"the head's products are rounded to 16 bits: {first_line(error)[:200]}", stacklevel=2)
        return False
    return True
