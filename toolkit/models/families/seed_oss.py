"""Seed-OSS (ByteDance Seed 2025): Llama with an independent head_dim and biases in any parts of attention."""

from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

CONFIGS: list[ModelConfig] = []
ALIASES: dict[str, str] = {}


def from_hf_config(config_json: dict[str, Any]) -> ModelConfig:
    hf_config.require_hf(config_json, hidden_act=("silu",))
    sizes = {"head_dim": 128, "num_key_value_heads": 8} | config_json
    output = config_json.get("attention_out_bias", False)
    return ModelConfig(
        **hf_config.read_decoder(sizes, vocab_size=155136, block_size=524288),
        **hf_rope.read_rope(config_json),
        **hf_config.read_biases(config_json, attention=True, output=output),
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    return hf_config.write_decoder(
        config, "SeedOssForCausalLM", attention_out_bias=config.bias or config.attn_proj_bias, mlp_bias=config.bias,
        residual_dropout=0.0,
    )  # fmt: skip


weight_map = tables.decoder_weights


def check(config: ModelConfig) -> None:
    hf_config.require_llama(config, free=("bias", "attn_bias", "attn_proj_bias"))
