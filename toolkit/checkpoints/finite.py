"""N7 finite-or-stop, of what is written: weights without NaN or Inf."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SHOWN = 5


def nonfinite_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that contain NaN or Inf, after one pass over them on their own device."""
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not floats:
        return []
    norms = torch._foreach_norm([t.detach() for t in floats.values()])  # the fastest pass that NaN and Inf survive
    finite = torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().tolist()
    suspects = [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]
    return [name for name in suspects if not floats[name].isfinite().all()]  # a norm can overflow, too


def shown(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def nonfinite_warning(names: list[str], folder: object) -> str:
    """One line about the tensors with NaN or Inf in a folder that a conversion has written."""
    return f"warning: NaN or Inf in {len(names)} tensor(s) of {folder}: {shown(names)}"
