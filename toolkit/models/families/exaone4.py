"""EXAONE 4 (LG AI Research 2025): post-norm only, and QK-norm per head.

Hybrid models have sliding windows in some layers, and no RoPE (NoPE) in the others.

Source of the named configuration: ``config.json`` of LGAI-EXAONE/EXAONE-4.0-32B (copy in TensorRT-LLM's tests).
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

_FIXED: Fields = {
    "norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True, "norm_qk": True,
}  # fmt: skip

_SCALED_16X = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}

CONFIGS = [
    ModelConfig(
        name="EXAONE-4.0-32B", family="exaone4", block_size=131072, vocab_size=102400, n_layer=64, n_embd=5120,
        n_head=40, n_query_groups=8, intermediate_size=27392, rope_base=1000000.0, rope_adjustments=_SCALED_16X,
        sliding_window_size=4096, sliding_window_indices=[1, 1, 1, 0] * 16, rope_indices=[0, 0, 0, -1] * 16, **_FIXED,
    ),
]  # fmt: skip


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    is_hybrid = config_json.get("sliding_window", 4096) is not None
    if (types := config_json.get("layer_types")) is None:  # patterns such as LLLG come with layer_types
        every = config_json.get("sliding_window_pattern", 4) if is_hybrid else 1
        types = hf_config.every_nth_is_full(config_json["num_hidden_layers"], every)
    sizes = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32} | config_json
    return ModelConfig(
        **hf_config.read_decoder(sizes, vocab_size=102400, block_size=2048),
        **hf_config.read_windows(config_json, types, default=4096),
        **hf_rope.read_rope(config_json),
        rope_indices=hf_config.rope_in_windows(types) if is_hybrid else None,
        **_FIXED,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    layers = range(config.n_layer)
    is_hybrid = any(config.window(layer) is not None or config.rope_index(layer) == -1 for layer in layers)
    window = (config.sliding_window_size or config.block_size) if is_hybrid else None  # NoPE needs one, used or not
    return hf_config.write_decoder(
        config, "Exaone4ForCausalLM", layer_types=hf_config.write_layer_types(config), sliding_window=window,
        sliding_window_pattern=None,
    )  # fmt: skip


weight_map = tables.decoder_weights
