"""The rotary keys of Hugging Face's ``config.json``, as transformers 5 understands what it and transformers 4 write.

Source: ``convert_rope_params_to_dict`` and ``standardize_rope_params`` of its configuration classes, and
``modeling_rope_utils.py``.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import UserError
from toolkit.models.families.hf_config import FULL, SLIDING, longrope_attention_factor
from toolkit.models.families.hf_keys import is_above_zero, is_number, is_whole

_THETA, _SHARE, _ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"


def read_rope(
    config_json: dict[str, Any],
    *,
    theta: str = _THETA,
    share: str | None = None,
    default_share: float = 1.0,
    default_theta: float = 10000.0,
    also: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the rotary fields of a ModelConfig.

    ``rope_scaling`` wins as a whole over ``rope_parameters``, and what is in them over the keys beside them.

    Args:
        config_json: The content of ``config.json``.
        theta: The key beside them of the base.
        share: The key beside them of the rotated share of a head; None where whole heads are rotated.
        default_share: The rotated share where none is given.
        default_theta: The base where none is given.
        also: Further names of kinds of scaling, and which kinds they are.

    Raises:
        UserError: A rotary scaling that is not supported, or keys that contradict each other.
    """
    new, old = (config_json.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    rope, beside = old or new, {_THETA: theta, _SHARE: share or _SHARE}
    for key, value in rope.items():
        if isinstance(value, dict):
            raise UserError(f"config.json: {key} {value!r}: a {_kind(config_json)} has one rotation for all layers")
    read = {
        key: rope.get(key, config_json.get(beside[key], default))
        for key, default in ((_THETA, default_theta), (_SHARE, default_share))
    }
    _require_numbers(read)
    _require_agreement(config_json, read, beside)
    if share is None and read[_SHARE] != 1:
        raise UserError(
            f"config.json: {_SHARE} {read[_SHARE]!r}: a {_kind(config_json)} rotates whole heads; leave it out"
        )
    original = config_json.get(_ORIGINAL, rope.get(_ORIGINAL, config_json.get("max_position_embeddings")))
    adjustments = _read_scaling(rope | {_ORIGINAL: original}, config_json, also or {})
    return {"rope_base": float(read[_THETA]), "rotary_percentage": float(read[_SHARE]), "rope_adjustments": adjustments}


def _require_agreement(config_json: dict[str, Any], read: dict[str, float], beside: dict[str, str]) -> None:
    """Refuse a value of base or share that transformers passes over in silence, where it is not the one that counts."""
    new, old = (config_json.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, value in read.items():
        if old and key not in old and new.get(key, value) != value:
            raise UserError(
                f"config.json: rope_parameters.{key} {new[key]!r}: does not count beside rope_scaling; write it there"
            )
        if beside[key] != key and config_json.get(key, value) != value:
            raise UserError(
                f"config.json: {key} {config_json[key]!r}: a {_kind(config_json)} has {beside[key]}, here {value!r}; "
                "leave one of them out"
            )


def read_rope_by_layer(
    config_json: dict[str, Any], *, local: str | None, default_theta: float, default_local: float
) -> dict[str, Any]:
    """Return the rotary fields of a ModelConfig whose layers with a window have a base of their own.

    ``rope_scaling`` is of the other layers, and wins over ``rope_parameters`` key by key.

    Args:
        config_json: The content of ``config.json``.
        local: The key of that base beside ``rope_parameters``; None where there is none.
        default_theta: The base of the other layers where none is given.
        default_local: That of the layers with a window.

    Raises:
        UserError: A rotary scaling that is not supported, or keys that contradict each other.
    """
    full, sliding = _full_and_sliding(config_json)
    _require_plain_windows(config_json, full, sliding)
    beside = config_json.get(_THETA, default_theta)
    if local is None and beside != default_local and _THETA not in sliding:
        raise UserError(
            f"config.json: rope_theta {beside!r}: transformers 4 takes it for all layers, 5 for those without a window "
            "only; write rope_parameters, with rope_theta in full_attention and in sliding_attention"
        )
    base = full.get(_THETA, beside)
    of_window = sliding.get(_THETA, config_json.get(local, default_local) if local else default_local)
    _require_numbers({_THETA: base})
    _require_numbers({local or _THETA: of_window})
    original = full.get(_ORIGINAL, config_json.get("max_position_embeddings"))
    return {
        "rope_base": float(base), "rope_local_base_freq": float(of_window),
        "rope_adjustments": _read_scaling(full | {_ORIGINAL: original}, config_json, {}),
    }  # fmt: skip


def _full_and_sliding(config_json: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary keys of the layers without a window, with those of ``rope_scaling``, and of the layers with one."""
    by_layer, scaling = (config_json.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, value in by_layer.items():
        if key not in (FULL, SLIDING) or not isinstance(value, dict | None):
            raise UserError(
                f"config.json: rope_parameters.{key} {value!r}: of a {_kind(config_json)} it must hold {FULL} and "
                f"{SLIDING}, and the keys in those"
            )
    full, sliding = (by_layer.get(key) or {} for key in (FULL, SLIDING))
    if "type" in scaling and scaling.get("rope_type", full.get("rope_type", "default")) != scaling["type"]:
        raise UserError(
            f"config.json: rope_scaling.type {scaling['type']!r}: transformers 5 ignores it in a {_kind(config_json)}, "
            "4 does not; name it rope_type"
        )
    return full | scaling, sliding


def _require_plain_windows(config_json: dict[str, Any], full: dict[str, Any], sliding: dict[str, Any]) -> None:
    """Refuse what transformers would compute in one of the two and a ModelConfig cannot say, or the other way round."""
    if (kind := _type_of(sliding)) != "default":
        raise UserError(f"config.json: rope_type {kind!r} of {SLIDING}: this version computes only 'default' there")
    for values in (full, sliding, config_json):
        if values.get(_SHARE, 1) != 1:
            raise UserError(f"config.json: {_SHARE} {values[_SHARE]!r}: a {_kind(config_json)} rotates whole heads")
    if full.get("truncate", True) is not True:
        raise UserError(
            f"config.json: truncate {full['truncate']!r}: transformers ignores it in a {_kind(config_json)}"
        )


def _kind(config_json: dict[str, Any]) -> str:
    return f"{config_json['model_type']!r} model"


def _type_of(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


# Of each kind of scaling: the keys that it cannot do without, and the reader of the others.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
}


def _read_scaling(rope: dict[str, Any], config_json: dict[str, Any], also: dict[str, str]) -> dict[str, Any] | None:
    """Return ``rope_adjustments`` from the keys in one place; None where nothing is scaled."""
    kind = _type_of(rope)
    if kind == "default":
        return None
    kind = also.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise UserError(f"config.json: rope_type {kind!r} is not supported; only default, {', '.join(_NEEDED)}")
    values = {key: value for key, value in rope.items() if value is not None}
    for key in _NEEDED[kind]:
        if key not in values:
            raise UserError(f"config.json: {key} is missing; rope_type {kind!r} needs it")
    _require_numbers(values)
    if kind == "linear":
        return {"factor": values["factor"]}
    original = {"original_max_seq_len": values[_ORIGINAL]}
    if kind == "llama3":
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            raise UserError(
                f"config.json: high_freq_factor {values['high_freq_factor']!r}: must be greater than low_freq_factor"
            )
        return {key: values[key] for key in ("factor", "low_freq_factor", "high_freq_factor")} | original
    if kind == "yarn":
        optional = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
        return {"beta_fast": 32.0, "beta_slow": 1.0} | {k: values[k] for k in optional if k in values} | original
    return {key: values[key] for key in ("short_factor", "long_factor")} | original | _amplitude(values, config_json)


def _amplitude(values: dict[str, Any], config_json: dict[str, Any]) -> dict[str, float]:
    """``attention_factor`` of longrope: where it is not given, it follows from how much longer the context became."""
    original = values[_ORIGINAL]
    longest = values["factor"] * original if "factor" in values else config_json["max_position_embeddings"]
    return {"attention_factor": values.get("attention_factor", longrope_attention_factor(longest, original))}


def _require_numbers(values: dict[str, Any]) -> None:
    """Refuse what is computed with here and is no number that its key can have; a ModelConfig checks the rest."""
    for key, value in values.items():
        if key == _ORIGINAL:
            is_right, what = is_whole(value, 2), "a whole number, 2 or greater"
        elif key == _SHARE:
            is_right, what = is_number(value, 0), "a number, not less than zero"
        elif key.endswith("_factor") and isinstance(value, list):
            continue
        elif key == "factor" or key.endswith(("_factor", "_theta", "_freq", "_base")):
            is_right, what = is_above_zero(value), "a number greater than zero"
        else:
            continue
        if not is_right:
            raise UserError(f"config.json: {key} {value!r}: must be {what}")
