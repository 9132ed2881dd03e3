"""Dtypes of FSDP units. Does not import Lightning, which is slow to import."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision

from toolkit.config import Dtype, FSDPArgs, Precision
from toolkit.distributed.device import DTYPES


def unit_precision(options: FSDPArgs, precision: Precision) -> tuple[MixedPrecision | None, MixedPrecision | None]:
    """Return the dtypes of the block units and of the root unit; None where the model's dtypes are kept.

    Inputs are not cast: the residual stream keeps the same dtype as on one device.
    """
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    given = (options.param_dtype, options.reduce_dtype, options.buffer_dtype)
    if mixed is None and set(given) == {"auto"}:
        return None, None
    default = None if mixed is None else torch.float32

    def dtype(name: Dtype, otherwise: torch.dtype | None) -> torch.dtype | None:
        return otherwise if name == "auto" else DTYPES[name]

    rest: dict[str, Any] = {
        "reduce_dtype": dtype(options.reduce_dtype, default),
        "buffer_dtype": dtype(options.buffer_dtype, default),
        "cast_forward_inputs": False,
        "cast_root_forward_inputs": False,
    }
    return MixedPrecision(param_dtype=dtype(options.param_dtype, mixed), **rest), MixedPrecision(**rest)
