"""Compute the linear layers of the blocks in fp8 with torchao. Weights, gradients and checkpoints keep their dtypes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from toolkit.errors import join_first, require_option, require_package
from toolkit.models.gpt import GPT
from toolkit.models.mixed_mm import matmul_dtype
from toolkit.private_torch import inner_shard

SIZE_MULTIPLE = 16  # of both sizes of a matrix, for torch's fp8 products


def fp8_layers(model: GPT) -> dict[str, bool]:
    """Return the linear layers of the blocks by name, without routers (a subclass), and whether fp8 supports each."""
    layers = model.transformer.h.named_modules(prefix="transformer.h")
    return {
        name: layer.in_features % SIZE_MULTIPLE == layer.out_features % SIZE_MULTIPLE == 0
        for name, layer in layers
        if type(layer) is nn.Linear
    }


def describe_fp8(model: GPT, kind: str, device: str) -> str:
    """Return the number of fp8 layers, and which layers of the blocks stay in bf16, as one line."""
    layers, how = (
        fp8_layers(model),
        "emulated on a CPU: slow" if device == "cpu" else "MFU is relative to the bf16 peak",
    )
    others = [name for name, fits in layers.items() if not fits] + ["experts"] * bool(model.config.n_moe_layer)
    rest = f"; in bf16: {join_first(others)}" if others else ""
    return f"fp8: {kind} in {sum(layers.values())} of {len(layers)} linear layers of the blocks{rest}; {how}"


def require_fp8(kind: str, device: str, checks_gpu: bool = True) -> None:
    """Raise UserError if torchao is not installed or this machine's device has no fp8. A CPU emulates it."""
    require_package(f"--train.fp8 {kind}", "torchao", "0.18")
    checks_gpu = checks_gpu and device == "cuda" and torch.cuda.is_available()
    is_older = checks_gpu and torch.cuda.get_device_capability() < (8, 9)
    hint = "needs a GPU of compute capability 8.9 or higher (Ada, Hopper) or a CPU, which emulates it; use none"
    require_option(device != "mps" and not is_older, "train.fp8", kind, hint)


def hide_torchao_warnings() -> None:
    """Hide what torchao logs when it is imported: missing C++ extensions, a deprecated registration."""
    for logger in ("torchao", "torch.utils._pytree"):
        logging.getLogger(logger).setLevel(logging.ERROR)


def convert_to_fp8(model: GPT, kind: str, device: str, pads_tokens: bool = False) -> None:
    """Replace the linear layers of the blocks in place. Names and weights do not change.

    Args:
        model: The model, which may be on the meta device.
        kind: torchao's recipe.
        device: "cpu" emulates fp8 products in fp32.
        pads_tokens: Whether the tokens of a micro-batch may not be a multiple of 16.
    """
    names = [name for name, fits in fp8_layers(model).items() if fits]
    hint = f"no layer has sizes that are multiples of {SIZE_MULTIPLE}; use none"
    require_option(bool(names), "train.fp8", kind, hint)
    hide_torchao_warnings()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(kind)
    config = replace(config, emulate=device == "cpu", pad_inner_dim=pads_tokens)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
    for name in names if device == "cpu" else ():
        model.get_submodule(name).register_forward_pre_hook(_autocast_on_cpu)


def _autocast_on_cpu(layer: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Cast the input as torchao does under autocast, but only for CUDA."""
    return (args[0].to(matmul_dtype(args[0])),)


def gather_in_fp8(module: nn.Module, device: str = "cuda") -> None:
    """Let FSDP all-gather weights on the device in fp8: gloo cannot. Call it before the first forward pass.

    Each rank casts its shard with the scale of the complete matrix. Shards remain plain tensors: FSDP looks for these
    two attributes then. It would replace a padded shard, so all shards of a weight must have the same size.
    """
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    for layer in module.modules():
        weight: Any = getattr(layer, "weight", None)
        if not (isinstance(layer, Float8Linear) and hasattr(weight, "device_mesh") and weight.device.type == device):
            continue
        if len(weight) % weight.device_mesh["shard"].size() == 0:
            shard, dtype = inner_shard(weight), layer.config.cast_config_weight.target_dtype
            cast = WeightWithDynamicFloat8CastTensor(shard, layer.linear_mm_config, dtype)
            shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = cast.fsdp_pre_all_gather, cast.fsdp_post_all_gather
