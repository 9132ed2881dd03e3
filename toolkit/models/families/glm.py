"""GLM-4 (Team GLM 2024): Llama with QKV bias and RoPE on half of each head; the 0414 models also have post-norm."""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

_ARCHITECTURES = {"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM"}
_POST_NORMS = ("post_attention_norm", "post_mlp_norm")

CONFIGS: list[ModelConfig] = []

_DEFAULTS: Fields = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    return ModelConfig(
        **hf_config.read_decoder(_DEFAULTS | config_json, vocab_size=151552, block_size=131072),
        **hf_rope.read_rope(config_json, partial="partial_rotary_factor", default_partial=0.5),
        attn_bias=config_json.get("attention_bias", True),
        **dict.fromkeys(_POST_NORMS, config_json["model_type"] == "glm4"),
    )


def to_hf_config(config: ModelConfig) -> Fields:
    partial_rotary = {"partial_rotary_factor": config.rotary_percentage}
    return hf_config.write_decoder(config, _ARCHITECTURES[config.family], **partial_rotary)


weight_map = partial(
    tables.decoder_weights,
    rope_pairs=True,
    mlp=tables.fused_mlp,
    names={
        "post_attention_norm": "post_self_attn_layernorm",
        "norm_2": "post_attention_layernorm",
        "post_mlp_norm": "post_mlp_layernorm",
    },
)
