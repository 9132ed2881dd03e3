"""Activation checkpointing: save few activations of a block and recompute the others in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from toolkit.config import ActivationCheckpointing

_ATTENTION = ("aten::_scaled_dot_product_", "toolkit::flash_attention", "flex_attention", "torch_attn::_varlen_attn")
"""Beginnings of the names of attention kernels: of ``scaled_dot_product_attention`` on all devices, of
models/attention_kernels.py, and others that the blocks of a user-provided module may use."""
_WEIGHT_ARGUMENT = {
    "aten::mm": 1, "aten::addmm": 2, "aten::linear": 1, "toolkit::grouped_product": 1, "bitsandbytes::gemm_4bit": 2,
}  # fmt: skip
"""Matrix products of linear layers, and the position of the weight, or of its shape, among their arguments."""
_THIN = 16


def checkpoint_blocks(module: nn.Module, blocks: tuple[type[nn.Module], ...], mode: ActivationCheckpointing) -> None:
    """Checkpoint the blocks in place: their class and the names of their parameters stay as they are.

    "full" keeps the inputs of each block (Chen et al. 2016, arXiv 1604.06174). "selective" also keeps the outputs of
    attention and of every second matrix product, which take most of the time to recompute. Gradients are bit-equal to
    those without, because the same operations run again, with the same random numbers. Nothing changes where no
    gradients are recorded.

    Checkpoint before compiling and before sharding: then a graph holds a complete block, and FSDP's hooks are outside
    of what is recomputed.

    Args:
        module: Its submodules of the classes ``blocks`` are checkpointed.
        blocks: Classes of modules whose forward computes the same when called again.
        mode: "none" also undoes the mode of an earlier call.
    """
    options: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
    for part in module.modules():
        if not isinstance(part, blocks):
            continue
        plain = part.forward
        if isinstance(plain, partial) and plain.func is _forward:
            part.forward = plain = plain.args[0]
        if mode != "none":
            checkpointed = partial(checkpoint, plain, use_reentrant=False, **options)
            part.forward = partial(_forward, plain, checkpointed)


def _forward(plain: Callable[..., Any], checkpointed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (checkpointed if torch.is_grad_enabled() else plain)(*args, **kwargs)


def _selective_contexts() -> Any:
    """Return the contexts of one forward pass and its recomputation.

    Every second matrix product is kept, as in torchtitan, but beginning with the second one: of a block with a gated
    MLP the last product is then not kept, whose output the backward pass does not need.
    """
    counts = {False: 0, True: 0}  # in the forward pass; in the recomputation, where torch (before 2.12) asks again

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name()
        is_kept = name.startswith(_ATTENTION)
        if name in _WEIGHT_ARGUMENT:
            weight = args[_WEIGHT_ARGUMENT[name]]
            if is_counted(*getattr(weight, "shape", weight)[-2:]):
                counts[context.is_recompute] += 1
                is_kept = counts[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def is_counted(rows: int, columns: int) -> bool:
    """Whether a product with a weight of this shape counts in "selective".

    The products of adapters and routers, with thin weights, take little time.
    """
    return _THIN * min(rows, columns) > max(rows, columns)
