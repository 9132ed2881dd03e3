"""SmolLM3 (Hugging Face 2025): Llama with no RoPE (NoPE) in every fourth layer.

Source of the named configuration: defaults of transformers' ``SmolLM3Config``, from before the context extension.
block_size and rope_base come from Hugging Face's report (blog post, July 2025).
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import require_key

CONFIGS = [
    ModelConfig(
        name="SmolLM3-3B", family="smollm3", block_size=65536, vocab_size=128256, n_layer=36, n_embd=2048, n_head=16,
        n_query_groups=4, intermediate_size=11008, rope_base=5000000.0, norm_eps=1e-6, tie_embeddings=True,
        rope_indices=[0, 0, 0, -1] * 9,
    ),
]  # fmt: skip

ALIASES = {"SmolLM3-3B-Base": "SmolLM3-3B"}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json, attention_bias=(False,), mlp_bias=(False,))
    n_layer, every = config_json["num_hidden_layers"], config_json.get("no_rope_layer_interval", 4)
    rotated = config_json.get("no_rope_layers")  # 1: the layer uses RoPE
    if rotated is None:
        rotated = [int((i + 1) % every != 0) for i in range(n_layer)]
    hint = f"must contain 0 or 1 for each of the {n_layer} layers"
    require_key(len(rotated) >= n_layer, "no_rope_layers", rotated, hint)
    has_windows = config_json.get("use_sliding_window", False) and config_json.get("sliding_window") is not None
    types = [hf_config.SLIDING if has_windows and not rotates else hf_config.FULL for rotates in rotated[:n_layer]]
    return ModelConfig(
        **hf_config.read_decoder(
            {"num_key_value_heads": 4} | config_json, vocab_size=128256, block_size=32768, tied=True
        ),
        **hf_config.read_windows(config_json, types),
        **hf_rope.read_rope(config_json, default_theta=2000000.0),
        rope_indices=None if all(rotated) else [0 if rotates else -1 for rotates in rotated],
    )


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(
        config, "SmolLM3ForCausalLM", layer_types=hf_config.write_layer_types(config), mlp_bias=False,
        no_rope_layers=[int(config.rope_index(i) == 0) for i in range(config.n_layer)],
        sliding_window=config.sliding_window_size, use_sliding_window=config.sliding_window_size is not None,
    )  # fmt: skip


weight_map = tables.decoder_weights
