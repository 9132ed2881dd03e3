"""Shared helpers for converting between ``config.json`` and ModelConfig."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

from toolkit.errors import UserError, option_text, require_option
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families.hf_keys import is_integer, require_key


def require(config: ModelConfig, **expected: Any) -> None:
    """Raise UserError unless the config has the field values that the Hugging Face class requires."""
    for name, value in expected.items():
        actual = getattr(config, name)
        only = f"the Hugging Face model type {config.family!r} only has {option_text(value)}"
        require_option(actual == value, f"model_config.{name}", actual, f"{only}; such a model cannot be exported")


def require_hf(config_json: Fields, **allowed: tuple[Any, ...]) -> None:
    """Raise UserError if a key of ``config.json`` has a value that toolkit does not support."""
    of_model = f"of a {config_json.get('model_type')!r} model, this version computes only"
    for key, values in allowed.items():
        if key in config_json:
            value, listed = config_json[key], " or ".join(map(repr, values))
            require_key(value in values, key, value, f"{of_model} {listed}")


def require_silu(config_json: Fields, **allowed: tuple[Any, ...]) -> None:
    """Like :func:`require_hf`, for a model whose activation is SiLU."""
    require_hf(config_json, hidden_act=("silu",), **allowed)


def model_name(config_json: Fields) -> str:
    """Return the last component of ``_name_or_path``, or an empty string."""
    return str(config_json.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]


# Fields whose values fit any Hugging Face class, or that do not affect the computation.
_SIZES = (
    "name", "family", "block_size", "vocab_size", "padded_vocab_size", "padding_multiple", "n_layer", "n_head",
    "n_embd", "intermediate_size", "rope_base", "rope_adjustments", "tie_embeddings", "n_expert", "n_expert_per_token",
    "moe_intermediate_size", "router_aux_loss_coef", "qat",
)  # fmt: skip

# What a field does, where different values can do the same.
_EFFECTS: dict[str, Callable[[ModelConfig], Any]] = {
    "attention_scores_scalar": lambda c: c.attention_scale,
    "attention_multiplier": lambda c: c.attention_scale,
    "attn_bias": lambda c: c.bias or c.attn_bias,
    "attn_proj_bias": lambda c: c.bias or c.attn_proj_bias,
    "gelu_approximate": lambda c: (
        (c.mlp_class_name in ("GemmaMLP", "GptNeoxMLP") or c.family == "gemma4_text") and c.gelu_approximate
    ),
    "linear_attention": lambda c: any(map(c.has_linear_attention, range(c.n_layer))) and c.linear_attention,
    "linear_attention_indices": lambda c: [c.has_linear_attention(i) for i in range(c.n_layer)],
    "logits_scaling": lambda c: round(c.logits_scaling, 9),  # Cohere's files have the inverse
    "moe_indices": lambda c: [c.has_experts(i) for i in range(c.n_layer)],
    "norm_bias": lambda c: c.norm_class_name == "LayerNorm" and c.norm_affine and c.norm_bias,
    "norm_qk_after_rope": lambda c: c.norm_qk and c.norm_qk_after_rope,
    "norm_qk_type": lambda c: c.norm_qk and c.norm_qk_type,
    "rope_indices": lambda c: [c.rope_index(i) for i in range(c.n_layer)],
    "rope_local_base_freq": lambda c: 1 in (c.rope_indices or ()) and c.rope_local_base_freq,
    "shared_expert_gate": lambda c: c.shared_expert_intermediate_size is not None and c.shared_expert_gate,
    "sliding_window_size": lambda c: [c.window(i) for i in range(c.n_layer)],
    "sliding_window_indices": lambda c: [c.window(i) for i in range(c.n_layer)],
}

# Model types whose classes derive head_dim from n_embd and n_head, and those that need a multiple for any head_dim.
_WITHOUT_HEAD_DIM = (
    "cohere2", "falcon", "gpt2", "gpt_neox", "granite", "granitemoe", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3",
    "stablelm", "starcoder2",
)  # fmt: skip
_DIVISIBLE_HEADS = ("deepseek_v2", "gemma2", "gemma3_text", "llama")


def require_same(config: ModelConfig, exported: ModelConfig) -> None:
    """Raise UserError if ``exported``, read from the ``config.json`` of ``config``, is another model.

    All fields are compared, including future ones.
    """
    if config.family in _DIVISIBLE_HEADS and config.n_embd % config.n_head:
        require(config, n_embd=f"multiples of n_head {config.n_head}")
    if config.family in _WITHOUT_HEAD_DIM:
        require(config, head_size=config.n_embd // config.n_head)
    for field in dataclasses.fields(config):
        effect = _EFFECTS.get(field.name, operator.attrgetter(field.name))
        if field.name not in _SIZES and effect(config) != effect(exported):
            require(config, **{field.name: getattr(exported, field.name)})


def read_biases(config_json: Fields, attention: bool = False, output: bool | None = None) -> Fields:
    """Return the bias fields of a ModelConfig.

    ``attention`` is the default of attention_bias; ``output`` is the bias of attention's output projection, by default
    attention_bias.
    """
    attention, mlp = config_json.get("attention_bias", attention), config_json.get("mlp_bias", False)
    output = attention if output is None else output
    if mlp and not (attention and output):
        raise UserError(
            f"config.json: attention_bias {attention!r} with mlp_bias {mlp!r}: of a {config_json['model_type']!r} "
            "model, this version computes mlp_bias only with all biases in attention"
        )
    return {"bias": mlp, "attn_bias": attention and not mlp, "attn_proj_bias": output and not mlp}


LAYER_NORM: Fields = {"norm_eps": "layer_norm_eps", "default_eps": 1e-5}
"""Arguments of :func:`read_decoder` for families with LayerNorm."""


def read_decoder(
    config_json: Fields,
    *,
    vocab_size: int,
    block_size: int,
    norm_eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    tied: bool = False,
) -> Fields:
    """Return the ModelConfig fields that most families store under the same keys.

    ``norm_eps`` is the family's key for it. The other arguments are the family's defaults.
    """
    vocab_size = config_json.get("vocab_size", vocab_size)
    return {
        "name": model_name(config_json),
        "family": config_json["model_type"],
        "block_size": config_json.get("max_position_embeddings", block_size),
        "vocab_size": vocab_size,
        "padded_vocab_size": vocab_size,
        "n_layer": config_json["num_hidden_layers"],
        "n_head": config_json["num_attention_heads"],
        "n_query_groups": config_json.get("num_key_value_heads"),
        "n_embd": config_json["hidden_size"],
        "head_size": config_json.get("head_dim"),
        "intermediate_size": config_json["intermediate_size"],
        "norm_eps": config_json.get(norm_eps, default_eps),
        "tie_embeddings": config_json.get("tie_word_embeddings", tied),
    }


MIXTRAL: Fields = {"mlp_class_name": "LLaMAMoE", "norm_topk_prob": True}
"""Fields of families with Mixtral's experts, in all layers."""


