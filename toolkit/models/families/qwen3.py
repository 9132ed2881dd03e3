"""Qwen3 dense models (Yang et al. 2025): Qwen2 with QK-norm and without biases.

Sources of the named configurations: LitGPT, and the presets of MLC LLM and KerasHub for tied embeddings.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, qwen2, tables
from toolkit.models.families.named import named_with

_qwen3 = named_with(
    family="qwen3", block_size=40960, vocab_size=151936, head_size=128, rope_base=1000000.0, norm_eps=1e-6,
    norm_qk=True,
)  # fmt: skip
_4B = (36, 2560, 32, 8, 9728)

CONFIGS = [
    _qwen3("Qwen3-0.6B", 28, 1024, 16, 8, 3072, tie_embeddings=True),
    _qwen3("Qwen3-1.7B", 28, 2048, 16, 8, 6144, tie_embeddings=True),
    _qwen3("Qwen3-4B", *_4B, tie_embeddings=True),
    _qwen3("Qwen3-4B-Instruct-2507", *_4B, tie_embeddings=True, block_size=262144, rope_base=5000000.0),
    _qwen3("Qwen3-8B", 36, 4096, 32, 8, 12288),
    _qwen3("Qwen3-14B", 40, 5120, 40, 8, 17408),
    _qwen3("Qwen3-32B", 64, 5120, 64, 8, 25600),
]

ALIASES = {
    **{f"{c.name}-Base": c.name for c in CONFIGS if c.name not in ("Qwen3-32B", "Qwen3-4B-Instruct-2507")},
    "Qwen3-4B-Thinking-2507": "Qwen3-4B-Instruct-2507",
}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json, attention_bias=(False,))
    config_json = {"head_dim": 128, "num_key_value_heads": 32, **config_json}
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=151936, block_size=32768),
        **qwen2.read_windows(config_json),
        **hf_rope.read_rope(config_json),
        norm_qk=True,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    windows = qwen2.write_windows(config)
    return hf_config.write_decoder(config, "Qwen3ForCausalLM", **windows)


weight_map = tables.decoder_weights
