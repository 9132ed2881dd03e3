"""Activation checkpointing: save few activations per block and recompute the others in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from toolkit.config import ActivationCheckpointing

_ATTENTION = ("aten::_scaled_dot_product_", "toolkit::flash_attention", "flex_attention", "torch_attn::_varlen_attn",
              "toolkit::gated_delta_rule")  # fmt: skip
"""Name prefixes of attention kernels: ``scaled_dot_product_attention`` on all devices, kernels that a user-provided
module may use, models/attention_kernels.py and models/gated_delta.py.
"""
_WEIGHT_ARGUMENT = {
    "aten::mm": 1, "aten::addmm": 2, "aten::linear": 1, "aten::_scaled_mm": 1, "toolkit::grouped_product": 1,
    "bitsandbytes::gemm_4bit": 2,
}  # fmt: skip
"""Maps each matmul op of a linear layer to the argument index of the weight or its shape."""
_THIN = 16


def checkpoint_blocks(
    module: nn.Module, blocks: tuple[type[nn.Module], ...], mode: ActivationCheckpointing, **options: Any
) -> None:
    """Checkpoint the blocks in place. Classes and parameter names do not change.

    "full" saves the inputs of each block (Chen et al. 2016, arXiv 1604.06174). "selective" also saves the outputs of
    attention and every second matmul, which are the slowest to recompute. Gradients are bit-identical to training
    without checkpointing: recomputation runs the same operations with the same RNG state. Without grad mode, nothing
    changes.

    Call this before compiling and sharding. Then a graph holds a complete block, and FSDP's hooks are not recomputed.

    Args:
        module: Model that contains the blocks.
        blocks: Module classes to checkpoint. Their forward must be repeatable.
        mode: "none" also removes checkpointing that an earlier call added.
        options: Further arguments of ``torch.utils.checkpoint.checkpoint``.
    """
    if mode == "selective":
        options.setdefault("context_fn", selective_contexts)
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


def selective_contexts() -> Any:
    """Return the contexts of one forward pass and its recomputation, for "selective".

    Every second matmul is saved, as in torchtitan, but starting with the second. This skips the last matmul of a gated
    MLP, whose output the backward pass does not need.
    """
    counts = {False: 0, True: 0}  # keys: forward, recomputation (torch before 2.12 calls the policy again)

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
    """Whether "selective" counts a matmul with a weight of this shape.

    Adapters and routers have thin weights; recomputing their matmuls is cheap.
    """
    return _THIN * min(rows, columns) > max(rows, columns)
