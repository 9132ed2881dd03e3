"""Seed-OSS (ByteDance Seed 2025): Llama with an independent head_dim and biases in any parts of attention.

Source of the named configuration: a copy of ``config.json`` of ByteDance-Seed/Seed-OSS-36B-Instruct in the tests of an
MLX implementation.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

CONFIGS = [
    ModelConfig(
        name="Seed-OSS-36B-Base", family="seed_oss", block_size=524288, vocab_size=155136, n_layer=64, n_embd=5120,
        n_head=80, n_query_groups=8, head_size=128, intermediate_size=27648, rope_base=10000000.0, norm_eps=1e-6,
        attn_bias=True,
    ),
]  # fmt: skip
ALIASES = {"Seed-OSS-36B-Instruct": "Seed-OSS-36B-Base"}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    sizes = {"head_dim": 128, "num_key_value_heads": 8} | config_json
    output = config_json.get("attention_out_bias", False)
    return ModelConfig(
        **hf_config.read_decoder(sizes, vocab_size=155136, block_size=524288),
        **hf_rope.read_rope(config_json),
        **hf_config.read_biases(config_json, attention=True, output=output),
    )


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(
        config, "SeedOssForCausalLM", attention_out_bias=config.bias or config.attn_proj_bias, mlp_bias=config.bias,
        residual_dropout=0.0,
    )  # fmt: skip


weight_map = tables.decoder_weights
