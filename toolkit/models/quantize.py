"""QLoRA's base: the linear layers of the blocks in 4 bits; embedding, norms, head and adapters stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.models.lora import LoRALinear

if TYPE_CHECKING:
    from toolkit.models.config import ModelConfig
    from toolkit.models.gpt import GPT

BLOCK = 64  # weights with a common scale

Quantize = Literal["bnb.nf4", "bnb.nf4-dq"]


def refuse_experts(config: ModelConfig, kind: Quantize) -> None:
    """Raise a UserError where most weights are not linear layers, which are all that bitsandbytes takes."""
    if config.n_moe_layer:
        raise UserError(
            f"--quantize {kind}: the weights of this model's experts cannot be quantised; run without --quantize"
        )


def quantize_linears(
    model: GPT,
    kind: Quantize,
    weight_of: Callable[[str], torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Replace the linear layers of the blocks, with adapters or without, by layers that hold their weight in 4 bits.

    One layer after the other, so that no second copy of the model exists. Biases, adapters and whatever else is in the
    model keep their device (the meta device, too).

    Args:
        model: In place.
        kind: "bnb.nf4": 4-bit NormalFloat with an fp32 scale for every 64 weights, 4.5 bits each; "bnb.nf4-dq": the
            scales are quantised as well, about 4.13 bits.
        weight_of: Gives the weight of a name, such as ``transformer.h.0.attn.qkv.weight``, in the checkpoint's type,
            so that nothing is rounded twice; the layers' own when not given.
        device: Where the quantised weights go.

    Raises:
        UserError: bitsandbytes is not installed, or the model has layers that it computes wrongly.
    """
    refuse_experts(model.config, kind)
    # it says at import that an optional download of faster CPU kernels is not there
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from toolkit.models.linear_4bit import Linear4bit, LoRALinear4bit
    except ImportError as error:
        raise UserError(f"--quantize {kind}: needs bitsandbytes; run: pip install 'bitsandbytes>=0.48'") from error

    for name, layer in list(model.transformer.h.named_modules(prefix="transformer.h")):
        if not isinstance(layer, nn.Linear):
            continue
        if layer.in_features % BLOCK:
            # bitsandbytes (0.50) makes blocks that run on from row to row, but its CPU kernels begin anew in each row
            raise UserError(
                f"--quantize {kind}: {name} takes {layer.in_features} inputs, not a multiple of {BLOCK}, which "
                "bitsandbytes does not compute rightly everywhere; train without --quantize"
            )
        has_adapters = isinstance(layer, LoRALinear)
        new = (LoRALinear4bit if has_adapters else Linear4bit)(
            layer.in_features, layer.out_features, bias=False, device="meta"
        )
        new.take_weight(
            layer.weight if weight_of is None else weight_of(f"{name}.weight"), kind == "bnb.nf4-dq", device
        )
        new.bias = layer.bias
        if has_adapters:
            new.take_adapters(layer)
        new.train(layer.training)
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, new)
