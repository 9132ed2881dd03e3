"""Phi 3, 3.5 and 4 (Abdin et al. 2024): Llama with fused projections on disk, sliding windows and longrope.

Sources of the named configurations: LitGPT. Sliding windows, longrope and tied embeddings come from MLC LLM's presets,
without the float32 rounding errors in the longrope factors. A sliding window longer than block_size is omitted.
"""

import math
from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_PHI_3_5_SHORT = [
    1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29, 1.34, 1.68, 1.79,
    1.82, 1.85, 1.88, 1.91, 1.94, 1.99, 2.02, 2.02, 2.02, 2.02, 2.02, 2.02, 2.03, 2.03, 2.03, 2.03, 2.03, 2.03,
    2.03, 2.03, 2.03, 2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84,
]  # fmt: skip
_PHI_3_5_LONG = [
    1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67, 24.46, 28.57,
    30.42, 30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61, 62.62, 62.71, 63.14,
    63.14, 63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84,
]  # fmt: skip
_PHI_4_MINI_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip


def _longrope(short_factor: list[float], long_factor: list[float]) -> Fields:
    """Return longrope adjustments for extending the context from 4,096 to 131,072 tokens."""
    return {
        "short_factor": short_factor, "long_factor": long_factor, "original_max_seq_len": 4096,
        "attention_factor": hf_config.longrope_attention_factor(131072, 4096),
    }  # fmt: skip


_phi3 = named_with(family="phi3", vocab_size=32064)
_phi4 = named_with(family="phi3", vocab_size=100352)
_MINI, _14B = (32, 3072, 32, 32, 8192), (40, 5120, 40, 10, 17920)

CONFIGS = [
    _phi3("Phi-3-mini-4k-instruct", *_MINI, block_size=4096, sliding_window_size=2047),
    _phi3(
        "Phi-3.5-mini-instruct", *_MINI, block_size=131072, rope_adjustments=_longrope(_PHI_3_5_SHORT, _PHI_3_5_LONG)
    ),
    _phi3(
        "Phi-4-mini-instruct", 32, 3072, 24, 8, 8192, block_size=131072, vocab_size=200064, rotary_percentage=0.75,
        rope_adjustments=_longrope([1.0] * 48, _PHI_4_MINI_LONG), tie_embeddings=True,
    ),
    _phi4("phi-4", *_14B, block_size=16384, rope_base=250000.0),
    _phi4("Phi-4-reasoning", *_14B, block_size=32768, rope_base=500000.0),
]  # fmt: skip

ALIASES = {"Phi-4-mini-reasoning": "Phi-4-mini-instruct", "Phi-4-reasoning-plus": "Phi-4-reasoning"}


_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}  # names in early config files


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json, attention_bias=(False,), layer_types=(None,))
    return ModelConfig(
        **hf_config.read_decoder({"rms_norm_eps": 1e-5} | config_json, vocab_size=32064, block_size=4096),
        **hf_config.read_windows(config_json),
        **hf_rope.read_rope(config_json, partial="partial_rotary_factor", aliases=_OLD_NAMES),
    )


def to_hf_config(config: ModelConfig) -> Fields:
    if config.rope_kind not in (None, "longrope"):
        hf_config.require(config, rope_adjustments="longrope's or None")
    values = hf_config.write_decoder(
        config, "Phi3ForCausalLM", sliding_window=config.sliding_window_size,
        partial_rotary_factor=config.rotary_percentage, embd_pdrop=0.0, resid_pdrop=0.0,
        original_max_position_embeddings=(config.rope_adjustments or {}).get("original_max_seq_len", config.block_size),
    )  # fmt: skip
    if config.rope_adjustments is not None and config.rope_kind == "longrope":
        values["rope_scaling"] = _write_longrope(config, config.rope_adjustments)
    return values


def _write_longrope(config: ModelConfig, adjustments: Fields) -> Fields:
    """Return ``rope_scaling`` for transformers 4 and 5. attention_factor is included only if it is not the default."""
    factor = adjustments["attention_factor"]
    default = hf_config.longrope_attention_factor(config.block_size, adjustments["original_max_seq_len"])
    factors = {name: adjustments[name] for name in ("short_factor", "long_factor")}
    return {"type": "longrope"} | factors | ({} if math.isclose(factor, default) else {"attention_factor": factor})


weight_map = partial(tables.decoder_weights, fused=True, mlp=tables.fused_mlp)
