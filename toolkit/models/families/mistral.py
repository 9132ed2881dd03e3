"""Mistral (Jiang et al. 2023): Llama with sliding windows in all layers, or none; Ministral: in any layers.

Sources of the named configurations: LitGPT. From MLC LLM's presets: untied embeddings, and block_size of version 0.1,
which LitGPT shortens to the sliding window.
"""

from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_mistral = named_with(family="mistral", block_size=32768, vocab_size=32768, rope_base=1000000.0)
_7B = (32, 4096, 32, 8, 14336)

CONFIGS = [
    _mistral("Mistral-7B-v0.1", *_7B, vocab_size=32000, rope_base=10000.0, sliding_window_size=4096),
    _mistral("Mistral-7B-v0.2", *_7B, vocab_size=32000),
    _mistral("Mistral-7B-v0.3", *_7B),
    _mistral("Mathstral-7B-v0.1", *_7B, sliding_window_size=4096),
    _mistral("Mistral-Large-Instruct-2407", 88, 12288, 96, 8, 28672),
]

ALIASES = {
    "Mistral-7B-Instruct-v0.1": "Mistral-7B-v0.1",
    "Mistral-7B-Instruct-v0.2": "Mistral-7B-v0.2",
    "Mistral-7B-Instruct-v0.3": "Mistral-7B-v0.3",
    "Mistral-Large-Instruct-2411": "Mistral-Large-Instruct-2407",
}


def from_hf_config(config_json: dict[str, Any]) -> ModelConfig:
    if config_json["model_type"] == "mistral":
        hf_config.require_hf(config_json, layer_types=(None,))
    hf_config.require_hf(config_json, hidden_act=("silu",))
    return ModelConfig(
        **hf_config.read_decoder({"num_key_value_heads": 8} | config_json, vocab_size=32000, block_size=131072),
        **hf_config.read_windows(config_json, default=4096),
        **hf_rope.read_rope(config_json),
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    window: dict[str, Any] = {"sliding_window": config.sliding_window_size}
    if config.family == "mistral":
        return hf_config.write_decoder(config, "MistralForCausalLM", **window)
    window["sliding_window"] = config.sliding_window_size or config.block_size  # required by the class, used or not
    types = hf_config.write_layer_types(config)
    return hf_config.write_decoder(config, "MinistralForCausalLM", **window, layer_types=types)


weight_map = tables.decoder_weights


def check(config: ModelConfig) -> None:
    windows = hf_config.WINDOWS if config.family == "mistral" else hf_config.LAYERED_WINDOWS
    hf_config.require_llama(config, free=windows)
