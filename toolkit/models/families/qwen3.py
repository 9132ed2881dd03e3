"""Qwen3 (Yang et al. 2025), the dense models: Qwen2 without biases, with norms of each head's query and key."""

from __future__ import annotations

from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, qwen2, tables

CONFIGS: list[ModelConfig] = []
ALIASES: dict[str, str] = {}


def from_hf(config_json: dict[str, Any]) -> ModelConfig:
    """Make a config from the content of a Hugging Face ``config.json`` with ``model_type`` "qwen3"."""
    hf_config.require_hf(config_json, hidden_act=("silu",), attention_bias=(False,))
    return ModelConfig(
        **hf_config.read_decoder({"head_dim": 128} | config_json, vocab_size=151936, block_size=32768),
        **qwen2.read_windows(config_json),
        **hf_config.read_rope(config_json),
        norm_qk=True,
        tie_embeddings=config_json.get("tie_word_embeddings", False),
    )


def to_hf(config: ModelConfig, bos_token_id: int | None = None, eos_token_id: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    _check(config)
    windows = qwen2.write_windows(config)
    return hf_config.write_decoder(config, "Qwen3ForCausalLM", bos_token_id, eos_token_id, **windows)


def weights(config: ModelConfig) -> list[tables.Map]:
    """Return the table of weight names, both directions."""
    _check(config)
    return tables.decoder_weights(config)


def _check(config: ModelConfig) -> None:
    """Refuse what a Qwen3ForCausalLM cannot be."""
    hf_config.require_llama(config, free=("sliding_window_size",), norm_qk=True, norm_qk_type="default")
