"""Validate the fields of a ModelConfig and their combinations, and derive fields from others.

Errors are one line and name the flag.
"""

import functools
import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from toolkit.errors import UserError, require_option

GROUP, FLAG = "model_config.", "--model_config."

# Far beyond any known model. Building layers takes time even on the meta device, and products of larger sizes
# overflow.
MAX_LAYERS, MAX_SIZE = 1024, 2**24
MAX_EXPERTS = 2**17  # over all layers

HeadName = Literal["classification", "reward", "token_reward"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]  # of transformers
HEAD_FIELDS = ("head", "labels", "problem_type")
"""Fields of a model that scores texts instead of predicting tokens. They are not options."""

# Types of rope_adjustments, each with its required and optional keys, under LitGPT's names.
ROPE_ADJUSTMENTS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}, set()),
    "yarn": (
        {"factor", "beta_fast", "beta_slow", "original_max_seq_len"},
        {"mscale", "mscale_all_dim", "attention_factor", "truncate"},
    ),
    "proportional": ({"partial_rotary_factor"}, {"factor"}),
    "longrope": ({"short_factor", "long_factor", "original_max_seq_len", "attention_factor"}, set()),
}

# Keys of latent_attention, as in Hugging Face's config.json; q_lora_rank is optional.
LATENT_ATTENTION = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

LINEAR_ATTENTION = ("n_key_heads", "n_value_heads", "key_size", "value_size", "conv_size")

# Fields with one value per layer, and the valid values.
PER_LAYER = {
    "sliding_window_indices": (0, 1), "rope_indices": (-1, 0, 1), "moe_indices": (0, 1),
    "linear_attention_indices": (0, 1),
}  # fmt: skip
# Fields with a default that depends on other fields: on which.
DERIVED = {
    "n_query_groups": {"n_head"}, "head_size": {"n_head", "n_embd", "latent_attention"},
    "intermediate_size": {"n_embd"}, "padded_vocab_size": {"vocab_size", "padding_multiple"},
}  # fmt: skip
# Fields that require experts.
MOE_FIELDS = (
    "n_expert", "n_expert_per_token", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor",
    "router_scores", "n_expert_groups", "n_topk_groups", "shared_expert_intermediate_size", "shared_expert_gate",
    "swiglu_limit", "moe_indices",
)  # fmt: skip

_NONNEGATIVE = {"n_expert", "n_expert_per_token", "norm_eps", "query_scaling_beta", "router_aux_loss_coef"}
_QAT_DTYPES = ("float32", "bfloat16", "float16")
_UNBOUNDED = {"rotary_percentage", "attention_multiplier", "embedding_multiplier", "residual_multiplier"}
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping"}


