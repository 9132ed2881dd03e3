"""Optimizer steps that clip and check the gradient on the device, before the host knows its norm.

torch's fused Adam and AdamW divide gradients by ``grad_scale``, and leave weights, moments and step counters alone
where ``found_inf`` is set, as ``torch.amp.GradScaler`` uses them. So clipping takes no pass over the gradients, and the
host reads norm and loss while the update runs. :func:`clip_gradients` divides in the same way: a callback that looks at
the gradients changes no update of fp32 weights. Not tried on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch.optim import Adam, AdamW

from toolkit.distributed.fabric import knows_gradient_norm
from toolkit.training.bf16_optimizer import BF16Optimizer


def can_guard(fabric: Fabric, optimizer: Any) -> bool:
    """Whether :func:`guarded_step` supports Fabric's ``optimizer``; a subclass of Adam may not."""
    inner = optimizer.optimizer
    if type(inner) not in (Adam, AdamW) or not knows_norm_first(fabric):
        return False
    is_fused = all(group["fused"] for group in inner.param_groups) and fabric.device.type in ("cpu", "cuda")
    # of offloaded weights the update runs on the CPU, which would have to wait for the norm
    return is_fused and all(p.device == fabric.device for group in inner.param_groups for p in group["params"])


def knows_norm_first(fabric: Fabric) -> bool:
    """Whether the norm is known before clipping: not with a GradScaler, nor with strategies of extensions."""
    return getattr(fabric.strategy.precision, "scaler", None) is None and knows_gradient_norm(fabric)


def clip_gradients(optimizer: Any, norm: torch.Tensor, max_norm: float | None) -> None:
    """Clip the gradients of Fabric's ``optimizer``, in place or in its next step; arguments as of
    :func:`guarded_step`."""
    if not max_norm:
        return
    divisor = _divisor(norm, max_norm)
    if isinstance(optimizer.optimizer, BF16Optimizer) and optimizer.optimizer.has_masters:
        optimizer.optimizer.divisor = divisor  # gradients may be bf16, which dividing would round again
        return
    by_device: dict[torch.device, list[torch.Tensor]] = {}  # offloaded gradients are in CPU memory
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(parameter.grad)
    for device, gradients in by_device.items():
        torch._foreach_div_(gradients, divisor.to(device))


def _divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def guarded_step(optimizer: Any, checked: torch.Tensor, norm: torch.Tensor, max_norm: float | None) -> None:
    """Update the weights by the clipped gradients, or change nothing if one of ``checked`` is not finite.

    Args:
        optimizer: Fabric's.
        checked: fp32, the same on every rank.
        norm: Of the gradient, an fp32 scalar.
        max_norm: Clip the norm to this; None or 0 does not clip.
    """
    inner = optimizer.optimizer
    inner.found_inf = 1.0 - checked.isfinite().all().float()
    inner.grad_scale = _divisor(norm, max_norm) if max_norm else None
    try:
        optimizer.step()
    finally:
        del inner.found_inf, inner.grad_scale
