"""OLMo 1 to 3 (Groeneveld et al. 2024, OLMo Team 2024, 2025).

OLMo is a Llama with non-parametric norms and optional QKV clipping. OLMo 2 has post-norm instead of pre-norm, and
QK-norm over all heads of a token. OLMo 3 adds sliding windows in three of four layers, without RoPE scaling.

Sources of the named configurations: LitGPT, and the model cards for tied embeddings.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_ARCHITECTURES = {"olmo": "OlmoForCausalLM", "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}
_OLMO1: Fields = {"norm_class_name": "LayerNorm", "norm_affine": False, "norm_eps": 1e-5}
_OLMO2: Fields = {
    "norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True, "norm_qk": True,
    "norm_qk_type": "olmo2",
}  # fmt: skip


_olmo = named_with(family="olmo", block_size=2048, vocab_size=50304, **_OLMO1)
_olmo2 = named_with(family="olmo2", block_size=4096, vocab_size=100352, rope_base=500000.0, norm_eps=1e-6, **_OLMO2)

CONFIGS = [
    _olmo("OLMo-1B-hf", 16, 2048, 16, 16, 8192, tie_embeddings=True),
    _olmo("OLMo-7B-hf", 32, 4096, 32, 32, 11008),
    _olmo2("OLMo-2-1124-7B", 32, 4096, 32, 32, 11008),
    _olmo2("OLMo-2-1124-13B", 40, 5120, 40, 40, 13824),
]

ALIASES = {
    "OLMo-7B-Instruct-hf": "OLMo-7B-hf",
    **{f"OLMo-2-1124-7B-{kind}": "OLMo-2-1124-7B" for kind in ("SFT", "DPO", "Instruct")},
    **{f"OLMo-2-1124-13B-{kind}": "OLMo-2-1124-13B" for kind in ("SFT", "DPO", "Instruct")},
}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json, attention_bias=(False,))
    kind, n_layer = config_json["model_type"], config_json["num_hidden_layers"]
    fields = hf_config.read_decoder({"rms_norm_eps": 1e-5} | config_json, vocab_size=50304, block_size=2048)
    if kind != "olmo3":
        fields |= hf_rope.read_rope(config_json)
    fields |= {**_OLMO1, "clip_qkv": config_json.get("clip_qkv")} if kind == "olmo" else _OLMO2
    if kind == "olmo3":
        if (types := config_json.get("layer_types")) is None:
            types = hf_config.every_nth_is_full(n_layer, 4)
        fields |= hf_config.read_windows(config_json, types, default=4096)
        fields |= hf_rope.read_rope_by_layer(config_json, local=None, default_theta=5e5, default_local=5e5)
        fields["rope_indices"] = [int(t == hf_config.SLIDING) for t in types]
    return ModelConfig(**fields)


def to_hf_config(config: ModelConfig) -> Fields:
    other: Fields = {}
    if config.family == "olmo":
        other = {"clip_qkv": config.clip_qkv}
    if config.family == "olmo3":
        other = hf_config.write_rope_by_layer(config)
        other |= {
            "layer_types": hf_config.write_layer_types(config),
            "sliding_window": config.sliding_window_size or config.block_size,  # required by the class, used or not
        }
    return hf_config.write_decoder(config, _ARCHITECTURES[config.family], **other)


weight_map = tables.decoder_weights
