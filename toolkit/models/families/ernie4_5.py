"""ERNIE 4.5 (Baidu 2025), dense models: Llama with an independent head_dim and optional biases."""

from functools import partial
from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

CONFIGS: list[ModelConfig] = []
ALIASES: dict[str, str] = {}


def from_hf_config(config_json: dict[str, Any]) -> ModelConfig:
    hf_config.require_hf(config_json, hidden_act=("silu",))
    sizes = {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2} | config_json
    return ModelConfig(
        **hf_config.read_decoder(sizes, vocab_size=103424, block_size=131072, tied=True),
        **hf_rope.read_rope(config_json, default_theta=500000.0),
        bias=config_json.get("use_bias", False),
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    values = hf_config.write_decoder(config, "Ernie4_5ForCausalLM", use_bias=config.bias)
    del values["attention_bias"]
    return values


weight_map = partial(tables.decoder_weights, rope_pairs=True)


def check(config: ModelConfig) -> None:
    hf_config.require_llama(config, free=("bias",))