def read_aliases(config_json: Fields, names: dict[str, str]) -> Fields:
    """Return the values of aliases that transformers also writes, by the class's own name. ``names``: of each alias."""
    return {name: config_json[alias] for alias, name in names.items() if config_json.get(alias) is not None}


def read_experts(config_json: Fields) -> Fields:
    """Return the ModelConfig fields of Mixtral's experts. The defaults are Mixtral's."""
    return MIXTRAL | {
        "n_expert": config_json.get("num_local_experts", 8),
        "n_expert_per_token": config_json.get("num_experts_per_tok", 2),
        "router_aux_loss_coef": config_json.get("router_aux_loss_coef", 0.001),
    }


def write_experts(config: ModelConfig) -> Fields:
    """Invert :func:`read_experts`."""
    return {
        "intermediate_size": config.expert_size,
        "num_experts_per_tok": config.n_expert_per_token,
        "num_local_experts": config.n_expert,
        "output_router_logits": False,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }


def write_common(config: ModelConfig, architecture: str) -> Fields:
    """Return the ``config.json`` entries that all families share. vocab_size is padded, as in the weights."""
    return {
        "architectures": [architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.02,
        "model_type": config.family,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "vocab_size": config.padded_vocab_size,
    }


def write_decoder(config: ModelConfig, architecture: str, **other: Any) -> Fields:
    """Return the ``config.json`` entries that most families share, plus ``other``.

    The caller sets the special token ids.
    """
    values = write_common(config, architecture) | {
        "attention_bias": config.bias or config.attn_bias,
        "attention_dropout": 0.0,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.block_size,
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "num_key_value_heads": config.n_query_groups,
        "pad_token_id": None,  # the default of some classes exceeds small vocabularies
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": write_rope_scaling(config),
        "rope_theta": config.rope_base,
    }
    values = dict(sorted(values.items())) | other
    return values | {name: float(values[name]) for name in _FLOAT_KEYS if values.get(name) is not None}


# transformers 5 rejects the integer 50 for these keys.
_FLOAT_KEYS = (
    "attn_logit_softcapping", "aux_loss_alpha", "clip_qkv", "final_logit_softcapping", "rms_norm_eps",
    "routed_scaling_factor", "router_aux_loss_coef", "swiglu_limit",
)  # fmt: skip


FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(config_json: Fields, layer_types: list[str] | None = None, *, default: int | None = None) -> dict:
    """Return the sliding-window fields of a ModelConfig.

    ``layer_types`` and ``default`` (window size in tokens) are the family's defaults. Without layer types, all layers
    have a sliding window.
    """
    size, types = config_json.get("sliding_window", default), config_json.get("layer_types")
    types, n_layer = layer_types if types is None else types, config_json["num_hidden_layers"]
    if unknown := set(types or ()) - {FULL, SLIDING}:
        raise UserError(f"config.json: layer_types: {sorted(unknown)[0]!r} is not supported; only {FULL} and {SLIDING}")
    if types is not None and len(types) != n_layer:
        raise UserError(f"config.json: layer_types names {len(types)} layers: must be num_hidden_layers {n_layer}")
    if (SLIDING not in types) if types is not None else (size is None):
        return {}
    require_key(bool(size), "sliding_window", size, "must be greater than zero in a model with sliding windows")
    indices = None if types is None or FULL not in types else [int(kind == SLIDING) for kind in types]
    return {"sliding_window_size": size, "sliding_window_indices": indices}


def every_nth_is_full(n_layer: int, n: Any) -> list[str]:
    """Return ``layer_types`` in which every n-th layer has full attention. n is ``sliding_window_pattern``."""
    require_key(is_integer(n, 1), "sliding_window_pattern", n, "must be an integer, 1 or greater")
    return [SLIDING if (i + 1) % n else FULL for i in range(n_layer)]


def write_layer_types(config: ModelConfig) -> list[str]:
    """Return ``layer_types`` with one entry per layer."""
    return [FULL if config.window(layer) is None else SLIDING for layer in range(config.n_layer)]


def write_rope_by_layer(config: ModelConfig) -> Fields:
    """Return the RoPE entries of a model with a local RoPE theta in sliding-window layers.

    transformers 5 reads ``rope_parameters``; transformers 4 reads the other keys.
    """
    full = {"rope_type": "default", "rope_theta": config.rope_base} | (write_rope_scaling(config) or {})
    local = config.rope_local_base_freq or config.rope_base
    return {
        "rope_local_base_freq": local,
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}},
    }


def rope_in_windows(layer_types: list[str]) -> list[int] | None:
    """Return ``rope_indices`` of a model whose full-attention layers have no RoPE (NoPE)."""
    return [0 if kind == SLIDING else -1 for kind in layer_types] if FULL in layer_types else None


def longrope_attention_factor(longest: float, original: int) -> float:
    """Return the default attention factor for a context extended from ``original`` to ``longest`` positions.

    Source: Ding et al. 2024 (LongRoPE); same as in Phi-3's code and transformers.
    """
    factor = longest / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def write_rope_parameters(config: ModelConfig) -> Fields:
    """Return ``rope_parameters`` for classes with another default than no scaling."""
    return (write_rope_scaling(config) or {"rope_type": "default"}) | {"rope_theta": config.rope_base}


def write_rope_scaling(config: ModelConfig) -> Fields | None:
    """Return ``rope_scaling``, which both transformers 4 and 5 read."""
    kind, adjustments = config.rope_kind, config.rope_adjustments
    if kind is None or adjustments is None:
        return None
    names = {"original_max_seq_len": "original_max_position_embeddings"}
    return {"rope_type": kind} | {names.get(name, name): value for name, value in adjustments.items()}
