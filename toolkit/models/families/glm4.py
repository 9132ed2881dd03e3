"""GLM-4 (Team GLM 2024, the 0414 models): Llama with pre-norm and post-norm, QKV bias, and RoPE on half of each head.

Source of the named configuration: transformers' ``Glm4Config`` and the model card.
"""

from functools import partial
from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

_POST_NORMS: dict[str, Any] = {"post_attention_norm": True, "post_mlp_norm": True}

CONFIGS: list[ModelConfig] = []
ALIASES: dict[str, str] = {}

_DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}


def from_hf_config(config_json: dict[str, Any]) -> ModelConfig:
    hf_config.require_hf(config_json, hidden_act=("silu",))
    return ModelConfig(
        **hf_config.read_decoder(_DEFAULTS | config_json, vocab_size=151552, block_size=131072),
        **hf_rope.read_rope(config_json, partial="partial_rotary_factor", default_partial=0.5),
        attn_bias=config_json.get("attention_bias", True),
        **_POST_NORMS,
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    return hf_config.write_decoder(config, "Glm4ForCausalLM", partial_rotary_factor=config.rotary_percentage)


weight_map = partial(
    tables.decoder_weights,
    rope_pairs=True,
    mlp=tables.fused_mlp,
    norms={
        "post_attention_norm": "post_self_attn_layernorm",
        "norm_2": "post_attention_layernorm",
        "post_mlp_norm": "post_mlp_layernorm",
    },
)


def check(config: ModelConfig) -> None:
    hf_config.require_llama(config, free=("rotary_percentage", "attn_bias"), **_POST_NORMS)
