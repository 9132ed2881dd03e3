"""StableLM 2 and 3B (Bellagente et al. 2024): Llama with LayerNorm and partial rotary (25%).

Optional: QKV bias, parallel residual with a shared norm, QK-norm.

Sources of the named configurations: LitGPT; MLC LLM's presets for stablelm-2-1_6b and the untied embeddings of both;
the model card and ``config.json`` (copy in dAppCore's go-inference) for stablelm-2-12b. The first StableLM
(stablelm-base-alpha) is a GPT-NeoX.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_stablelm = named_with(
    family="stablelm", block_size=4096, vocab_size=100352, rotary_percentage=0.25, norm_class_name="LayerNorm"
)

CONFIGS = [
    _stablelm("stablelm-3b-4e1t", 32, 2560, 32, 32, 6912, vocab_size=50304),
    _stablelm("stablelm-2-1_6b", 24, 2048, 32, 32, 5632, attn_bias=True),
    _stablelm(
        "stablelm-2-12b", 40, 5120, 32, 8, 13824, parallel_residual=True, shared_attention_norm=True, norm_qk=True,
        norm_qk_type="per_head",
    ),
]  # fmt: skip

ALIASES = {"stablelm-zephyr-3b": "stablelm-3b-4e1t", "stablelm-2-zephyr-1_6b": "stablelm-2-1_6b"}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    parallel, norm_qk = config_json.get("use_parallel_residual", False), config_json.get("qk_layernorm", False)
    config_json = {"num_key_value_heads": 32, **config_json}
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=50304, block_size=4096, **hf_config.LAYER_NORM),
        **hf_rope.read_rope(config_json, partial="partial_rotary_factor", default_partial=0.25),
        norm_class_name="LayerNorm",
        attn_bias=config_json.get("use_qkv_bias", False),
        norm_qk=norm_qk,
        norm_qk_type="per_head" if norm_qk else "default",
        parallel_residual=parallel,
        shared_attention_norm=parallel,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(
        config, "StableLmForCausalLM", hidden_dropout=0.0, layer_norm_eps=config.norm_eps,
        partial_rotary_factor=config.rotary_percentage, qk_layernorm=config.norm_qk,
        use_parallel_residual=config.parallel_residual, use_qkv_bias=config.attn_bias,
    )  # fmt: skip


weight_map = tables.decoder_weights
