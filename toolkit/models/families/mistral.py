"""Mistral (Jiang et al. 2023): Llama with a window in all layers, or in none."""

from __future__ import annotations

from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, tables

CONFIGS: list[ModelConfig] = []
ALIASES: dict[str, str] = {}


def from_hf(config_json: dict[str, Any]) -> ModelConfig:
    """Make a config from the content of a Hugging Face ``config.json`` with ``model_type`` "mistral"."""
    hf_config.require_hf(config_json, hidden_act=("silu",))
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=32000, block_size=131072),
        **hf_config.read_windows(config_json, default=4096),
        **hf_config.read_rope(config_json),
        tie_embeddings=config_json.get("tie_word_embeddings", False),
    )


def to_hf(config: ModelConfig, bos_token_id: int | None = None, eos_token_id: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    _check(config)
    window = {"sliding_window": config.sliding_window_size}
    return hf_config.write_decoder(config, "MistralForCausalLM", bos_token_id, eos_token_id, **window)


def weights(config: ModelConfig) -> list[tables.Map]:
    """Return the table of weight names, both directions."""
    _check(config)
    return tables.decoder_weights(config)


def _check(config: ModelConfig) -> None:
    """Refuse what a MistralForCausalLM cannot be."""
    hf_config.require_llama(config, free=("sliding_window_size",), sliding_window_indices=None)
