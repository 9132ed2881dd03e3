"""Read LitGPT's ``model_config.yaml`` and ``lit_model.pth`` where they differ from toolkit's format.

Names and layout of weights differ only for experts, and for attention in older LitGPT files. LitGPT never ties
embedding and head: it saves two equal tensors for tied models, which stay untied here. Compared with LitGPT 0.5.13.
"""

from dataclasses import replace

import torch

from toolkit.checkpoints.importers import Importer
from toolkit.checkpoints.weights import Tensors
from toolkit.errors import UserError
from toolkit.models.config import Fields, ModelConfig

# LitGPT always writes these fields. toolkit's defaults differ, so a missing field is an error.
_REQUIRED_FIELDS = (
    "block_size", "n_layer", "n_head", "n_embd", "rotary_percentage", "parallel_residual", "bias", "norm_class_name",
    "mlp_class_name",
)  # fmt: skip
# Unsupported: toolkit stores their weights in another layout. None of LitGPT's named models uses them.
_UNSUPPORTED = ("latent_attention", "linear_attention", "attention_gate", "n_expert_groups")


def config_from_litgpt(values: Fields) -> ModelConfig:
    """Build a config from the content of a ``model_config.yaml`` that LitGPT wrote."""
    if values.get("vocab_size") is not None and (missing := [name for name in _REQUIRED_FIELDS if name not in values]):
        raise UserError(f"{missing[0]} is missing")
    if unsupported := [name for name in _UNSUPPORTED if values.get(name)]:
        hint = "is not supported; run toolkit convert_from_hf on the original Hugging Face model"
        raise UserError(f"{unsupported[0]} {values[unsupported[0]]}: {hint}")
    ratio = values.get("rope_condense_ratio", 1)
    values = {name: value for name, value in values.items() if name not in ("hf_config", "rope_condense_ratio")}
    if ratio != 1:  # divides positions; linear RoPE scaling divides frequencies
        if values.get("rope_adjustments") or values.get("rope_local_base_freq"):
            raise UserError(f"rope_condense_ratio {ratio}: is not supported with rope_adjustments or a local RoPE base")
        values["rope_adjustments"] = {"factor": float(ratio)}
    config = ModelConfig.from_dict(values | _implicit_fields(values))
    if config.rope_kind == "yarn":
        raise UserError(
            "rope_adjustments: with beta_fast and beta_slow, LitGPT stretches the high frequencies instead of the low "
            "ones, which is not supported; run toolkit convert_from_hf on the original Hugging Face model"
        )
    return replace(config, family=_family(config))


def _implicit_fields(values: Fields) -> Fields:
    """Return fields that LitGPT derives from the model's name (``norm_class`` in its config.py) or other fields."""
    name, is_rms = str(values.get("name")), values.get("norm_class_name") == "RMSNorm"
    implied = {"norm_offset": is_rms and "Gemma" in name, "norm_affine": is_rms or "OLMo" not in name}
    listed = values.get("sliding_window_indices") or []  # written even if all layers are alike
    windows = listed[: values.get("n_layer")]
    if values.get("sliding_window_size") is None or (windows and not any(windows)):
        implied |= {"sliding_window_size": None, "sliding_window_indices": None}
    elif windows and all(windows):
        implied["sliding_window_indices"] = None
    if values.get("rope_local_base_freq") is None:
        implied["rope_indices"] = None
    if values.get("mlp_class_name") == "LLaMAMoE":
        implied["norm_topk_prob"] = True  # its softmax is over the top-k experts only
    return implied


def _family(config: ModelConfig) -> str:
    """Infer the Hugging Face ``model_type``, which LitGPT's file does not contain, from the architecture."""
    if config.mlp_class_name == "LLaMAMoE":
        return "qwen3_moe" if config.norm_qk else "mixtral"
    if config.mlp_class_name == "GemmaMLP":
        return "gemma3_text" if config.norm_qk else "gemma2" if config.post_mlp_norm else "gemma"
    if not config.norm_affine:
        return "olmo"
    if not config.norm_1:
        return "olmo3" if config.sliding_window_size else "olmo2"
    if config.norm_qk:
        return "qwen3"
    if config.mlp_class_name == "GptNeoxMLP":
        return "phi" if config.lm_head_bias else "gpt_neox" if config.bias else "falcon"
    if config.norm_class_name == "LayerNorm":
        return "stablelm"
    if config.attn_bias:
        return "qwen2"
    if config.rotary_percentage != 1:
        return "phi3"
    return "mistral" if config.sliding_window_size else "llama"


def to_native_layout(weights: Tensors, config: ModelConfig) -> None:
    """Convert LitGPT's weights in place to native names and layout; native weights stay unchanged.

    The older ``attn.attn`` ([q..., k, v] per query group) becomes ``attn.qkv`` (all q, all k, all v), and tensors of
    single experts (``mlp.experts.0.fc_1.weight``) are stacked (``mlp.experts.fc_1.weight``).
    """
    size, groups = config.head_size, config.n_query_groups
    per_group = config.n_head // groups
    for old in [name for name in weights if ".attn.attn." in name]:
        tensor = weights.pop(old)
        rows = (per_group + 2) * size
        if tensor.shape[0] == groups * rows:
            grouped = tensor.unflatten(0, (groups, rows)).split([per_group * size, size, size], dim=1)
            tensor = torch.cat([part.flatten(0, 1) for part in grouped])
        weights[old.replace(".attn.attn.", ".attn.qkv.")] = tensor
    for first in [name for name in weights if ".mlp.experts.0." in name]:
        names = [first.replace(".experts.0.", f".experts.{i}.") for i in range(config.n_expert)]
        if all(name in weights and weights[name].shape == weights[first].shape for name in names):
            weights[first.replace(".experts.0.", ".experts.")] = torch.stack([weights.pop(name) for name in names])


IMPORTER = Importer(config=config_from_litgpt, convert=to_native_layout)
