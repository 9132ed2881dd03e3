"""Llama and what shares its Hugging Face class: TinyLlama, SmolLM2, and the models that this project trains.

Facts of the named configurations: the ``config.json`` files of their Hugging Face repositories.
"""

from __future__ import annotations

from typing import Any

from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, tables

_SCALED_8X = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_SCALED_32X = {**_SCALED_8X, "factor": 32.0}


def _llama2(name: str, n_layer: int, n_embd: int, n_head: int, intermediate_size: int, groups: int) -> ModelConfig:
    return ModelConfig(
        name=name, block_size=4096, vocab_size=32000, n_layer=n_layer, n_embd=n_embd, n_head=n_head,
        n_query_groups=groups, intermediate_size=intermediate_size,
    )  # fmt: skip


def _llama3(name: str, n_layer: int, n_embd: int, n_head: int, intermediate_size: int, **other: Any) -> ModelConfig:
    return ModelConfig(
        name=name, block_size=131072, vocab_size=128256, n_layer=n_layer, n_embd=n_embd, n_head=n_head,
        n_query_groups=8, intermediate_size=intermediate_size, rope_base=500000.0, **other,
    )  # fmt: skip


def _smollm2(
    name: str, n_layer: int, n_embd: int, n_head: int, groups: int, intermediate_size: int, rope_base: float
) -> ModelConfig:
    return ModelConfig(
        name=name, block_size=8192, vocab_size=49152, n_layer=n_layer, n_embd=n_embd, n_head=n_head,
        n_query_groups=groups, intermediate_size=intermediate_size, rope_base=rope_base, tie_embeddings=True,
    )  # fmt: skip


CONFIGS = [
    # The default: 5.2 million parameters with a vocabulary of 4,096. Both take theirs from the tokenizer.
    ModelConfig(
        name="mini-llama", block_size=256, n_layer=6, n_embd=256, n_head=8, n_query_groups=4, intermediate_size=640,
        tie_embeddings=True,
    ),
    ModelConfig(
        name="pico-llama", block_size=128, n_layer=2, n_embd=64, n_head=4, n_query_groups=2, intermediate_size=160,
        tie_embeddings=True,
    ),
    ModelConfig(
        name="tiny-llama-1.1b", block_size=2048, vocab_size=32000, n_layer=22, n_embd=2048, n_head=32,
        n_query_groups=4, intermediate_size=5632,
    ),
    _llama2("Llama-2-7b-hf", 32, 4096, 32, 11008, groups=32),
    _llama2("Llama-2-13b-hf", 40, 5120, 40, 13824, groups=40),
    _llama2("Llama-2-70b-hf", 80, 8192, 64, 28672, groups=8),
    _llama3("Llama-3.1-8B", 32, 4096, 32, 14336, rope_adjustments=_SCALED_8X),
    _llama3("Llama-3.1-70B", 80, 8192, 64, 28672, rope_adjustments=_SCALED_8X),
    _llama3("Llama-3.1-405B", 126, 16384, 128, 53248, rope_adjustments=_SCALED_8X),
    _llama3("Llama-3.2-1B", 16, 2048, 32, 8192, rope_adjustments=_SCALED_32X, tie_embeddings=True),
    _llama3("Llama-3.2-3B", 28, 3072, 24, 8192, rope_adjustments=_SCALED_32X, tie_embeddings=True),
    _smollm2("SmolLM2-135M", 30, 576, 9, 3, 1536, 100000.0),
    _smollm2("SmolLM2-360M", 32, 960, 15, 5, 2560, 100000.0),
    _smollm2("SmolLM2-1.7B", 24, 2048, 32, 32, 8192, 130000.0),
]  # fmt: skip

ALIASES = {
    "TinyLlama-1.1B": "tiny-llama-1.1b",
    "TinyLlama-1.1B-intermediate-step-1431k-3T": "tiny-llama-1.1b",
    "TinyLlama_v1.1": "tiny-llama-1.1b",
    "Llama-2-7b": "Llama-2-7b-hf",
    "Llama-2-13b": "Llama-2-13b-hf",
    "Llama-2-70b": "Llama-2-70b-hf",
    "Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "Meta-Llama-3.1-70B": "Llama-3.1-70B",
    "Meta-Llama-3.1-405B": "Llama-3.1-405B",
    # trained further on conversations, the same architecture
    "Llama-2-7b-chat-hf": "Llama-2-7b-hf",
    "Llama-2-13b-chat-hf": "Llama-2-13b-hf",
    "Llama-2-70b-chat-hf": "Llama-2-70b-hf",
    "Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "Llama-3.1-70B-Instruct": "Llama-3.1-70B",
    "Llama-3.1-405B-Instruct": "Llama-3.1-405B",
    "Llama-3.2-1B-Instruct": "Llama-3.2-1B",
    "Llama-3.2-3B-Instruct": "Llama-3.2-3B",
    "SmolLM2-135M-Instruct": "SmolLM2-135M",
    "SmolLM2-360M-Instruct": "SmolLM2-360M",
    "SmolLM2-1.7B-Instruct": "SmolLM2-1.7B",
}


def from_hf(config_json: dict[str, Any]) -> ModelConfig:
    """Make a config from the content of a Hugging Face ``config.json`` with ``model_type`` "llama"."""
    bias = bool(config_json.get("attention_bias", False))
    hf_config.require_hf({"mlp_bias": False} | config_json, hidden_act=("silu",), mlp_bias=(bias,))
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=32000, block_size=2048),
        **hf_config.read_rope(config_json),
        bias=bias,
        tie_embeddings=config_json.get("tie_word_embeddings", False),
    )


def to_hf(config: ModelConfig, bos_token_id: int | None = None, eos_token_id: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    _check(config)
    biases = {"attention_bias": config.bias, "mlp_bias": config.bias}
    return hf_config.write_decoder(config, "LlamaForCausalLM", bos_token_id, eos_token_id, **biases)


def weights(config: ModelConfig) -> list[tables.Map]:
    """Return the table of weight names, both directions."""
    _check(config)
    return tables.decoder_weights(config)


def _check(config: ModelConfig) -> None:
    """Refuse what a LlamaForCausalLM cannot be."""
    hf_config.require_llama(config, bias=config.bias, attn_bias=config.bias and config.attn_bias)
