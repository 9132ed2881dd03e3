"""Keys of Hugging Face's ``config.json``: value types and corresponding ModelConfig fields."""

import math
import re
from collections.abc import Callable
from typing import Any

from toolkit.errors import UserError
from toolkit.models.config_checks import MAX_LAYERS, MAX_SIZE


def is_number(value: Any, minimum: float = -math.inf) -> bool:
    """Whether a JSON value is a finite number >= ``minimum``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= minimum


def is_positive(value: Any) -> bool:
    """Whether a JSON value is a finite number > 0."""
    return is_number(value) and value > 0


def is_integer(value: Any, minimum: int) -> bool:
    """Whether a JSON value is an integer >= ``minimum``."""
    return isinstance(value, int) and is_number(value, minimum)


def _is_list_of(value: Any, item_type: type) -> bool:
    return isinstance(value, list) and all(type(item) is item_type for item in value)


# (check, description, keys). ModelConfig checks other values that it takes unchanged; null vocab_size and
# intermediate_size have a meaning there. Keys that may also be null are in _NULLABLE.
_TYPES: tuple[tuple[Callable[[Any], bool], str, tuple[str, ...]], ...] = (
    (lambda v: is_integer(v, 1), "an integer, 1 or greater", (
        "vocab_size", "intermediate_size", "num_hidden_layers", "num_kv_heads", "ffn_hidden_size",
        "query_pre_attn_scalar", "original_max_position_embeddings", "no_rope_layer_interval", "decoder_sparse_step",
        "moe_layer_interval", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    )),
    (lambda v: is_integer(v, 0), "an integer, 0 or greater", (
        "max_window_layers", "num_ln_in_parallel_attn", "first_k_dense_replace", "n_shared_experts",
        "moe_num_shared_experts", "moe_layer_start_index", "n_group",
    )),
    (is_positive, "a number greater than zero", (
        "rotary_emb_base", "logits_scaling", "logit_scale", "swiglu_limit",
    )),
    (lambda v: is_number(v, 0), "a number, not less than zero", ("rotary_pct", "aux_loss_alpha")),
    (is_number, "a number", ("embedding_multiplier", "attention_multiplier", "residual_multiplier")),
    (lambda v: isinstance(v, bool), "true or false", (
        "attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "use_bias", "bias", "alibi",
        "use_sliding_window", "use_parallel_residual", "parallel_attn", "new_decoder_architecture", "multi_query",
        "qk_layernorm", "norm_topk_prob", "is_causal", "rope_interleave",
        "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "output_router_logits",
        "attention_out_bias", "use_qk_norm",
    )),
    (lambda v: isinstance(v, dict), "a JSON object", ("rope_scaling", "rope_parameters")),
    (lambda v: _is_list_of(v, str), "a list of strings", ("layer_types", "mlp_layer_types")),
    (lambda v: _is_list_of(v, int), "a list of integers", ("no_rope_layers", "mlp_only_layers")),
)  # fmt: skip
_NULLABLE = {
    "num_kv_heads", "ffn_hidden_size", "num_ln_in_parallel_attn", "n_group", "first_k_dense_replace", "norm_topk_prob",
    "rope_interleave", "original_max_position_embeddings", "rope_scaling",
    "rope_parameters", "layer_types", "mlp_layer_types", "no_rope_layers", "mlp_only_layers",
}  # fmt: skip
_INTEGERS = {key for *_, keys in _TYPES[:2] for key in keys}


def require_key(ok: bool, key: str, value: Any, hint: str) -> None:
    """Raise UserError about a ``config.json`` key unless ``ok``. ``hint`` gives the valid values or the reason."""
    if not ok:
        raise UserError(f"config.json: {key} {value!r}: {hint}")


def require_types(config_json: dict[str, Any]) -> None:
    """Check types and ranges of the values in a ``config.json``."""
    for is_valid, expected, keys in _TYPES:
        for key in keys:
            value = config_json.get(key)
            if key in config_json and not (value is None and key in _NULLABLE):
                require_key(is_valid(value), key, value, f"must be {expected}")
    for key in _INTEGERS & config_json.keys():
        value, maximum = config_json[key], MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        require_key((value or 0) <= maximum, key, value, f"must be at most {maximum:,}")


# ModelConfig fields and their config.json keys; the first key present is used.
_HF_KEYS = {
    "block_size": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "padded_vocab_size": ("vocab_size",),
    "n_layer": ("num_hidden_layers", "n_layer"),
    "n_head": ("num_attention_heads", "n_head"),
    "n_query_groups": ("num_key_value_heads", "num_kv_heads"),
    "n_embd": ("hidden_size", "n_embd"),
    "head_size": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "rotary_percentage": ("rotary_pct", "partial_rotary_factor"),
    "rope_base": ("rotary_emb_base", "rope_theta"),
    "rope_adjustments": ("rope_scaling", "rope_parameters"),
    "rope_local_base_freq": ("rope_local_base_freq",),
    "rope_indices": ("no_rope_layers", "layer_types"),
    "sliding_window_size": ("sliding_window",),
    "sliding_window_indices": ("layer_types",),
    "attention_scores_scalar": ("query_pre_attn_scalar",),
    "query_scaling_beta": ("llama_4_scaling_beta",),
    "attention_multiplier": ("attention_multiplier",),
    "attention_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "clip_qkv": ("clip_qkv",),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "norm_topk_prob": ("norm_topk_prob",),
    "n_expert": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "n_expert_per_token": ("num_experts_per_tok", "moe_k"),
    "n_expert_groups": ("n_group",),
    "n_topk_groups": ("topk_group",),
    "moe_indices": ("mlp_only_layers", "mlp_layer_types", "first_k_dense_replace"),
    "shared_expert_intermediate_size": (
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "moe_num_shared_experts",
    ),
    "latent_attention": ("kv_lora_rank",),
    "tie_embeddings": ("tie_word_embeddings",),
}
_FIELD = re.compile(rf"--model_config\.(\w+)|\b({'|'.join(_HF_KEYS)})\b")


def translate_fields(config_json: dict[str, Any], message: str) -> str:
    """Replace ModelConfig field names in a message with ``config.json`` keys."""

    def key_of(match: re.Match[str]) -> str:
        field = match[1] or match[2]
        keys = _HF_KEYS.get(field, (field,))
        return next((key for key in keys if key in config_json), keys[0])

    prefix, flag = "config.json: ", "--model_config."
    if message.startswith(prefix) or flag not in message:
        return message if message.startswith(prefix) else prefix + message
    message = message.replace("; such a model cannot be exported", "; other values are not supported")
    return prefix + _FIELD.sub(key_of, message)
