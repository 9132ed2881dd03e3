"""Gemma 1 to 3, text only (Gemma Team 2024, 2024, 2025).

All scale the embedding, multiply by 1 + weight in norms and have gated gelu. Gemma 2 has norms behind attention and MLP
as well, windows in every other layer, and caps of scores and logits; Gemma 3 normalises queries and keys instead of
capping, has windows in five of six layers, and another rotary base in those.
"""

from __future__ import annotations

from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, tables

CONFIGS: list[ModelConfig] = []
ALIASES: dict[str, str] = {}

_ARCHITECTURES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
_ACTS = ("gelu", "gelu_pytorch_tanh")  # the files of Gemma 1 say gelu and mean its approximation by tanh


def from_hf(config_json: dict[str, Any]) -> ModelConfig:
    """Make a config from a ``config.json`` with ``model_type`` "gemma", "gemma2" or "gemma3_text"."""
    kind = config_json["model_type"]
    allowed = _ACTS if kind == "gemma" else _ACTS[1:]
    hf_config.require_hf(
        config_json, hidden_activation=(*allowed, None), attention_bias=(False,),
        use_bidirectional_attention=(False, None), **({"hidden_act": allowed} if kind == "gemma" else {}),
    )  # fmt: skip
    fields = hf_config.read_decoder(config_json, vocab_size=256000, block_size=8192)
    if kind != "gemma":
        fields |= _behind_the_first(config_json)
    return ModelConfig(
        **{"head_size": 256} | {name: value for name, value in fields.items() if value is not None},
        **hf_config.read_rope(
            config_json, default_theta=1000000.0 if kind == "gemma3_text" else 10000.0,
            of_layers=hf_config.FULL if kind == "gemma3_text" else None,
        ),
        norm_offset=True, scale_embeddings=True, mlp_class_name="GemmaMLP", gelu_approximate="tanh",
        tie_embeddings=config_json.get("tie_word_embeddings", True),
    )  # fmt: skip


def _behind_the_first(config_json: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have and Gemma has not."""
    third, n_layer = config_json["model_type"] == "gemma3_text", config_json["num_hidden_layers"]
    every = config_json.get("sliding_window_pattern") or 6 if third else 2
    types = [hf_config.SLIDING if (i + 1) % every else hf_config.FULL for i in range(n_layer)]
    caps = (None, None) if third else (50.0, 30.0)
    fields = {
        "post_attention_norm": True, "post_mlp_norm": True,
        "attention_scores_scalar": float(config_json.get("query_pre_attn_scalar", 256)),
        "attention_logit_softcapping": config_json.get("attn_logit_softcapping", caps[0]),
        "final_logit_softcapping": config_json.get("final_logit_softcapping", caps[1]),
        **hf_config.read_windows(config_json, types, default=4096),
    }  # fmt: skip
    if not third:
        return fields
    local = (config_json.get("rope_parameters") or {}).get(hf_config.SLIDING) or {}
    theta = local.get("rope_theta") or config_json.get("rope_local_base_freq") or 10000.0
    of_layers = [int(kind == hf_config.SLIDING) for kind in config_json.get("layer_types") or types]
    return fields | {"norm_qk": True, "rope_local_base_freq": float(theta), "rope_indices": of_layers}


def to_hf(config: ModelConfig, bos_token_id: int | None = None, eos_token_id: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    _check(config)
    other: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if config.family != "gemma":
        other |= {
            "attn_logit_softcapping": config.attention_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "layer_types": hf_config.write_layer_types(config),
            "query_pre_attn_scalar": config.attention_scores_scalar or config.head_size,
            "sliding_window": config.sliding_window_size,
        }
    if config.family == "gemma3_text":
        other |= hf_config.write_rope_by_layer(config)
    return hf_config.write_decoder(config, _ARCHITECTURES[config.family], bos_token_id, eos_token_id, **other)


def weights(config: ModelConfig) -> list[tables.Map]:
    """Return the table of weight names, both directions."""
    _check(config)
    return tables.decoder_weights(config)


def _check(config: ModelConfig) -> None:
    """Refuse what none of these classes can be."""
    later = config.family != "gemma"
    free = ("sliding_window_size", "attention_logit_softcapping", "final_logit_softcapping", "attention_scores_scalar")
    third = config.family == "gemma3_text"
    hf_config.require_llama(
        config, free=(*(free if later else ()), *(("rope_indices",) if third else ())),
        norm_offset=True, scale_embeddings=True, mlp_class_name="GemmaMLP", gelu_approximate="tanh",
        post_attention_norm=later, post_mlp_norm=later, norm_qk=third, norm_qk_type="default",
    )  # fmt: skip
    if third:
        hf_config.require_rope_by_window(config)