def check_values(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Check the types (``hints``) and ranges of the fields before derived fields are computed."""
    for name, hint in hints.items():
        value, (types, choices) = values[name], types_and_choices(hint)
        if choices:
            require_option(value in choices, f"{GROUP}{name}", value, f"must be one of {', '.join(choices)}")
        elif not has_type(value, types):
            expected = " or ".join(_TYPE_NAMES.get(t, "a list of integers") for t in types if t is not NoneType)
            raise UserError(f"{FLAG}{name} {value!r}: must be {expected}")
        elif type(value) in (int, float):
            bound = "must not be negative" if name in _NONNEGATIVE else "must be greater than zero"
            is_in_range = value > 0 or name in _UNBOUNDED or (value == 0 and name in _NONNEGATIVE)
            require_option(is_in_range, f"{GROUP}{name}", value, bound)
            maximum = MAX_LAYERS if name == "n_layer" else MAX_SIZE
            is_small = type(value) is float or value <= maximum
            require_option(is_small, f"{GROUP}{name}", value, f"must be at most {maximum:,}")
    rotary, base, adjustments = (values[name] for name in ("rotary_percentage", "rope_base", "rope_adjustments"))
    require_option(0 <= rotary <= 1, f"{GROUP}rotary_percentage", rotary, "must be between 0 and 1")
    hint = "must be greater than 1 with YaRN, which uses its logarithm"
    require_option(base > 1 or rope_kind(adjustments) != "yarn", f"{GROUP}rope_base", base, hint)
    if rope_kind(adjustments) is not None:
        for name, value in adjustments.items():
            _check_adjustment(name, value)
    name, qat = values["name"], values["qat"]
    is_valid = isinstance(qat, dict) and qat.keys() == {"weights", "group_size", "dtype"}
    hint = f"must have weights, group_size, and a dtype of {', '.join(_QAT_DTYPES)}"
    require_option(qat is None or (is_valid and qat["dtype"] in _QAT_DTYPES), f"{GROUP}qat", qat, hint)
    require_option(name.isprintable(), f"{GROUP}name", ascii(name), "must be printable text")


def derived_values(config: Any) -> dict[str, Any]:
    """Return the values of a ModelConfig's :data:`DERIVED` fields, and completed values of others."""
    derived: dict[str, Any] = {
        "n_query_groups": config.n_query_groups or config.n_head,
        "head_size": config.head_size or _derive_head_size(config),
        "intermediate_size": config.intermediate_size or 4 * config.n_embd,
    }
    if config.latent_attention is not None:
        derived["latent_attention"] = {"q_lora_rank": None} | config.latent_attention
    if config.vocab_size is not None and config.padded_vocab_size is None:
        derived["padded_vocab_size"] = -(-config.vocab_size // config.padding_multiple) * config.padding_multiple
    for name in PER_LAYER:  # LitGPT's lists may be longer
        if (values := getattr(config, name)) is not None:
            derived[name] = list(values[: config.n_layer])
    return derived


def _derive_head_size(config: Any) -> int:
    sizes = config.latent_attention or {}
    parts = [n for name in ("qk_nope_head_dim", "qk_rope_head_dim") if isinstance(n := sizes.get(name), int)]
    if len(parts) == 2:
        return sum(parts)
    config.require(config.n_embd % config.n_head == 0, "n_embd", f"must be a multiple of n_head {config.n_head}")
    return config.n_embd // config.n_head


def check_combinations(config: Any) -> None:
    """Check the combinations of a ModelConfig's fields after all derived fields are set."""
    require, padded = config.require, config.padded_vocab_size
    _check_latent_attention(config)
    _check_linear_attention(config)
    require(config.n_head % config.n_query_groups == 0, "n_query_groups", f"must divide n_head {config.n_head}")
    is_even = config.position_embedding != "rope" or config.rope_n_elem % 2 == 0
    require(is_even, "head_size", "RoPE needs an even number of rotated dimensions")
    is_covered = padded is None or padded >= (config.vocab_size or 0)
    require(is_covered, "padded_vocab_size", f"smaller than vocab_size {config.vocab_size}")
    has_norm = not config.shared_attention_norm or config.parallel_residual
    require(has_norm, "shared_attention_norm", f"needs {FLAG}parallel_residual true")
    has_weights = config.norm_class_name == "LayerNorm" and config.norm_affine
    hint = "needs norm_class_name LayerNorm with norm_affine true"
    require(config.norm_qk_type != "per_head" or has_weights, "norm_qk_type", hint)
    has_yarn = config.query_scaling_beta is None or config.rope_kind == "yarn"
    require(has_yarn, "query_scaling_beta", f"needs YaRN in {FLAG}rope_adjustments")
    has_softcap = config.attention_logit_softcapping is not None
    hint = "is not supported with attention_logit_softcapping; remove one of them"
    require(not (config.attention_sinks and has_softcap), "attention_sinks", hint)
    _check_layers(config)
    _check_experts(config)
    _check_head(config)


def _check_layers(config: Any) -> None:
    """Check lists with one value per layer or per rotated pair."""
    for name, allowed in PER_LAYER.items():
        values, listed = getattr(config, name), " or ".join(map(str, allowed))
        is_valid = values is None or (len(values) == config.n_layer and set(values) <= set(allowed))
        config.require(is_valid, name, f"must contain {listed} for each of the {config.n_layer} layers")
    if 1 in (config.rope_indices or ()) and config.rope_local_base_freq is None:
        raise UserError(f"{FLAG}rope_indices: layers with index 1 need {FLAG}rope_local_base_freq")
    for name in ("short_factor", "long_factor") if config.rope_kind == "longrope" else ():
        if (n := len(config.rope_adjustments[name])) != (pairs := config.rope_n_elem // 2):
            raise UserError(
                f"{FLAG}rope_adjustments: {name} has {n} factors; heads with {config.rope_n_elem} rotated dimensions "
                f"need {pairs}"
            )


def _check_experts(config: Any) -> None:
    """Check the expert counts of a ModelConfig, and that grouped_mm supports the widths."""
    require = config.require
    if config.mlp_class_name != "LLaMAMoE":
        for name in MOE_FIELDS:
            is_default = getattr(config, name) == getattr(type(config), name)
            require(is_default, name, f"needs {FLAG}mlp_class_name LLaMAMoE")
        return
    n, k = config.n_expert, config.n_expert_per_token
    require(1 <= k <= n, "n_expert_per_token", f"must be between 1 and n_expert {n}")
    most = MAX_EXPERTS // config.n_layer
    require(n <= most, "n_expert", f"must be at most {most:,} in each of the {config.n_layer} layers")
    for name in ("n_embd", "intermediate_size" if config.moe_intermediate_size is None else "moe_intermediate_size"):
        require(getattr(config, name) % 8 == 0, name, "must be a multiple of 8 in a model with experts")
    require(not config.parallel_residual, "parallel_residual", "must be False in a model with experts")
    groups, topk = config.n_expert_groups, config.n_topk_groups
    if groups is None:
        require(topk is None, "n_topk_groups", f"needs {FLAG}n_expert_groups")
        return
    size = 2 if config.router_scores == "sigmoid" else 1  # a group is ranked by its best 2 experts or best one
    is_valid = n % groups == 0 and n // groups >= size
    require(is_valid, "n_expert_groups", f"must divide n_expert {n} into groups of {size} or more")
    is_valid = topk is not None and topk <= groups and k <= topk * n // groups
    hint = f"must be between 1 and n_expert_groups {groups}, and must cover at least n_expert_per_token {k} experts"
    require(is_valid, "n_topk_groups", hint)


def _check_latent_attention(config: Any) -> None:
    """Check the sizes of a ModelConfig's latent attention, and the fields that it determines."""
    sizes = config.latent_attention
    if sizes is None:
        return
    _check_sizes(config, "latent_attention", LATENT_ATTENTION)
    required = {
        "position_embedding": "rope", "norm_qk": False, "clip_qkv": None, "attention_sinks": False,
        "attention_logit_softcapping": None, "bias": False, "attn_bias": False, "attn_proj_bias": False,
        "n_query_groups": config.n_head,
        "head_size": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], "rotary_percentage": 1.0,
        "query_scaling_beta": None, "attention_gate": False,
    }  # fmt: skip
    for name, value in required.items():
        config.require(getattr(config, name) == value, name, f"must be {value} with latent_attention")


def _check_linear_attention(config: Any) -> None:
    """Check the sizes of a ModelConfig's linear attention."""
    sizes = config.linear_attention
    if sizes is None:
        is_unused = config.linear_attention_indices is None
        config.require(is_unused, "linear_attention_indices", f"needs {FLAG}linear_attention")
        return
    _check_sizes(config, "linear_attention", LINEAR_ATTENTION)
    is_multiple = sizes["n_value_heads"] % sizes["n_key_heads"] == 0
    config.require(is_multiple, "linear_attention", "n_value_heads must be a multiple of n_key_heads")
    config.require(sizes["conv_size"] > 1, "linear_attention", "conv_size must be 2 or greater")


def _check_sizes(config: Any, field: str, names: tuple[str, ...]) -> None:
    sizes = getattr(config, field)
    required_sizes = [n for name, n in sizes.items() if name != "q_lora_rank" or n is not None]
    are_valid = all(type(n) is int and 0 < n <= MAX_SIZE for n in required_sizes)
    hint = f"must have {', '.join(names)}, each between 1 and {MAX_SIZE:,}"
    config.require(sizes.keys() == set(names) and are_valid, field, hint)


@functools.cache
def types_and_choices(hint: Any) -> tuple[tuple[type, ...], tuple[str, ...]]:
    """Return the types of a field with this annotation, and the values of a Literal."""
    if get_origin(hint) is Literal:
        return (str,), get_args(hint)
    types = get_args(hint) if get_origin(hint) not in (list, dict) else (hint,)
    return tuple(get_origin(t) or t for t in types or (hint,)), ()


def has_type(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value has one of the types. An int counts as a float; a bool does not count as a number."""
    if list in types and type(value) in (list, tuple):
        return all(type(item) is int for item in value)
    if float in types and type(value) in (int, float):
        return math.isfinite(value)
    return type(value) in types


def rope_kind(adjustments: dict[str, Any] | None) -> str | None:
    """Return the RoPE scaling type that the keys of ``adjustments`` identify; None without adjustments."""
    if adjustments is None:
        return None
    for kind, (required, optional) in ROPE_ADJUSTMENTS.items():
        if required <= adjustments.keys() <= required | optional:
            return kind
    kinds = "; ".join(f"{kind}: {', '.join(sorted(required))}" for kind, (required, _) in ROPE_ADJUSTMENTS.items())
    raise UserError(f"{FLAG}rope_adjustments {adjustments}: the keys must be one of {kinds}")


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention factor (Peng et al. 2023, equation 22) with DeepSeek's mscale."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _check_adjustment(name: str, value: Any) -> None:
    if name == "truncate":
        is_valid, expected = type(value) is bool, "true or false"
    elif name in ("short_factor", "long_factor"):
        is_valid = type(value) in (list, tuple) and all(has_type(item, (float,)) and item > 0 for item in value)
        expected = "a list of numbers greater than zero"
    else:
        may_be_zero = name in ("mscale", "mscale_all_dim")
        is_valid = has_type(value, (float,)) and (value > 0 or (value == 0 and may_be_zero))
        expected = "a number greater than zero"
        if name == "partial_rotary_factor":
            is_valid, expected = is_valid and value <= 1, f"{expected}, at most 1"
    if not is_valid:
        raise UserError(f"{FLAG}rope_adjustments: {name} {value!r}: must be {expected}")


def _check_head(config: Any) -> None:
    """Check the :data:`HEAD_FIELDS` of a config."""
    head, labels, kinds = config.head, config.labels, get_args(ProblemType)
    require_option(head in (None, *get_args(HeadName)), "head", head, f"must be {', '.join(get_args(HeadName))}")
    is_kind = config.problem_type in (None, *kinds)
    require_option(is_kind, "problem_type", config.problem_type, f"must be one of {', '.join(kinds)}")
    is_list = isinstance(labels, list) and labels != [] and all(isinstance(label, str) for label in labels)
    is_used = head is not None or (labels, config.problem_type) == (None, None)
    require_option(is_used and (labels is None or is_list), "labels", labels, "must be the names of the head's scores")
    require_option(not (head and config.tie_embeddings), "tie_embeddings", True, "must be false with a head")
