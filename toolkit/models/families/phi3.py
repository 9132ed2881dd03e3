"""Phi 3, 3.5 and 4 (Abdin et al. 2024): Llama whose projections are fused on disk, with windows and longrope."""

from __future__ import annotations

from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, tables

CONFIGS: list[ModelConfig] = []
ALIASES: dict[str, str] = {}


def from_hf(config_json: dict[str, Any]) -> ModelConfig:
    """Make a config from the content of a Hugging Face ``config.json`` with ``model_type`` "phi3"."""
    hf_config.require_hf(config_json, hidden_act=("silu",), attention_bias=(False,))
    return ModelConfig(
        **hf_config.read_decoder({"rms_norm_eps": 1e-5} | config_json, vocab_size=32064, block_size=4096),
        **hf_config.read_windows(config_json),
        **hf_config.read_rope(config_json),
        tie_embeddings=config_json.get("tie_word_embeddings", False),
    )


def to_hf(config: ModelConfig, bos_token_id: int | None = None, eos_token_id: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    _check(config)
    values = hf_config.write_decoder(
        config, "Phi3ForCausalLM", bos_token_id, eos_token_id, sliding_window=config.sliding_window_size,
        partial_rotary_factor=config.rotary_percentage, embd_pdrop=0.0, resid_pdrop=0.0,
        original_max_position_embeddings=(config.rope_adjustments or {}).get("original_max_seq_len", config.block_size),
    )  # fmt: skip
    if config.rope_kind == "longrope":  # these three keys, or transformers refuses the file
        values["rope_scaling"] = {
            "type": "longrope", **{name: config.rope_adjustments[name] for name in ("short_factor", "long_factor")},
        }  # fmt: skip
    return values


def weights(config: ModelConfig) -> list[tables.Map]:
    """Return the table of weight names, both directions."""
    _check(config)
    return tables.decoder_weights(config, fused=True)


def _check(config: ModelConfig) -> None:
    """Refuse what a Phi3ForCausalLM cannot be."""
    own = {"head_size": config.n_embd // config.n_head, "sliding_window_indices": None}
    hf_config.require_llama(config, free=("rotary_percentage", "sliding_window_size"), **own)
