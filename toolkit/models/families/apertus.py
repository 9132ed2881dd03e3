"""Apertus (Swiss AI 2025): QK-norm per head, and a non-gated MLP with xIELU, whose slopes are learned per layer."""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

# Default of transformers' class.
_ROPE: Fields = {
    "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip

CONFIGS: list[ModelConfig] = []


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_hf(config_json, hidden_act=("xielu",))
    config_json = hf_rope.with_default_rope(config_json, _ROPE)
    return ModelConfig(
        **hf_config.read_decoder({"rms_norm_eps": 1e-5} | config_json, vocab_size=131072, block_size=65536),
        **hf_rope.read_rope(config_json, default_theta=_ROPE["rope_theta"]),
        **hf_config.read_biases({**config_json, "mlp_bias": False}),
        norm_qk=True,
        mlp_class_name="XieluMLP",
    )


def to_hf_config(config: ModelConfig) -> Fields:
    rope = hf_config.write_rope_parameters(config)
    return hf_config.write_decoder(config, "ApertusForCausalLM", hidden_act="xielu", rope_parameters=rope)


def _mlp(config: ModelConfig, native: str, hf: str) -> tables.WeightMap:
    names = {"fc.weight": "up_proj.weight", "proj.weight": "down_proj.weight"}
    names |= {name: f"act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
    return [tables.one_to_one(f"{native}.mlp.{n}", f"{hf}.mlp.{h}") for n, h in names.items()]


weight_map = partial(
    tables.decoder_weights, names={"norm_1": "attention_layernorm", "norm_2": "feedforward_layernorm"}, mlp=_mlp
)
