"""Qwen3-Next and Qwen3.5, dense and with experts: most layers have linear attention (Gated DeltaNet), every fourth has
attention with a gated output.

The multimodal Qwen3.5's rotary embedding has three positions per token, which are equal in a text: plain RoPE.

Sources of the named configurations: ``config.json`` of Qwen3-Next-80B-A3B-Instruct and Qwen3.5-0.8B, and those of
finetuned copies of the others.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.config_checks import LINEAR_ATTENTION
from toolkit.models.families import hf_config, hf_rope, qwen_moe, tables
from toolkit.models.families.hf_keys import is_integer, require_key
from toolkit.models.families.named import named_with

_KINDS = (hf_config.FULL, "linear_attention")  # by the index of a layer
# config.json's names of the sizes
_SIZES = dict(zip(LINEAR_ATTENTION, (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
), strict=True))  # fmt: skip
_FIXED: Fields = {"norm_offset": True, "norm_qk": True, "attention_gate": True}

_named = named_with(
    block_size=262144, vocab_size=248320, head_size=256, rotary_percentage=0.25, rope_base=10000000.0, norm_eps=1e-6,
    **_FIXED, linear_attention_indices=[1, 1, 1, 0] * 16,
)  # fmt: skip


def _linear_sizes(n_value_heads: int) -> Fields:
    return {"linear_attention": dict(zip(LINEAR_ATTENTION, (16, n_value_heads, 128, 128, 4), strict=True))}


_dense = partial(_named, family="qwen3_5_text")
_moe = partial(
    _named, mlp_class_name="LLaMAMoE", moe_intermediate_size=512, shared_expert_intermediate_size=512,
    norm_topk_prob=True, **_linear_sizes(32),
)  # fmt: skip

CONFIGS = [
    _moe(
        "Qwen3-Next-80B-A3B-Instruct", 48, 2048, 16, 2, 5120, family="qwen3_next", vocab_size=151936, n_expert=512,
        n_expert_per_token=10,
    ),
    _dense("Qwen3.5-0.8B", 24, 1024, 8, 2, 3584, tie_embeddings=True, **_linear_sizes(16)),
    _dense("Qwen3.5-4B", 32, 2560, 16, 4, 9216, tie_embeddings=True, **_linear_sizes(32)),
    _dense("Qwen3.5-9B", 32, 4096, 16, 4, 12288, **_linear_sizes(32)),
    _dense("Qwen3.5-27B", 64, 5120, 24, 4, 17408, **_linear_sizes(48)),
    _moe("Qwen3.5-35B-A3B", 40, 2048, 16, 2, family="qwen3_5_moe_text", n_expert=256, n_expert_per_token=8),
]  # fmt: skip
ALIASES = {
    "Qwen3-Next-80B-A3B-Thinking": "Qwen3-Next-80B-A3B-Instruct",
    "Qwen3-Coder-Next": "Qwen3-Next-80B-A3B-Instruct",
    "Qwen3.5-0.8B-Base": "Qwen3.5-0.8B",
}

# Defaults of transformers' classes.
_COMMON: Fields = {
    "head_dim": 256, "num_attention_heads": 16, "hidden_size": 2048, "vocab_size": 248320,
    **dict(zip(_SIZES.values(), (16, 32, 128, 128, 4), strict=True)),
}  # fmt: skip
_MOE: Fields = {
    "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 5632,
}  # fmt: skip
_DEFAULTS: Fields = {
    "qwen3_next": _COMMON | _MOE | {
        "vocab_size": 151936, "num_hidden_layers": 48, "num_experts_per_tok": 10, "num_experts": 512,
    },
    "qwen3_5_text": _COMMON | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": _COMMON | _MOE | {
        "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256,
    },
}  # fmt: skip


def from_hf_config(config_json: Fields) -> ModelConfig:
    kind = config_json["model_type"]
    has_bias = config_json.get("attention_bias", False)
    hf_config.require_silu(config_json, attn_output_gate=(True,), mlp_bias=(False,), use_sliding_window=(False, None))
    config_json = _DEFAULTS[kind] | config_json
    indices, experts = _read_layers(config_json), {}
    if kind == "qwen3_5_moe_text":  # its class computes no others
        hf_config.require_hf(config_json, norm_topk_prob=(True,), mlp_only_layers=([], None), decoder_sparse_step=(1,))
    if kind != "qwen3_5_text":
        experts = qwen_moe.read_experts({"norm_topk_prob": True} | config_json, has_shared=True)
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=248320, block_size=32768),
        **hf_rope.read_rope(config_json, partial="partial_rotary_factor", default_partial=0.25),
        **_FIXED,
        **experts,
        attn_bias=has_bias,
        attn_proj_bias=has_bias,
        linear_attention={name: config_json[key] for name, key in _SIZES.items()} if any(indices) else None,
        linear_attention_indices=indices if any(indices) and not all(indices) else None,
    )


def _read_layers(config_json: Fields) -> list[int]:
    """Return 1 for each layer with linear attention; by default all but every ``full_attention_interval``-th."""
    n, n_layer = config_json.get("full_attention_interval", 4), config_json["num_hidden_layers"]
    require_key(is_integer(n, 1), "full_attention_interval", n, "must be an integer, 1 or greater")
    types = config_json.get("layer_types") or [_KINDS[(i + 1) % n != 0] for i in range(n_layer)]
    is_valid = len(types) == n_layer and set(types) <= set(_KINDS)
    require_key(is_valid, "layer_types", types, f"must be {' or '.join(_KINDS)} for each of {n_layer} layers")
    return [_KINDS.index(kind) for kind in types]


def to_hf_config(config: ModelConfig) -> Fields:
    kind = config.family
    sizes = config.linear_attention or {name: _COMMON[key] for name, key in _SIZES.items()}
    values: Fields = {
        **{key: sizes[name] for name, key in _SIZES.items()},
        "layer_types": [_KINDS[config.has_linear_attention(i)] for i in range(config.n_layer)],
        "partial_rotary_factor": config.rotary_percentage,
    }
    if kind != "qwen3_5_text":
        values |= qwen_moe.write_experts(config)
        values["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    names = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}
    return hf_config.write_decoder(config, f"{names[kind]}ForCausalLM", **values)


def is_mtp(name: str, config: ModelConfig) -> bool:
    return name.startswith("mtp.")


def _linear_attention(config: ModelConfig, native: str, hf: str) -> tables.WeightMap:
    """Map a layer with linear attention. Qwen3-Next fuses the projections, with the rows of a key head together."""
    native, hf, sizes = f"{native}.attn", f"{hf}.linear_attn", config.linear_attention
    assert sizes is not None
    heads, repeats = sizes["n_key_heads"], sizes["n_value_heads"] // sizes["n_key_heads"]
    key, value = sizes["key_size"], repeats * sizes["value_size"]
    maps: tables.WeightMap = []
    if config.family == "qwen3_next":
        for first, second, name, *widths in (
            ("in_qkv", "in_gate", "in_proj_qkvz", key, key, value, value),
            ("in_beta", "in_decay", "in_proj_ba", repeats, repeats),
        ):
            join = tables.join_rows(heads * sum(widths[:-1]), heads * widths[-1])
            parts = (f"{native}.{first}.weight", f"{native}.{second}.weight")
            transforms = (join, tables.interleave_heads(heads, *widths))
            maps.append(tables.WeightMapping(parts, (f"{hf}.{name}.weight",), transforms))
    else:
        names = {"in_qkv": "in_proj_qkv", "in_gate": "in_proj_z", "in_beta": "in_proj_b", "in_decay": "in_proj_a"}
        maps += tables.layers(config, native, hf, names)
    names = {"conv": "conv1d.weight", "A_log": "A_log", "dt_bias": "dt_bias"}
    names |= {"out_norm.weight": "norm.weight", "proj.weight": "out_proj.weight"}
    return maps + [tables.one_to_one(f"{native}.{name}", f"{hf}.{hf_name}") for name, hf_name in names.items()]


weight_map = partial(tables.decoder_weights, linear_attention=_linear_attention)
