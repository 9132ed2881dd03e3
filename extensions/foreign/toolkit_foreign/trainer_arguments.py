"""Arguments of OpenLanguageModel's trainers, for :class:`toolkit.Trainer`."""

import re
from collections.abc import Callable
from typing import Any

from toolkit.config import FSDPArgs
from toolkit.config.dialects import Dialect
from toolkit.errors import UserError

_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "none", None: "none"}


def _rename(option: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {option: value}


def _convert(option: str, convert: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that converts the value. None: the option's default."""
    return lambda value: {} if (converted := convert(value)) is None else {option: converted}


def _accelerator(device: Any) -> str | None:
    """Convert "auto", a device type, or "cuda:N" to an accelerator. N must be the local rank."""
    from toolkit.distributed import script  # imports torch

    kind, _, index = re.sub(":auto$", "", str(device)).partition(":")
    if index and index != str(rank := script.get_local_rank()):
        raise UserError(f"device {device}: each process uses the device of its local rank ({rank}); use {kind}")
    return None if device is None else kind


DIALECT = Dialect(
    arguments={
        "context_length": _rename("train.max_seq_length"),
        "warmup_steps": _rename("train.lr_warmup_steps"),
        "weight_decay": _rename("optimizer.weight_decay"),
        "device": _convert("accelerator", _accelerator),
        "grad_clip_norm": _convert("train.max_norm", lambda norm: norm or 0),
        "use_amp": _convert("precision", lambda is_on: "auto" if is_on else "32-true"),  # auto: bf16-mixed on CUDA
        "mixed_precision_policy": _convert("precision", lambda policy: _PRECISIONS.get(policy, policy) or None),
        "auto_wrap_policy": _convert(
            "fsdp.auto_wrap", lambda policy: {"transformer": "block"}.get(policy, policy) or FSDPArgs.auto_wrap
        ),
        "transformer_layer_cls": _convert("block_classes", lambda cls: [cls]),
        "backward_prefetch": _convert("fsdp.backward_prefetch", lambda value: _PREFETCH.get(value, value)),
    }
)
