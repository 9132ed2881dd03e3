"""Gemma 1 to 3, text only (Gemma Team 2024, 2024, 2025).

All have scaled embeddings, norms that multiply by 1 + weight, and GeGLU. Gemma 2 adds post-norm, sliding windows in
every other layer, and soft-capping of scores and logits. Gemma 3 replaces soft-capping with QK-norm. Five of six layers
have sliding windows with a local RoPE theta.

Sources of the named configurations: LitGPT. From MLC LLM's presets and transformers' conversion scripts: norm_eps and
block_size of Gemma 1 (LitGPT uses its defaults), gemma-3-270m, and block_size of gemma-3-1b. From KerasHub's presets:
tied embeddings, CodeGemma and ShieldGemma. Gemma 3's vocabulary excludes the 64 image tokens of the multimodal models.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_FIXED: Fields = {
    "norm_offset": True, "scale_embeddings": True, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh",
}  # fmt: skip
_COMMON: Fields = {"norm_eps": 1e-6, "tie_embeddings": True, **_FIXED}
_POST_NORMS: Fields = {"post_attention_norm": True, "post_mlp_norm": True}

_gemma = named_with(family="gemma", block_size=8192, vocab_size=256000, head_size=256, **_COMMON)
# Lists with one entry per layer are cut to the number of layers.
_gemma2 = named_with(
    family="gemma2", block_size=8192, vocab_size=256000, head_size=256, attention_scores_scalar=256.0,
    attention_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window_size=4096,
    sliding_window_indices=[1, 0] * 23, **_POST_NORMS, **_COMMON,
)  # fmt: skip
_EVERY_SIXTH_IS_FULL = [1, 1, 1, 1, 1, 0] * 11
_gemma3 = named_with(
    family="gemma3_text", block_size=131072, vocab_size=262144, head_size=256, attention_scores_scalar=256.0,
    norm_qk=True, rope_base=1000000.0, rope_adjustments={"factor": 8.0}, rope_local_base_freq=10000.0,
    rope_indices=_EVERY_SIXTH_IS_FULL, sliding_window_size=1024, sliding_window_indices=_EVERY_SIXTH_IS_FULL,
    **_POST_NORMS, **_COMMON,
)  # fmt: skip
_gemma3_32k = partial(_gemma3, block_size=32768, rope_adjustments=None, sliding_window_size=512)

CONFIGS = [
    _gemma("gemma-2b", 18, 2048, 8, 1, 16384),
    _gemma("gemma-7b", 28, 3072, 16, 16, 24576),
    _gemma2("gemma-2-2b", 26, 2304, 8, 4, 9216),
    _gemma2("gemma-2-9b", 42, 3584, 16, 8, 14336),
    _gemma2("gemma-2-27b", 46, 4608, 32, 16, 36864, head_size=128, attention_scores_scalar=144.0),
    _gemma3_32k("gemma-3-270m", 18, 640, 4, 1, 2048),
    _gemma3_32k("gemma-3-1b", 26, 1152, 4, 1, 6912),
    _gemma3("gemma-3-4b", 34, 2560, 8, 4, 10240),
    _gemma3("gemma-3-12b", 48, 3840, 16, 8, 15360),
    _gemma3("gemma-3-27b", 62, 5376, 32, 16, 21504, head_size=128, attention_scores_scalar=168.0),
]

ALIASES = {
    **{f"{c.name}-it": c.name for c in CONFIGS},
    **{f"{c.name}-pt": c.name for c in CONFIGS if c.name.startswith("gemma-3")},
    **{f"gemma-1.1-{size}-it": f"gemma-{size}" for size in ("2b", "7b")},
    **{f"codegemma-{size}": f"gemma-{size}" for size in ("2b", "7b")},
    "codegemma-7b-it": "gemma-7b",
    "codegemma-1.1-2b": "gemma-2b",
    "codegemma-1.1-7b-it": "gemma-7b",
    **{f"shieldgemma-{size}": f"gemma-2-{size}" for size in ("2b", "9b", "27b")},
}

_ARCHITECTURES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
# Defaults of transformers' classes: the published files omit some keys.
_DEFAULTS: Fields = {
    "gemma": {"num_key_value_heads": 16},
    "gemma2": {"num_key_value_heads": 4},
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    },
}  # fmt: skip
_ACTS = ("gelu", "gelu_pytorch_tanh")  # Gemma 1's files specify gelu and mean its tanh approximation


def from_hf_config(config_json: Fields) -> ModelConfig:
    kind = config_json["model_type"]
    allowed = _ACTS if kind == "gemma" else _ACTS[1:]
    acts = {"hidden_activation": (*allowed, None)} | ({"hidden_act": allowed} if kind == "gemma" else {})
    hf_config.require_hf(config_json, attention_bias=(False,), use_bidirectional_attention=(False, None), **acts)
    config_json = {"head_dim": 256} | _DEFAULTS[kind] | config_json
    fields = hf_config.read_decoder(config_json, vocab_size=256000, block_size=8192, tied=True)
    if kind != "gemma":
        fields |= _gemma2_and_3_fields(config_json)
    if kind != "gemma3_text":
        fields |= hf_rope.read_rope(config_json)
    return ModelConfig(**fields, **_FIXED)


def _gemma2_and_3_fields(config_json: Fields) -> Fields:
    """Return the fields that only Gemma 2 and 3 have."""
    is_v3, n_layer = config_json["model_type"] == "gemma3_text", config_json["num_hidden_layers"]
    every = config_json.get("sliding_window_pattern", 6) if is_v3 else 2
    types = hf_config.every_nth_is_full(n_layer, every)
    # transformers' Gemma 3 reads the soft cap of scores but does not apply it
    score_softcap = None if is_v3 else config_json.get("attn_logit_softcapping", 50.0)
    fields = {
        **_POST_NORMS,
        "attention_scores_scalar": float(config_json.get("query_pre_attn_scalar", 256)),
        "attention_logit_softcapping": score_softcap,
        "final_logit_softcapping": config_json.get("final_logit_softcapping", None if is_v3 else 30.0),
        **hf_config.read_windows(config_json, types, default=4096),
    }
    if not is_v3:
        return fields
    fields |= hf_rope.read_rope_by_layer(
        config_json, local="rope_local_base_freq", default_theta=1000000.0, default_local=10000.0
    )
    types = types if config_json.get("layer_types") is None else config_json["layer_types"]
    return fields | {"norm_qk": True, "rope_indices": [int(kind == hf_config.SLIDING) for kind in types]}


def to_hf_config(config: ModelConfig) -> Fields:
    other: Fields = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if config.family != "gemma":
        other |= {
            "attn_logit_softcapping": config.attention_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "layer_types": hf_config.write_layer_types(config),
            "query_pre_attn_scalar": int(config.attention_scores_scalar or config.head_size),
            "sliding_window": config.sliding_window_size or config.block_size,  # required by the class, used or not
        }
    if config.family == "gemma3_text":
        other |= hf_config.write_rope_by_layer(config)
    return hf_config.write_decoder(config, _ARCHITECTURES[config.family], **other)


weight_map = tables.decoder_weights
