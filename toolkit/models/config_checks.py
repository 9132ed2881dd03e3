"""What the fields of a ModelConfig may be, each by itself and together; a mistake is one line that names the flag."""

from __future__ import annotations

import functools
import math
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.models.config import ModelConfig

FLAG = "--model_config."

# Far beyond every known model. Building the layers takes time even without memory for weights, and a product of
# larger sizes overflows.
MAX_LAYERS, MAX_SIZE = 1024, 2**24
_MAX_EXPERTS = 2**17  # over all layers

# The kinds of rope_adjustments: the keys that each must have and those that it may have, as LitGPT names them.
ROPE_ADJUSTMENTS = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}, set()),
    "yarn": (
        {"factor", "beta_fast", "beta_slow", "original_max_seq_len"},
        {"mscale", "mscale_all_dim", "attention_factor", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor", "original_max_seq_len", "attention_factor"}, set()),
}
# Of latent_attention: its keys, as Hugging Face's config.json has them; q_lora_rank may be left out.
LATENT_ATTENTION = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_PER_LAYER = {"sliding_window_indices": (0, 1), "rope_indices": (-1, 0, 1), "moe_indices": (0, 1)}
_MAY_BE_ZERO = {"n_expert", "n_expert_per_token", "norm_eps", "router_aux_loss_coef"}
_MAY_BE_ANY_NUMBER = {"rotary_percentage", "attention_multiplier", "embedding_multiplier", "residual_multiplier"}
# Fields that only models with experts have, and their values in all others.
_OF_EXPERTS = {
    "n_expert": 0, "n_expert_per_token": 0, "moe_intermediate_size": None, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "router_scores": "softmax", "n_expert_groups": None, "n_topk_groups": None,
    "shared_expert_intermediate_size": None, "shared_expert_gate": True, "swiglu_limit": None, "moe_indices": None,
}  # fmt: skip
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", dict: "names with values"}


def check_values(config: ModelConfig) -> None:
    """Refuse a value of the wrong type or out of its range, before anything is derived from it.

    Raises:
        UserError: names the flag, the value and what it must be.
    """
    for name, (kinds, choices) in _kinds(type(config)).items():
        value = getattr(config, name)
        if choices:
            if value not in choices:
                raise UserError(f"{FLAG}{name} {value}: must be one of {', '.join(choices)}")
        elif not _is_any(value, kinds):
            wanted = " or ".join(_NAMES.get(kind, "a list of whole numbers") for kind in kinds if kind is not NoneType)
            raise UserError(f"{FLAG}{name} {value!r}: must be {wanted}")
        elif type(value) in (int, float) and not _is_in_range(name, value):
            least = "must not be negative" if name in _MAY_BE_ZERO else "must be greater than zero"
            raise UserError(f"{FLAG}{name} {value}: {least}")
        elif type(value) is int and value > (most := MAX_LAYERS if name == "n_layer" else MAX_SIZE):
            raise UserError(f"{FLAG}{name} {value}: must be at most {most:,}")
    if not 0 <= config.rotary_percentage <= 1:
        raise UserError(f"{FLAG}rotary_percentage {config.rotary_percentage}: must be between 0 and 1")
    if config.rope_base <= 1 and rope_kind(config.rope_adjustments) == "yarn":
        raise UserError(
            f"{FLAG}rope_base {config.rope_base}: must be greater than 1 with YaRN, which takes its logarithm"
        )
    if rope_kind(config.rope_adjustments) is not None:
        for name, value in config.rope_adjustments.items():
            _check_adjustment(name, value)


@functools.cache
def _kinds(config_class: type[ModelConfig]) -> dict[str, tuple[tuple[type, ...], tuple[str, ...]]]:
    """Of each field: the types that its value may have, or the words."""
    found = {}
    for name, hint in get_type_hints(config_class).items():
        if get_origin(hint) is Literal:
            found[name] = ((str,), get_args(hint))
            continue
        kinds = get_args(hint) if get_origin(hint) not in (list, dict) else (hint,)
        found[name] = (tuple(get_origin(kind) or kind for kind in kinds or (hint,)), ())
    return found


def _is_any(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of the types; whole numbers are numbers, and truth values are not."""
    if list in kinds and type(value) in (list, tuple):
        return all(type(one) is int for one in value)
    if float in kinds and type(value) in (int, float):
        return math.isfinite(value)
    return type(value) in kinds


def _is_in_range(name: str, value: float) -> bool:
    return value > 0 or name in _MAY_BE_ANY_NUMBER or value == 0 and name in _MAY_BE_ZERO


def rope_kind(adjustments: dict[str, Any] | None) -> str | None:
    """Which of :data:`ROPE_ADJUSTMENTS` these are; None where there are none.

    Raises:
        UserError: none of them.
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
        is_right, wanted = type(value) is bool, "true or false"
    elif name in ("short_factor", "long_factor"):
        is_right = type(value) in (list, tuple) and all(_is_any(one, (float,)) and one > 0 for one in value)
        wanted = "a list of numbers greater than zero"
    else:
        least = 0 if name in ("mscale", "mscale_all_dim") else None
        is_right = _is_any(value, (float,)) and (value > 0 or value == least)
        wanted = "a number greater than zero"
    if not is_right:
        raise UserError(f"{FLAG}rope_adjustments: {name} {value!r}: must be {wanted}")


def check_together(config: ModelConfig) -> None:
    """Refuse combinations that no model has, once everything that is derived is there.

    Raises:
        UserError: names a flag, its value and what it must be.
    """
    _check_latent_attention(config)
    if config.n_head % config.n_query_groups:
        raise UserError(f"{FLAG}n_query_groups {config.n_query_groups}: must divide n_head {config.n_head}")
    if config.position_embedding == "rope" and config.rope_n_elem % 2:
        raise UserError(f"{FLAG}head_size {config.head_size}: an odd number of elements cannot be rotated")
    if config.padded_vocab_size is not None and config.padded_vocab_size < (config.vocab_size or 0):
        raise UserError(
            f"{FLAG}padded_vocab_size {config.padded_vocab_size}: smaller than vocab_size {config.vocab_size}"
        )
    if config.shared_attention_norm and not config.parallel_residual:
        raise UserError(f"{FLAG}shared_attention_norm true: needs {FLAG}parallel_residual true")
    if config.norm_qk_type == "per_head" and not (config.norm_class_name == "LayerNorm" and config.norm_affine):
        raise UserError(f"{FLAG}norm_qk_type per_head: needs a LayerNorm with weights as norm_class_name")
    if config.attention_sinks and config.attention_logit_softcapping is not None:
        raise UserError(f"{FLAG}attention_sinks True: does not go with attention_logit_softcapping")
    _check_layers(config)
    _check_experts(config)


def _check_layers(config: ModelConfig) -> None:
    """Refuse lists of values per layer, and of factors per rotated pair, that have another length."""
    for name, allowed in _PER_LAYER.items():
        values = getattr(config, name)
        if values is not None and (len(values) != config.n_layer or set(values) - set(allowed)):
            raise UserError(
                f"{FLAG}{name} {values}: must hold {' or '.join(map(str, allowed))} for each of the "
                f"{config.n_layer} layers"
            )
    if config.rope_indices is not None and 1 in config.rope_indices and config.rope_local_base_freq is None:
        raise UserError(f"{FLAG}rope_indices: layers of index 1 need {FLAG}rope_local_base_freq")
    for name in ("short_factor", "long_factor") if rope_kind(config.rope_adjustments) == "longrope" else ():
        if (n := len(config.rope_adjustments[name])) != (pairs := config.rope_n_elem // 2):
            raise UserError(
                f"{FLAG}rope_adjustments: {name} has {n} factors; heads with {config.rope_n_elem} rotated elements "
                f"need {pairs}"
            )


def _check_latent_attention(config: ModelConfig) -> None:
    if config.latent_attention is None:
        return
    sizes = config.latent_attention
    is_size = {
        name: n is None and name == "q_lora_rank" or type(n) is int and 0 < n <= MAX_SIZE for name, n in sizes.items()
    }
    if sizes.keys() != set(LATENT_ATTENTION) or not all(is_size.values()):
        raise UserError(
            f"{FLAG}latent_attention {sizes}: must have {', '.join(LATENT_ATTENTION)}, all from 1 to {MAX_SIZE:,}"
        )
    plain = {"position_embedding": "rope", "norm_qk": False, "clip_qkv": None, "attention_sinks": False}
    plain |= {"attention_logit_softcapping": None, "bias": False, "attn_bias": False, "n_query_groups": config.n_head}
    plain |= {"head_size": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], "rotary_percentage": 1.0}
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise UserError(f"{FLAG}{name} {getattr(config, name)}: must be {value} with latent_attention")


def _check_experts(config: ModelConfig) -> None:
    """Refuse numbers of experts that no model has, and widths that the grouped matrix products do not take."""
    if config.mlp_class_name != "LLaMAMoE":
        for name, default in _OF_EXPERTS.items():
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
    width = "intermediate_size" if config.moe_intermediate_size is None else "moe_intermediate_size"
    for name in ("n_embd", width):
        if (value := getattr(config, name)) % 8:
            raise UserError(f"{FLAG}{name} {value}: must be a multiple of 8 in a model with experts")
    if config.parallel_residual:
        raise UserError(f"{FLAG}parallel_residual True: must be False in a model with experts")
    _check_expert_groups(config)


def _check_expert_groups(config: ModelConfig) -> None:
    groups, chosen, n = config.n_expert_groups, config.n_topk_groups, config.n_expert
    if groups is None:
        if chosen is not None:
            raise UserError(f"{FLAG}n_topk_groups {chosen}: needs {FLAG}n_expert_groups")
        return
    least = 2 if config.router_scores == "sigmoid" else 1  # experts of a group whose scores are added up
    if n % groups or n // groups < least:
        raise UserError(f"{FLAG}n_expert_groups {groups}: must divide n_expert {n} into groups of {least} or more")
    if chosen is None or chosen > groups or config.n_expert_per_token > chosen * n // groups:
        raise UserError(
            f"{FLAG}n_topk_groups {chosen}: must be between 1 and n_expert_groups {groups}, and its experts at "
            f"least n_expert_per_token {config.n_expert_per_token}"
        )
