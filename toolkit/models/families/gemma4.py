"""Gemma 4, text only (Gemma Team 2026). Its model is :mod:`toolkit.models.gemma4`.

``ModelConfig.family_options`` has all of these:

- ``full_attention``: head_size and n_query_groups of the layers with full attention.
- ``keys_are_values``: In layers with full attention, values are the keys before their norm and RoPE.
- ``n_shared_kv_layers``: Number of last layers that attend to the keys and values of an earlier layer: of the last one
  before them that also has a sliding window, or full attention.
- ``double_wide_mlp``: Those layers' MLPs have twice the width.
- ``per_layer_size``, ``per_layer_vocab_size``: Width of each layer's own embedding of the tokens (0: none), and number
  of its rows.

With experts, each layer also has a dense MLP, the shared expert, whose width is intermediate_size.

Sources of the named configurations: ``src/maxtext/configs/models/gemma4-*.yml`` of MaxText, and copies of their
``config.json`` for block_size and the order of the layers.
"""

from functools import partial
from typing import Any

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.config_checks import MAX_SIZE
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import require_key
from toolkit.models.families.named import named_with

MODEL = "toolkit.models.gemma4.Gemma4"

_FIXED: Fields = {
    "scale_embeddings": True, "gelu_approximate": "tanh", "attention_multiplier": 1.0, "norm_qk": True,
    "post_attention_norm": True, "post_mlp_norm": True,
}  # fmt: skip
_WINDOWS = [1, 1, 1, 1, 1, 0] * 10  # lists with one entry per layer are cut to the number of layers
_gemma4 = named_with(
    family="gemma4_text", block_size=262144, vocab_size=262144, head_size=256, norm_eps=1e-6, tie_embeddings=True,
    final_logit_softcapping=30.0, rope_base=1000000.0, rope_adjustments={"partial_rotary_factor": 0.25},
    rope_local_base_freq=10000.0, sliding_window_size=1024, sliding_window_indices=_WINDOWS, rope_indices=_WINDOWS,
    mlp_class_name="GemmaMLP", **_FIXED,
)  # fmt: skip
_small = partial(_gemma4, block_size=131072, sliding_window_size=512)


def _options(n_query_groups: int, **options: Any) -> Fields:
    return {
        "full_attention": {"head_size": 512, "n_query_groups": n_query_groups}, "keys_are_values": True,
        "n_shared_kv_layers": 0, "double_wide_mlp": False, "per_layer_size": 0, "per_layer_vocab_size": 262144,
    } | options  # fmt: skip


_PER_LAYER: Fields = {"per_layer_size": 256, "keys_are_values": False}
_EVERY_FIFTH_IS_FULL = [1, 1, 1, 1, 0] * 7
CONFIGS = [
    _small(
        "gemma-4-E2B", 35, 1536, 8, 1, 6144, sliding_window_indices=_EVERY_FIFTH_IS_FULL,
        rope_indices=_EVERY_FIFTH_IS_FULL,
        family_options=_options(1, n_shared_kv_layers=20, double_wide_mlp=True, **_PER_LAYER),
    ),
    _small("gemma-4-E4B", 42, 2560, 8, 2, 10240, family_options=_options(2, n_shared_kv_layers=18, **_PER_LAYER)),
    _gemma4(
        "gemma-4-26B-A4B", 30, 2816, 16, 8, 2112, family_options=_options(2), mlp_class_name="LLaMAMoE", n_expert=128,
        n_expert_per_token=8, moe_intermediate_size=704, norm_topk_prob=True, shared_expert_intermediate_size=2112,
        shared_expert_gate=False,
    ),
    _gemma4("gemma-4-31B", 60, 5376, 32, 16, 21504, family_options=_options(4)),
]  # fmt: skip
ALIASES = {f"{config.name}-it": config.name for config in CONFIGS}

