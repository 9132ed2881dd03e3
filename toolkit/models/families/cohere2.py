"""Cohere 2 (Command R7B and A, Cohere 2024, 2025).

Parallel residual with one LayerNorm without bias. Three of four layers have sliding windows; the others have full
attention without RoPE (NoPE). The logits are scaled.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

CONFIGS: list[ModelConfig] = []


def from_hf_config(config_json: Fields) -> ModelConfig:
    # transformers ignores the last two
    hf_config.require_silu(config_json, use_qk_norm=(False,), use_parallel_block=(True,))
    if (types := config_json.get("layer_types")) is None:
        every = config_json.get("sliding_window_pattern", 4)
        types = hf_config.every_nth_is_full(config_json["num_hidden_layers"], every)
    fields = hf_config.read_decoder(
        config_json, vocab_size=256000, block_size=8192, tied=True, **hf_config.LAYER_NORM
    ) | hf_config.read_windows(config_json, types, default=4096)
    return ModelConfig(
        **fields,
        **hf_rope.read_rope(config_json),
        **hf_config.read_biases({**config_json, "mlp_bias": False}),
        rope_indices=hf_config.rope_in_windows(types),
        logits_scaling=1 / config_json.get("logit_scale", 0.0625),
        norm_class_name="LayerNorm",
        norm_bias=False,
        parallel_residual=True,
        shared_attention_norm=True,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(
        config, "Cohere2ForCausalLM", layer_norm_eps=config.norm_eps, logit_scale=1 / config.logits_scaling,
        layer_types=hf_config.write_layer_types(config), sliding_window=config.sliding_window_size or config.block_size,
    )  # fmt: skip


weight_map = partial(tables.decoder_weights, rope_pairs=True)
