"""Mixtral (Jiang et al. 2024): Mistral with experts in all layers.

Sources of the named configurations: LitGPT. The load-balancing coefficients and the 8x22B base model's vocabulary come
from copies of ``config.json``, such as in TensorRT-LLM's tests.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_mixtral = named_with(
    family="mixtral", block_size=65536, vocab_size=32000, rope_base=1000000.0, **hf_config.read_experts({}),
)  # fmt: skip

CONFIGS = [
    _mixtral("Mixtral-8x7B-v0.1", 32, 4096, 32, 8, 14336, block_size=32768, router_aux_loss_coef=0.02),
    _mixtral("Mixtral-8x22B-v0.1", 56, 6144, 48, 8, 16384),
    _mixtral("Mixtral-8x22B-Instruct-v0.1", 56, 6144, 48, 8, 16384, vocab_size=32768),
]

ALIASES = {"Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B-v0.1"}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json, router_jitter_noise=(0, None), layer_types=(None,))
    config_json = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, **config_json}
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=32000, block_size=131072),
        **hf_config.read_windows(config_json),
        **hf_rope.read_rope(config_json, default_theta=1000000.0),
        **hf_config.read_experts(config_json),
    )


def to_hf_config(config: ModelConfig) -> Fields:
    experts = hf_config.write_experts(config)
    return hf_config.write_decoder(config, "MixtralForCausalLM", **experts, sliding_window=config.sliding_window_size)


_experts = partial(tables.experts, layer="block_sparse_moe", names={"fc_1": "w1", "fc_2": "w3", "proj": "w2"})
weight_map = partial(tables.decoder_weights, moe=_experts)
