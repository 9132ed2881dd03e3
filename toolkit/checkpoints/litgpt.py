"""LitGPT's checkpoint folders: what its ``model_config.yaml`` and ``lit_model.pth`` say in another way than ours.

Names and layout of the weights are the same but for experts, and for attention in LitGPT's older files. It never ties
embedding and head: a model that is tied elsewhere has two equal tensors there, and stays untied here. Compared with
LitGPT 0.5.13.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig

# Their defaults are not ours, and LitGPT writes them all: a file without one was not written by it.
_ALWAYS_THERE = (
    "block_size", "n_layer", "n_head", "n_embd", "rotary_percentage", "parallel_residual", "bias", "norm_class_name",
    "mlp_class_name",
)  # fmt: skip


def config_from_litgpt(values: dict[str, Any]) -> ModelConfig:
    """Make a config from the content of a ``model_config.yaml`` that LitGPT wrote.

    Raises:
        UserError: the model is none that this program computes as LitGPT does.
    """
    config = ModelConfig.from_dict(_with_condensed_positions(values))
    if config.vocab_size is not None and (missing := [name for name in _ALWAYS_THERE if name not in values]):
        raise UserError(f"{missing[0]} is missing")
    if config.rope_kind == "yarn":
        raise UserError(
            "rope_adjustments: with beta_fast and beta_slow, LitGPT stretches the high frequencies instead of the low "
            "ones, which this program does not; run toolkit convert_from_hf on the model that it was converted from"
        )
    config = replace(config, **_by_name(config), **_by_layer(config))
    return replace(config, family=_family(config))


def _with_condensed_positions(values: dict[str, Any]) -> dict[str, Any]:
    """Positions divided by a number are frequencies divided by it, which we know as linear scaling."""
    ratio = values.get("rope_condense_ratio", 1)
    if ratio == 1 or values.get("rope_adjustments") or values.get("rope_local_base_freq"):
        return values
    return values | {"rope_condense_ratio": 1, "rope_adjustments": {"factor": float(ratio)}}


def _by_name(config: ModelConfig) -> dict[str, Any]:
    """What LitGPT's code takes from the name alone (``norm_class`` in its config.py)."""
    is_rms = config.norm_class_name == "RMSNorm"
    return {"norm_offset": is_rms and "Gemma" in config.name, "norm_affine": is_rms or "OLMo" not in config.name}


def _by_layer(config: ModelConfig) -> dict[str, Any]:
    """LitGPT lists what holds for all layers, too."""
    windows = config.sliding_window_indices
    if windows is None:
        return {}
    if not any(windows):
        return {"sliding_window_size": None, "sliding_window_indices": None}
    return {"sliding_window_indices": None if all(windows) else windows}


def _family(config: ModelConfig) -> str:
    """The Hugging Face ``model_type``, where the name or the layers settled it."""
    if not config.norm_affine:
        return "olmo"
    if config.family in ("llama", "mistral"):
        if config.rotary_percentage != 1:
            return "phi3"
        return "llama" if config.sliding_window_size is None else "mistral"
    return config.family


def to_our_layout(weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Bring LitGPT's weights, in place, to our names and layout; ours stay as they are."""
    _ungroup_attention(weights, config)
    _stack_experts(weights, config)


def _ungroup_attention(weights: dict[str, Tensor], config: ModelConfig) -> None:
    """Its older ``attn.attn``, a [q..., k, v] per query group, becomes ``attn.qkv``, all q, then k, then v."""
    size, groups = config.head_size, config.n_query_groups
    per_group = config.n_head // groups
    for old in [name for name in weights if ".attn.attn." in name]:
        tensor = weights.pop(old)
        rows = (per_group + 2) * size
        if tensor.shape[0] == groups * rows:
            grouped = tensor.unflatten(0, (groups, rows)).split([per_group * size, size, size], dim=1)
            tensor = torch.cat([part.flatten(0, 1) for part in grouped])
        weights[old.replace(".attn.attn.", ".attn.qkv.")] = tensor


def _stack_experts(weights: dict[str, Tensor], config: ModelConfig) -> None:
    """One tensor per expert, ``mlp.experts.0.fc_1.weight``, becomes one for all, ``mlp.experts.fc_1.weight``."""
    for first in [name for name in weights if ".mlp.experts.0." in name]:
        names = [first.replace(".experts.0.", f".experts.{i}.") for i in range(config.n_expert)]
        if all(name in weights and weights[name].shape == weights[first].shape for name in names):
            weights[first.replace(".experts.0.", ".experts.")] = torch.stack([weights.pop(name) for name in names])
