"""Granite 3 dense models (Granite Team 2024): Llama with four constant multipliers.

Source of the named configuration: the Foundation Model Stack (``fms/models/granite.py``).
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

CONFIGS = [
    # padding_multiple 1: the published vocabulary is not padded
    ModelConfig(
        name="granite-3.0-8b-base", family="granite", block_size=8192, vocab_size=49155, padding_multiple=1,
        n_layer=40, n_embd=4096, n_head=32, n_query_groups=8, intermediate_size=12800, embedding_multiplier=12.0,
        attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=16.0, tie_embeddings=True,
    ),
]  # fmt: skip

ALIASES = {"granite-3.0-8b-instruct": "granite-3.0-8b-base"}

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    fields = hf_config.read_decoder(config_json, vocab_size=32000, block_size=2048)
    fields |= {name: float(config_json.get(name, 1.0)) for name in _MULTIPLIERS}
    return ModelConfig(**fields, **hf_rope.read_rope(config_json), **hf_config.read_biases(config_json))


def to_hf_config(config: ModelConfig) -> Fields:
    multipliers = {name: getattr(config, name) for name in _MULTIPLIERS}
    multipliers["attention_multiplier"] = config.attention_scale
    return hf_config.write_decoder(config, "GraniteForCausalLM", mlp_bias=config.bias, **multipliers)


weight_map = tables.decoder_weights


def check(config: ModelConfig) -> None:
    free = (*_MULTIPLIERS, "bias", "attn_bias", "attention_scores_scalar")
    hf_config.require_llama(config, free=free, has_head_dim=False, attn_proj_bias=config.attn_bias)
