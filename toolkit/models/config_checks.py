"""Validation of ModelConfig fields, individually and in combination; errors are one line and name the flag."""

from __future__ import annotations

import functools
import math
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.models.config import ModelConfig

FLAG = "--model_config."

# Far beyond every known model. Building layers takes time even on the meta device, and products of larger sizes
# overflow.
MAX_LAYERS, MAX_SIZE = 1024, 2**24
_MAX_EXPERTS = 2**17  # over all layers

# Types of rope_adjustments, each with its required and optional keys, under LitGPT's names.
ROPE_ADJUSTMENTS = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}, set()),
    "yarn": (
        {"factor", "beta_fast", "beta_slow", "original_max_seq_len"},
        {"mscale", "mscale_all_dim", "attention_factor", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor", "original_max_seq_len", "attention_factor"}, set()),
}
# Keys of latent_attention, as in Hugging Face's config.json; q_lora_rank is optional.
LATENT_ATTENTION = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_PER_LAYER = {"sliding_window_indices": (0, 1), "rope_indices": (-1, 0, 1), "moe_indices": (0, 1)}
_NONNEGATIVE = {"n_expert", "n_expert_per_token", "norm_eps", "router_aux_loss_coef"}
_UNBOUNDED = {"rotary_percentage", "attention_multiplier", "embedding_multiplier", "residual_multiplier"}
# Fields that require experts, with their defaults.
_MOE_DEFAULTS = {
    "n_expert": 0, "n_expert_per_token": 0, "moe_intermediate_size": None, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "router_scores": "softmax", "n_expert_groups": None, "n_topk_groups": None,
    "shared_expert_intermediate_size": None, "shared_expert_gate": True, "swiglu_limit": None, "moe_indices": None,
}  # fmt: skip
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping"}


def check_values(config: ModelConfig) -> None:
    """Check the type and range of each value, before other fields are derived from it.

    Raises:
        UserError: Names the flag, the value and the valid values.
    """
    for name, (types, choices) in _field_types(type(config)).items():
        value = getattr(config, name)
        if choices:
            if value not in choices:
                raise UserError(f"{FLAG}{name} {value}: must be one of {', '.join(choices)}")
        elif not _has_type(value, types):
            expected = " or ".join(_TYPE_NAMES.get(t, "a list of integers") for t in types if t is not NoneType)
            raise UserError(f"{FLAG}{name} {value!r}: must be {expected}")
        elif type(value) in (int, float) and not _is_in_range(name, value):
            bound = "must not be negative" if name in _NONNEGATIVE else "must be greater than zero"
            raise UserError(f"{FLAG}{name} {value}: {bound}")
        elif type(value) is int and value > (maximum := MAX_LAYERS if name == "n_layer" else MAX_SIZE):
            raise UserError(f"{FLAG}{name} {value}: must be at most {maximum:,}")
    if not 0 <= config.rotary_percentage <= 1:
        raise UserError(f"{FLAG}rotary_percentage {config.rotary_percentage}: must be between 0 and 1")
    if config.rope_base <= 1 and rope_kind(config.rope_adjustments) == "yarn":
        raise UserError(
            f"{FLAG}rope_base {config.rope_base}: must be greater than 1 with YaRN, which uses its logarithm"
        )
    if rope_kind(config.rope_adjustments) is not None:
        for name, value in config.rope_adjustments.items():
            _check_adjustment(name, value)


@functools.cache
def _field_types(config_class: type[ModelConfig]) -> dict[str, tuple[tuple[type, ...], tuple[str, ...]]]:
    """The valid types and the choices of each field."""
    found = {}
    for name, hint in get_type_hints(config_class).items():
        if get_origin(hint) is Literal:
            found[name] = ((str,), get_args(hint))
            continue
        types = get_args(hint) if get_origin(hint) not in (list, dict) else (hint,)
        found[name] = (tuple(get_origin(t) or t for t in types or (hint,)), ())
    return found


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value is of one of the types; integers are numbers, booleans are not."""
    if list in types and type(value) in (list, tuple):
        return all(type(item) is int for item in value)
    if float in types and type(value) in (int, float):
        return math.isfinite(value)
    return type(value) in types


def _is_in_range(name: str, value: float) -> bool:
    return value > 0 or name in _UNBOUNDED or (value == 0 and name in _NONNEGATIVE)


def rope_kind(adjustments: dict[str, Any] | None) -> str | None:
    """The key of :data:`ROPE_ADJUSTMENTS` whose keys these are; None without adjustments.

    Raises:
        UserError: The keys match none.
    """
    if adjustments is None:
        return None
    for kind, (required, optional) in ROPE_ADJUSTMENTS.items():
        if required <= adjustments.keys() <= required | optional:
            return kind
    known = "; ".join(f"{kind}: {', '.join(sorted(required))}" for kind, (required, _) in ROPE_ADJUSTMENTS.items())
    raise UserError(f"{FLAG}rope_adjustments {adjustments}: the keys must be one of {known}")


def _check_adjustment(name: str, value: Any) -> None:
    if name == "truncate":
        is_valid, expected = type(value) is bool, "true or false"
    elif name in ("short_factor", "long_factor"):
        is_valid = type(value) in (list, tuple) and all(_has_type(item, (float,)) and item > 0 for item in value)
        expected = "a list of numbers greater than zero"
    else:
        may_be_zero = name in ("mscale", "mscale_all_dim")
        is_valid = _has_type(value, (float,)) and (value > 0 or (value == 0 and may_be_zero))
        expected = "a number greater than zero"
    if not is_valid:
        raise UserError(f"{FLAG}rope_adjustments: {name} {value!r}: must be {expected}")


def check_together(config: ModelConfig) -> None:
    """Check combinations of fields, after all derived fields are set.

    Raises:
        UserError: Names a flag, its value and the valid values.
    """
    _check_latent_attention(config)
    if config.n_head % config.n_query_groups:
        raise UserError(f"{FLAG}n_query_groups {config.n_query_groups}: must divide n_head {config.n_head}")
    if config.position_embedding == "rope" and config.rope_n_elem % 2:
        raise UserError(f"{FLAG}head_size {config.head_size}: RoPE needs an even number of rotated dimensions")
    if config.padded_vocab_size is not None and config.padded_vocab_size < (config.vocab_size or 0):
        raise UserError(
            f"{FLAG}padded_vocab_size {config.padded_vocab_size}: smaller than vocab_size {config.vocab_size}"
        )
    if config.shared_attention_norm and not config.parallel_residual:
        raise UserError(f"{FLAG}shared_attention_norm true: needs {FLAG}parallel_residual true")
    if config.norm_qk_type == "per_head" and not (config.norm_class_name == "LayerNorm" and config.norm_affine):
        raise UserError(f"{FLAG}norm_qk_type per_head: needs norm_class_name LayerNorm with norm_affine true")
    if config.attention_sinks and config.attention_logit_softcapping is not None:
        raise UserError(f"{FLAG}attention_sinks True: cannot be combined with attention_logit_softcapping")
    _check_layers(config)
    _check_experts(config)


def _check_layers(config: ModelConfig) -> None:
    """Check lists with one value per layer or one factor per rotated pair."""
    for name, allowed in _PER_LAYER.items():
        values = getattr(config, name)
        if values is not None and (len(values) != config.n_layer or set(values) - set(allowed)):
            raise UserError(
                f"{FLAG}{name} {values}: must contain {' or '.join(map(str, allowed))} for each of the "
                f"{config.n_layer} layers"
            )
    if config.rope_indices is not None and 1 in config.rope_indices and config.rope_local_base_freq is None:
        raise UserError(f"{FLAG}rope_indices: layers with index 1 need {FLAG}rope_local_base_freq")
    for name in ("short_factor", "long_factor") if rope_kind(config.rope_adjustments) == "longrope" else ():
        if (n := len(config.rope_adjustments[name])) != (pairs := config.rope_n_elem // 2):
            raise UserError(
                f"{FLAG}rope_adjustments: {name} has {n} factors; heads with {config.rope_n_elem} rotated dimensions "
                f"need {pairs}"
            )


def _check_latent_attention(config: ModelConfig) -> None:
    if config.latent_attention is None:
        return
    sizes = config.latent_attention
    is_size = {
        name: (n is None and name == "q_lora_rank") or (type(n) is int and 0 < n <= MAX_SIZE)
        for name, n in sizes.items()
    }
    if sizes.keys() != set(LATENT_ATTENTION) or not all(is_size.values()):
        raise UserError(
            f"{FLAG}latent_attention {sizes}: must have {', '.join(LATENT_ATTENTION)}, each between 1 and {MAX_SIZE:,}"
        )
    required = {"position_embedding": "rope", "norm_qk": False, "clip_qkv": None, "attention_sinks": False}
    required |= {
        "attention_logit_softcapping": None,
        "bias": False,
        "attn_bias": False,
        "n_query_groups": config.n_head,
    }
    required |= {"head_size": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], "rotary_percentage": 1.0}
    for name, value in required.items():
        if getattr(config, name) != value:
            raise UserError(f"{FLAG}{name} {getattr(config, name)}: must be {value} with latent_attention")


def _check_experts(config: ModelConfig) -> None:
    """Check numbers of experts, and widths that grouped matrix products support."""
    if config.mlp_class_name != "LLaMAMoE":
        for name, default in _MOE_DEFAULTS.items():
            if (value := getattr(config, name)) != default:
                raise UserError(f"{FLAG}{name} {value}: needs {FLAG}mlp_class_name LLaMAMoE")
        return
    if not 1 <= config.n_expert_per_token <= config.n_expert:
        raise UserError(
            f"{FLAG}n_expert_per_token {config.n_expert_per_token}: must be between 1 and n_expert {config.n_expert}"
        )
    if config.n_expert * config.n_layer > _MAX_EXPERTS:
        raise UserError(
            f"{FLAG}n_expert {config.n_expert}: must be at most {_MAX_EXPERTS // config.n_layer:,} in each of the "
            f"{config.n_layer} layers"
        )
    expert_size = "intermediate_size" if config.moe_intermediate_size is None else "moe_intermediate_size"
    for name in ("n_embd", expert_size):
        if (value := getattr(config, name)) % 8:
            raise UserError(f"{FLAG}{name} {value}: must be a multiple of 8 in a model with experts")
    if config.parallel_residual:
        raise UserError(f"{FLAG}parallel_residual True: must be False in a model with experts")
    _check_expert_groups(config)


def _check_expert_groups(config: ModelConfig) -> None:
    groups, topk, n = config.n_expert_groups, config.n_topk_groups, config.n_expert
    if groups is None:
        if topk is not None:
            raise UserError(f"{FLAG}n_topk_groups {topk}: needs {FLAG}n_expert_groups")
        return
    min_size = 2 if config.router_scores == "sigmoid" else 1  # a group is ranked by its best 2 experts or best one
    if n % groups or n // groups < min_size:
        raise UserError(f"{FLAG}n_expert_groups {groups}: must divide n_expert {n} into groups of {min_size} or more")
    if topk is None or topk > groups or config.n_expert_per_token > topk * n // groups:
        raise UserError(
            f"{FLAG}n_topk_groups {topk}: must be between 1 and n_expert_groups {groups}, and must cover at "
            f"least n_expert_per_token {config.n_expert_per_token} experts"
        )
