"""Hunyuan dense models (Tencent 2025): Llama with QK-norm after RoPE, whose theta is stretched by a constant (NTK)."""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import is_positive, require_key

CONFIGS: list[ModelConfig] = []


def from_hf_config(config_json: Fields) -> ModelConfig:
    # transformers ignores the last two
    hf_config.require_silu(config_json, use_qk_norm=(True,), use_cla=(False,))
    fields = hf_config.read_decoder({"rms_norm_eps": 1e-5} | config_json, vocab_size=290943, block_size=2048)
    biases = hf_config.read_biases({**config_json, "mlp_bias": False})
    return ModelConfig(**fields, **_read_rope(config_json), **biases, norm_qk=True, norm_qk_after_rope=True)


def _read_rope(config_json: Fields) -> Fields:
    """Return the RoPE fields. The files call a constant factor ``alpha`` of the base "dynamic" scaling."""
    key = "rope_scaling" if config_json.get("rope_scaling") else "rope_parameters"
    rope = dict(config_json.get(key) or {})
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return hf_rope.read_rope(config_json)
    require_key(is_positive(rope["alpha"]), "alpha", rope["alpha"], "must be a number greater than zero")
    theta = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    fields = hf_rope.read_rope({**config_json, key: {"rope_type": "default"} | theta})
    dim = config_json.get("head_dim") or config_json["hidden_size"] // config_json["num_attention_heads"]
    return fields | {"rope_base": fields["rope_base"] * rope["alpha"] ** (dim / (dim - 2))}


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(config, "HunYuanDenseV1ForCausalLM")


weight_map = partial(tables.decoder_weights, names={"norm_q": "query_layernorm", "norm_k": "key_layernorm"})
