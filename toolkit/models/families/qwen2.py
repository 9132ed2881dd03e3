"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values, and on nothing else.

Facts of the named configurations: the ``config.json`` files of the Hugging Face repositories Qwen/Qwen2.5-*. The
Instruct models differ from the others in the longest sequence at most: those that do have an entry of their own.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import llama, tables


def _qwen(
    name: str, block_size: int, n_layer: int, n_embd: int, n_head: int, groups: int, intermediate_size: int,
    vocab_size: int = 151936, tie_embeddings: bool = True,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        name=name, family="qwen2", block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_embd=n_embd,
        n_head=n_head, n_query_groups=groups, intermediate_size=intermediate_size, rope_base=1000000.0,
        attn_bias=True, norm_eps=1e-6, tie_embeddings=tie_embeddings,
    )  # fmt: skip


_1_5B = (28, 1536, 12, 2, 8960)
_7B = (28, 3584, 28, 4, 18944, 152064, False)

CONFIGS = [
    _qwen("Qwen2.5-0.5B", 32768, 24, 896, 14, 2, 4864),
    _qwen("Qwen2.5-1.5B", 131072, *_1_5B),
    _qwen("Qwen2.5-1.5B-Instruct", 32768, *_1_5B),
    _qwen("Qwen2.5-3B", 32768, 36, 2048, 16, 2, 11008),
    _qwen("Qwen2.5-7B", 131072, *_7B),
    _qwen("Qwen2.5-7B-Instruct", 32768, *_7B),
]

ALIASES = {"Qwen2.5-0.5B-Instruct": "Qwen2.5-0.5B", "Qwen2.5-3B-Instruct": "Qwen2.5-3B"}


def from_hf(config_json: dict[str, Any]) -> ModelConfig:
    """Make a config from the content of a Hugging Face ``config.json`` with ``model_type`` "qwen2"."""
    tables.require_hf(config_json, hidden_act=("silu",), use_sliding_window=(False,))
    if set(config_json.get("layer_types") or []) - {"full_attention"}:
        raise UserError("config.json: layer_types: of a 'qwen2' model, this version computes only 'full_attention'")
    vocab_size = config_json.get("vocab_size", 151936)
    return ModelConfig(
        name=tables.model_name(config_json),
        family="qwen2",
        block_size=config_json.get("max_position_embeddings", 32768),
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        n_layer=config_json["num_hidden_layers"],
        n_head=config_json["num_attention_heads"],
        n_query_groups=config_json.get("num_key_value_heads"),
        n_embd=config_json["hidden_size"],
        head_size=config_json.get("head_dim"),
        intermediate_size=config_json["intermediate_size"],
        attn_bias=True,
        norm_eps=config_json.get("rms_norm_eps", 1e-6),
        tie_embeddings=config_json.get("tie_word_embeddings", False),
        **tables.read_rope(config_json, share="partial_rotary_factor", default_share=1.0),
    )


def to_hf(config: ModelConfig, bos_token_id: int | None = None, eos_token_id: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``; its vocabulary is the padded one, which the weights have."""
    _check(config)
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "hidden_act": "silu",
        "hidden_size": config.n_embd,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.block_size,
        "max_window_layers": config.n_layer,
        "model_type": "qwen2",
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "num_key_value_heads": config.n_query_groups,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": tables.write_rope_scaling(config),
        "rope_theta": config.rope_base,
        "sliding_window": None,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.padded_vocab_size,
    }
    if config.head_size != config.n_embd // config.n_head:
        values["head_dim"] = config.head_size
    return values


def weights(config: ModelConfig) -> list[tables.Map]:
    """Return the table of weight names, both directions."""
    _check(config)
    return llama.named_weights(config)


def _check(config: ModelConfig) -> None:
    """Refuse what a Qwen2ForCausalLM cannot be."""
    tables.require(
        config, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", parallel_residual=False, bias=False,
        attn_bias=True, position_embedding="rope", rotary_percentage=1.0, lm_head_bias=False,
    )  # fmt: skip
