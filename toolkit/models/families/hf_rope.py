"""Read RoPE settings from a Hugging Face ``config.json`` (transformers 4 or 5) like transformers 5.

Source: ``convert_rope_params_to_dict`` and ``standardize_rope_params`` of transformers' configuration classes, and
``modeling_rope_utils.py``.
"""

from typing import Any

from toolkit.errors import UserError
from toolkit.models.config import Fields
from toolkit.models.families.hf_config import FULL, SLIDING, longrope_attention_factor
from toolkit.models.families.hf_keys import is_integer, is_number, is_positive, require_key

_THETA, _PARTIAL, _ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"


def read_rope(
    config_json: Fields,
    *,
    theta: str = _THETA,
    partial: str | None = None,
    default_partial: float = 1.0,
    default_theta: float = 10000.0,
    aliases: dict[str, str] | None = None,
) -> Fields:
    """Return the RoPE fields of a ModelConfig.

    ``rope_scaling`` replaces ``rope_parameters``. Keys in either override top-level keys.

    Args:
        config_json: The content of ``config.json``.
        theta, default_theta: Top-level key of the RoPE base, and the default base.
        partial, default_partial: Top-level key of the partial rotary factor, and the default factor. None for a family
            without partial rotary.
        aliases: Maps alternative RoPE type names to standard ones.
    """
    new, old = (config_json.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    rope, top_level = old or new, {_THETA: theta, _PARTIAL: partial or _PARTIAL}
    for key, value in rope.items():
        hint = f"a {_kind(config_json)} has the same RoPE in all layers"
        require_key(not isinstance(value, dict), key, value, hint)
    read: Fields = {
        key: rope.get(key, config_json.get(top_level[key], default))
        for key, default in ((_THETA, default_theta), (_PARTIAL, default_partial))
    }
    _require_numbers(read)
    _require_agreement(config_json, read, top_level)
    hint = f"a {_kind(config_json)} has no partial rotary; remove it"
    require_key(partial is not None or read[_PARTIAL] == 1, _PARTIAL, read[_PARTIAL], hint)
    original = config_json.get(_ORIGINAL, rope.get(_ORIGINAL, config_json.get("max_position_embeddings")))
    adjustments = _read_scaling(rope | {_ORIGINAL: original}, config_json, aliases or {})
    return {
        "rope_base": float(read[_THETA]),
        "rotary_percentage": float(read[_PARTIAL]),
        "rope_adjustments": adjustments,
    }


def with_default_rope(config_json: Fields, default: Fields) -> Fields:
    """Return ``config.json`` with the class's default of ``rope_parameters``, if it has no RoPE parameters."""
    if config_json.get("rope_parameters") is not None or config_json.get("rope_scaling"):
        return config_json
    theta = config_json.get(_THETA)
    hint = "transformers ignores it without rope_parameters; write it there, with the other keys"
    require_key(theta is None or theta == default.get(_THETA, theta), _THETA, theta, hint)
    return config_json | {"rope_parameters": default}


def _require_agreement(config_json: Fields, read: dict[str, float], top_level: dict[str, str]) -> None:
    """Raise UserError for values of theta or partial rotary factor that transformers would silently ignore."""
    new, old = (config_json.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, value in read.items():
        if old and key not in old and new.get(key, value) != value:
            raise UserError(f"config.json: rope_parameters.{key} {new[key]!r}: is ignored; set it in rope_scaling")
        if top_level[key] != key and config_json.get(key, value) != value:
            raise UserError(
                f"config.json: {key} {config_json[key]!r}: a {_kind(config_json)} uses {top_level[key]} "
                f"{value!r}; remove one of them"
            )


def read_rope_by_layer(config_json: Fields, *, local: str | None, default_theta: float, default_local: float) -> Fields:
    """Return the RoPE fields of a ModelConfig with a local RoPE theta in sliding-window layers.

    ``rope_scaling`` applies to the full-attention layers and overrides ``rope_parameters`` key by key. ``local`` is the
    top-level key of the local theta, or None. ``default_theta`` is for full-attention layers and ``default_local`` for
    sliding-window layers.
    """
    full, sliding = _full_and_sliding(config_json)
    _require_plain_windows(config_json, full, sliding)
    top_level = config_json.get(_THETA, default_theta)
    if local is None and top_level != default_local and _THETA not in sliding:
        raise UserError(
            f"config.json: rope_theta {top_level!r}: transformers 4 applies it to all layers, 5 only to full-attention "
            "layers; write rope_parameters, with rope_theta in full_attention and in sliding_attention"
        )
    base: Any = full.get(_THETA, top_level)
    local_base: Any = sliding.get(_THETA, config_json.get(local, default_local) if local else default_local)
    _require_numbers({_THETA: base})
    _require_numbers({local or _THETA: local_base})
    original = full.get(_ORIGINAL, config_json.get("max_position_embeddings"))
    adjustments = _read_scaling(full | {_ORIGINAL: original}, config_json, {})
    return {"rope_base": float(base), "rope_local_base_freq": float(local_base), "rope_adjustments": adjustments}


def _full_and_sliding(config_json: Fields) -> tuple[Fields, Fields]:
    """Return the RoPE keys of full-attention layers, including ``rope_scaling``, and of sliding-window layers."""
    by_layer, scaling = (config_json.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, value in by_layer.items():
        if key not in (FULL, SLIDING) or not isinstance(value, dict | None):
            raise UserError(
                f"config.json: rope_parameters.{key} {value!r}: of a {_kind(config_json)} it must hold {FULL} and "
                f"{SLIDING}, each with its keys"
            )
    full, sliding = (by_layer.get(key) or {} for key in (FULL, SLIDING))
    if "type" in scaling and scaling.get("rope_type", full.get("rope_type", "default")) != scaling["type"]:
        raise UserError(
            f"config.json: rope_scaling.type {scaling['type']!r}: transformers 5 ignores it in a {_kind(config_json)}, "
            "transformers 4 does not; rename it to rope_type"
        )
    return full | scaling, sliding


def _require_plain_windows(config_json: Fields, full: Fields, sliding: Fields) -> None:
    """Raise UserError for settings that ModelConfig does not support or transformers ignores."""
    if (kind := _rope_type(sliding)) != "default":
        raise UserError(f"config.json: rope_type {kind!r} of {SLIDING}: this version computes only 'default' there")
    for fraction in (values.get(_PARTIAL, 1) for values in (full, sliding, config_json)):
        require_key(fraction == 1, _PARTIAL, fraction, f"a {_kind(config_json)} has no partial rotary")
    truncate = full.get("truncate", True)
    require_key(truncate is True, "truncate", truncate, f"transformers ignores it in a {_kind(config_json)}")


def _kind(config_json: Fields) -> str:
    return f"{config_json['model_type']!r} model"


def _rope_type(rope: Fields) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


# Required keys of each RoPE type.
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
}


def _read_scaling(rope: Fields, config_json: Fields, aliases: dict[str, str]) -> Fields | None:
    """Return ``rope_adjustments`` from merged RoPE keys; None without scaling."""
    kind = _rope_type(rope)
    if kind == "default":
        return None
    kind = aliases.get(str(kind), kind)
    if str(kind) not in _REQUIRED:
        raise UserError(f"config.json: rope_type {kind!r} is not supported; only default, {', '.join(_REQUIRED)}")
    values = {key: value for key, value in rope.items() if value is not None}
    for key in _REQUIRED[kind]:
        if key not in values:
            raise UserError(f"config.json: {key} is missing; rope_type {kind!r} needs it")
    _require_numbers(values)
    if kind == "linear":
        return {"factor": values["factor"]}
    original = {"original_max_seq_len": values[_ORIGINAL]}
    if kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        require_key(high > low, "high_freq_factor", high, "must be greater than low_freq_factor")
        return {key: values[key] for key in ("factor", "low_freq_factor", "high_freq_factor")} | original
    if kind == "yarn":
        optional = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
        return {"beta_fast": 32.0, "beta_slow": 1.0} | {k: values[k] for k in optional if k in values} | original
    longest = values["factor"] * values[_ORIGINAL] if "factor" in values else config_json["max_position_embeddings"]
    # default: derived from the context extension
    factor = values.get("attention_factor", longrope_attention_factor(longest, values[_ORIGINAL]))
    factors = {key: values[key] for key in ("short_factor", "long_factor")}
    return factors | original | {"attention_factor": factor}


def _require_numbers(values: Fields) -> None:
    """Check the numbers that this module computes with. ModelConfig checks the rest."""
    for key, value in values.items():
        if key == _ORIGINAL:
            is_valid, expected = is_integer(value, 2), "an integer, 2 or greater"
        elif key == _PARTIAL:
            is_valid, expected = is_number(value, 0), "a number, not less than zero"
        elif key.endswith("_factor") and isinstance(value, list):
            continue
        elif key == "factor" or key.endswith(("_factor", "_theta", "_freq", "_base")):
            is_valid, expected = is_positive(value), "a number greater than zero"
        else:
            continue
        require_key(is_valid, key, value, f"must be {expected}")
