"""Mistral (Jiang et al. 2023): Llama with sliding windows in all layers, or none; Ministral: in any layers.

Ministral 3 (Mistral AI 2025) scales queries by position, with YaRN. Of the multimodal models, the text model is read.

Sources of the named configurations: LitGPT. From MLC LLM's presets: untied embeddings, and block_size of version 0.1,
which LitGPT shortens to the sliding window.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import is_number, require_key
from toolkit.models.families.named import named_with

# Default of transformers' class for Ministral 3.
_ROPE: Fields = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

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


def from_hf_config(config_json: Fields) -> ModelConfig:
    if config_json["model_type"] != "ministral":
        hf_config.require_hf(config_json, layer_types=(None,))
    hf_config.require_silu(config_json)
    if config_json["model_type"] == "ministral3":
        return _read_ministral3(config_json)
    return ModelConfig(
        **hf_config.read_decoder({"num_key_value_heads": 8} | config_json, vocab_size=32000, block_size=131072),
        **hf_config.read_windows(config_json, default=4096),
        **hf_rope.read_rope(config_json),
    )


def _read_ministral3(config_json: Fields) -> ModelConfig:
    config_json = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, **config_json}
    config_json = hf_rope.with_default_rope(config_json, _ROPE)
    rope = config_json.get("rope_scaling") or config_json["rope_parameters"]
    kind, beta = rope.get("rope_type", rope.get("type")), rope.get("llama_4_scaling_beta")
    require_key(kind == "yarn", "rope_type", kind, "of a 'ministral3' model, this version computes only 'yarn'")
    require_key(is_number(beta, 0), "llama_4_scaling_beta", beta, "must be a number, not less than zero")
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=131072, block_size=262144),
        **hf_config.read_windows(config_json),
        **hf_rope.read_rope(config_json),
        query_scaling_beta=beta,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    window: Fields = {"sliding_window": config.sliding_window_size}
    if config.family == "mistral":
        return hf_config.write_decoder(config, "MistralForCausalLM", **window)
    if config.family == "ministral3":
        beta = {"rope_theta": config.rope_base, "llama_4_scaling_beta": config.query_scaling_beta}
        rope = (hf_config.write_rope_scaling(config) or {}) | beta
        return hf_config.write_decoder(
            config, "Ministral3ForCausalLM", **window, rope_parameters=rope, rope_scaling=rope
        )
    window["sliding_window"] = config.sliding_window_size or config.block_size  # required by the class, used or not
    types = hf_config.write_layer_types(config)
    return hf_config.write_decoder(config, "MinistralForCausalLM", **window, layer_types=types)


weight_map = tables.decoder_weights