# Defaults of transformers' class.
_DEFAULTS: Fields = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_ROPE: Fields = {
    hf_config.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    hf_config.SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
# Keys that are null without experts.
_EXPERT_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size")
# Names in config.json of the options that are taken as they are, and their defaults in transformers' class.
_OPTIONS: dict[str, tuple[str, Any]] = {
    "keys_are_values": ("attention_k_eq_v", False), "n_shared_kv_layers": ("num_kv_shared_layers", 0),
    "double_wide_mlp": ("use_double_wide_mlp", False), "per_layer_size": ("hidden_size_per_layer_input", 256),
    "per_layer_vocab_size": ("vocab_size_per_layer_input", 262144),
}  # fmt: skip


def validate(config: ModelConfig) -> None:
    """Check the family's options, and that no field has a value that this family's model ignores."""
    config = config.without_head()
    hf_config.require_same(config, from_hf_config(to_hf_config(config)))


def _check_options(config: ModelConfig) -> None:
    options = config.family_options or {}

    def require(ok: bool, hint: str) -> None:
        config.require(ok, "family_options", hint)

    names = {"full_attention", *_OPTIONS}
    require(options.keys() == names, f"a Gemma 4 model must have {', '.join(sorted(names))}, and no others")
    for name, (key, default) in _OPTIONS.items():
        is_valid = type(options[name]) is type(default) and 0 <= options[name] <= MAX_SIZE
        expected = "true or false" if type(default) is bool else f"an integer, 0 to {MAX_SIZE:,}"
        require(is_valid, f"{name} ({key}) must be {expected}")
    sizes = options["full_attention"]
    is_valid = isinstance(sizes, dict) and sizes.keys() == {"head_size", "n_query_groups"}
    is_valid = is_valid and all(type(n) is int and 0 < n <= MAX_SIZE for n in sizes.values())
    require(is_valid, "full_attention must have head_size and n_query_groups, each an integer above 0")
    is_valid = config.n_head % sizes["n_query_groups"] == 0 and sizes["head_size"] % 2 == 0
    require(is_valid, f"n_query_groups must divide n_head {config.n_head}, and head_size must be even")
    hint = "a Gemma 4 model has no longrope, whose factors would differ between layers"
    config.require(config.rope_kind != "longrope", "rope_adjustments", hint)
    n_shared, rows = options["n_shared_kv_layers"], options["per_layer_vocab_size"]
    windows = [config.window(layer) for layer in range(config.n_layer)]
    hint = "the last layer must have full attention; change n_layer, or sliding_window_indices"
    config.require(windows[-1] is None, "n_layer", hint)
    has_sources = n_shared < config.n_layer and set(windows[: config.n_layer - n_shared]) == set(windows)
    hint = f"must have a layer of each kind before the last {n_shared}, family_options.n_shared_kv_layers"
    config.require(has_sources, "n_layer", f"{hint} (num_kv_shared_layers)")
    has_same = options["keys_are_values"] or sizes["n_query_groups"] == config.n_query_groups
    hint = f"must be {sizes['n_query_groups']}, as in family_options.full_attention, unless keys_are_values"
    config.require(has_same, "n_query_groups", hint)
    is_covered = not options["per_layer_size"] or rows >= (config.vocab_size or 0)
    hint = "per_layer_vocab_size (vocab_size_per_layer_input) must not be less than"
    require(is_covered, f"{hint} vocab_size {config.vocab_size}")


def normalize(config_json: Fields) -> Fields:
    """Return ``config.json`` with the keys of the published files in place of per_layer_config of transformers."""
    config_json = {key: value for key, value in config_json.items() if key not in _EXPERT_KEYS or value is not None}
    by_layer = config_json.pop("per_layer_config", None)
    if by_layer is None:
        return config_json
    types = config_json.get("layer_types") or []
    layers = [str(i) for i, kind in enumerate(types) if kind == hf_config.FULL]
    sizes: Fields = by_layer.get(layers[-1], {}) if layers else {}
    groups, overrides_groups = sizes.get("num_key_value_heads"), config_json.get("attention_k_eq_v", False)
    is_valid = by_layer == (dict.fromkeys(layers, sizes) if sizes else {})
    require_key(
        is_valid and sizes.keys() <= {"head_dim", "num_key_value_heads"} and (overrides_groups or not groups),
        "per_layer_config",
        by_layer,
        "must have the same head_dim, and num_key_value_heads with attention_k_eq_v, for all full_attention layers",
    )
    head_dim = sizes.get("head_dim", config_json.get("head_dim", _DEFAULTS["head_dim"]))
    return config_json | {"global_head_dim": head_dim, "num_global_key_value_heads": groups}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_hf(
        config_json,
        hidden_activation=("gelu_pytorch_tanh",),
        use_bidirectional_attention=(None, "vision"),  # of image tokens, which a text does not have
        mlp_bias=(False,),
        enable_moe_block=(True, False),
        rope_scaling=(None,),
        rope_theta=(None,),
    )
    config_json = _DEFAULTS | config_json
    n_layer = config_json["num_hidden_layers"]
    types = config_json.get("layer_types") or hf_config.every_nth_is_full(n_layer, 6)
    types = [*types[:-1], hf_config.FULL]  # as in transformers
    config_json |= {"layer_types": types}
    fields = hf_config.read_decoder(config_json, vocab_size=262144, block_size=131072, tied=True)
    fields |= hf_config.read_windows(config_json, default=512)
    fields |= hf_config.read_biases(config_json) | _read_rope(config_json)
    fields["rope_indices"] = [int(kind == hf_config.SLIDING) for kind in types]
    options = {name: config_json.get(key, default) for name, (key, default) in _OPTIONS.items()}
    groups = config_json.get("num_global_key_value_heads") if options["keys_are_values"] else None
    groups = config_json["num_key_value_heads"] if groups is None else groups
    options["full_attention"] = {"head_size": config_json["global_head_dim"], "n_query_groups": groups}
    if config_json.get("enable_moe_block"):
        fields |= {
            "mlp_class_name": "LLaMAMoE", "norm_topk_prob": True, "shared_expert_gate": False,
            "n_expert": config_json["num_experts"], "n_expert_per_token": config_json["top_k_experts"],
            "moe_intermediate_size": config_json["moe_intermediate_size"],
            "shared_expert_intermediate_size": config_json["intermediate_size"],
            "router_aux_loss_coef": config_json.get("router_aux_loss_coef", 0.0),  # transformers computes no such loss
        }  # fmt: skip
    softcap = config_json.get("final_logit_softcapping")
    fields = {"mlp_class_name": "GemmaMLP", "final_logit_softcapping": softcap} | _FIXED | fields
    config = ModelConfig(**fields, family_options=options)
    _check_options(config)
    return config


def _read_rope(config_json: Fields) -> Fields:
    """Return the RoPE fields. Layers with full attention have proportional RoPE by default."""
    by_layer = config_json.get("rope_parameters") or _ROPE
    full = by_layer.get(hf_config.FULL) or {}
    if full.get("rope_type") != "proportional":
        return hf_rope.read_rope_by_layer(config_json, local=None, default_theta=10000.0, default_local=10000.0)
    plain = {"rope_parameters": by_layer | {hf_config.FULL: {"rope_theta": full["rope_theta"]}}}
    fields = hf_rope.read_rope_by_layer(config_json | plain, local=None, default_theta=10000.0, default_local=10000.0)
    adjustments = {key: full[key] for key in ("partial_rotary_factor", "factor") if full.get(key) is not None}
    return fields | {"rope_adjustments": {"partial_rotary_factor": 1.0} | adjustments}


def to_hf_config(config: ModelConfig) -> Fields:
    _check_options(config)
    options: Fields = config.family_options or {}
    full, is_moe = options["full_attention"], config.n_moe_layer > 0
    other: Fields = {key: options[name] for name, (key, _) in _OPTIONS.items()}
    other |= hf_config.write_rope_by_layer(config) | {
        "enable_moe_block": is_moe,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": full["head_size"],
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": hf_config.write_layer_types(config),
        "num_global_key_value_heads": full["n_query_groups"] if options["keys_are_values"] else None,
        "sliding_window": config.sliding_window_size or config.block_size,  # required by the class, used or not
    }
    if is_moe:
        other |= dict(zip(_EXPERT_KEYS, (config.n_expert, config.n_expert_per_token, config.expert_size), strict=True))
        other["router_aux_loss_coef"] = config.router_aux_loss_coef
    values = hf_config.write_decoder(config, "Gemma4ForCausalLM", **other)
    unused = ("hidden_act", "rope_local_base_freq", "rope_scaling", "rope_theta")
    return {key: value for key, value in values.items() if key not in unused}


def _attention(config: ModelConfig, native: str, hf: str) -> tables.WeightMap:
    layer = int(native.rpartition(".")[2])
    sizes, parts = config.layer(layer), "qkv"[: config.n_attention_parts(layer)]
    q, kv = sizes.n_head * sizes.head_size, sizes.n_query_groups * sizes.head_size
    maps = [
        tables.WeightMapping(
            (f"{native}.attn.qkv.{kind}",),
            tuple(f"{hf}.self_attn.{part}_proj.{kind}" for part in parts),
            (tables.split_rows(*[q, kv, kv][: len(parts)]),),
        )
        for kind in (("weight", "bias") if config.attn_bias else ("weight",))
    ]
    for part in parts[:2]:
        maps += tables.linear(f"{native}.attn.norm_{part}", f"{hf}.self_attn.{part}_norm", False)
    maps += tables.linear(f"{native}.attn.proj", f"{hf}.self_attn.o_proj", config.attn_proj_bias)
    maps.append(tables.one_to_one(f"{native}.layer_scalar", f"{hf}.layer_scalar"))
    if (config.family_options or {})["per_layer_size"]:
        names = {
            "per_layer_gate": "per_layer_input_gate", "per_layer_proj": "per_layer_projection",
            "post_per_layer_norm": "post_per_layer_input_norm",
        }  # fmt: skip
        maps += tables.layers(config, native, hf, names)
    return maps


def _experts(config: ModelConfig, native: str, hf: str) -> tables.WeightMap:
    names = {"gate": "router.proj", "experts_norm": "pre_feedforward_layernorm_2"}
    names |= {f"post_{part}_norm": f"post_feedforward_layernorm_{i}" for i, part in ((1, "dense"), (2, "experts"))}
    names |= {f"shared_expert.{name}": f"mlp.{hf_name}" for name, hf_name in tables.GATED.items()}
    maps = tables.layers(config, f"{native}.mlp", hf, names)
    for name, hf_name in {"gate_scale": "scale", "expert_scale": "per_expert_scale"}.items():
        maps.append(tables.one_to_one(f"{native}.mlp.{name}", f"{hf}.router.{hf_name}"))
    gate_up = tuple(f"{native}.mlp.experts.{name}.weight" for name in ("fc_1", "fc_2"))
    join = tables.join_rows(*[config.expert_size] * 2)
    maps.append(tables.WeightMapping(gate_up, (f"{hf}.experts.gate_up_proj",), (join,)))
    return [*maps, tables.one_to_one(f"{native}.mlp.experts.proj.weight", f"{hf}.experts.down_proj")]


def weight_map(config: ModelConfig) -> tables.WeightMap:
    maps = tables.decoder_weights(config, attention=_attention, moe=_experts)
    if not (config.family_options or {})["per_layer_size"]:
        return maps
    names = {
        "wte_per_layer": "embed_tokens_per_layer", "per_layer_proj": "per_layer_model_projection",
        "per_layer_norm": "per_layer_projection_norm",
    }  # fmt: skip
    return maps + tables.layers(config, "transformer", "model", names)


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a weight is for keys and values of a layer that takes another layer's."""
    parts = name.split(".")
    is_attention = parts[:2] == ["model", "layers"] and parts[3:4] == ["self_attn"] and parts[2].isdigit()
    return is_attention and int(parts[2]) >= config.n_cached_layer and parts[4][:2] in ("k_", "v_")
