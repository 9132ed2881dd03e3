"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with a QKV bias and no other biases.

Sources of the named configurations: LitGPT, and the ``config.json`` files of the Hugging Face repositories
Qwen/Qwen2.5-* and (as MLC LLM's presets quote them) Qwen/Qwen2-*-Instruct. The Instruct models differ from the others
only in the maximum sequence length, if at all: those that do have a separate entry.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables


def _qwen(
    name: str, block_size: int, n_layer: int, n_embd: int, n_head: int, groups: int, intermediate_size: int,
    vocab_size: int = 151936, tie_embeddings: bool = True, norm_eps: float = 1e-6, rope_base: float = 1000000.0,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        name=name, family="qwen2", block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_embd=n_embd,
        n_head=n_head, n_query_groups=groups, intermediate_size=intermediate_size, rope_base=rope_base,
        attn_bias=True, norm_eps=norm_eps, tie_embeddings=tie_embeddings,
    )  # fmt: skip


_0_5B = (24, 896, 14, 2, 4864)
_1_5B = (28, 1536, 12, 2, 8960)
_3B = (36, 2048, 16, 2, 11008)
_7B = (28, 3584, 28, 4, 18944, 152064, False)
_14B = (48, 5120, 40, 8, 13824, 152064, False, 1e-5)
_32B = (64, 5120, 40, 8, 27648, 152064, False, 1e-5)
_72B = (80, 8192, 64, 8, 29568, 152064, False, 1e-5)

CONFIGS = [
    _qwen("Qwen2.5-0.5B", 32768, *_0_5B),
    _qwen("Qwen2.5-1.5B", 131072, *_1_5B),
    _qwen("Qwen2.5-1.5B-Instruct", 32768, *_1_5B),
    _qwen("Qwen2.5-3B", 32768, *_3B),
    _qwen("Qwen2.5-7B", 131072, *_7B),
    _qwen("Qwen2.5-7B-Instruct", 32768, *_7B),
    _qwen("Qwen2.5-7B-Instruct-1M", 1010000, *_7B, norm_eps=1e-5, rope_base=10000000.0),
    _qwen("Qwen2.5-14B", 131072, *_14B),
    _qwen("Qwen2.5-14B-Instruct-1M", 1010000, *_14B, rope_base=10000000.0),
    _qwen("Qwen2.5-32B", 131072, *_32B),
    _qwen("Qwen2.5-72B", 131072, *_72B),
    _qwen("Qwen2.5-Coder-0.5B", 32768, *_0_5B),
    _qwen("Qwen2.5-Coder-1.5B", 32768, *_1_5B),
    _qwen("Qwen2.5-Coder-3B", 32768, *_3B),
    _qwen("Qwen2.5-Coder-7B", 32768, *_7B),
    _qwen("Qwen2.5-Coder-14B", 32768, *_14B),
    _qwen("Qwen2.5-Coder-32B", 32768, *_32B),
    _qwen("Qwen2.5-Math-1.5B", 4096, *_1_5B, rope_base=10000.0),
    _qwen("Qwen2.5-Math-7B", 4096, *_7B, rope_base=10000.0),
    _qwen("Qwen2.5-Math-72B", 4096, *_72B, rope_base=10000.0),
    _qwen("QwQ-32B-Preview", 32768, *_32B),
    _qwen("QwQ-32B", 131072, *_32B),
]

ALIASES = {
    "Qwen2.5-0.5B-Instruct": "Qwen2.5-0.5B",
    "Qwen2.5-3B-Instruct": "Qwen2.5-3B",
    **{f"{c.name}-Instruct": c.name for c in CONFIGS if c.name.startswith(("Qwen2.5-Coder", "Qwen2.5-Math"))},
    "Qwen2-0.5B-Instruct": "Qwen2.5-0.5B",
    "Qwen2-1.5B-Instruct": "Qwen2.5-1.5B-Instruct",
    "Qwen2-7B-Instruct": "Qwen2.5-7B-Instruct",
}


def from_hf_config(config_json: dict[str, Any]) -> ModelConfig:
    """Make a config from the content of a Hugging Face ``config.json`` with ``model_type`` "qwen2"."""
    hf_config.require_hf(config_json, hidden_act=("silu",))
    return ModelConfig(
        **hf_config.read_decoder({"num_key_value_heads": 32} | config_json, vocab_size=151936, block_size=32768),
        **read_windows(config_json),
        **hf_rope.read_rope(config_json),
        attn_bias=True,
    )


def read_windows(config_json: dict[str, Any]) -> dict[str, Any]:
    """Return the window fields; by default, the layers from max_window_layers on have sliding windows."""
    if not uses_windows(config_json):
        return {}
    has_window = config_json.get("sliding_window", 4096) is not None
    first = config_json.get("max_window_layers", 28) if has_window else config_json["num_hidden_layers"]
    types = [hf_config.FULL if i < first else hf_config.SLIDING for i in range(config_json["num_hidden_layers"])]
    return hf_config.read_windows(config_json, types, default=4096)


def uses_windows(config_json: dict[str, Any]) -> bool:
    """Whether the file enables sliding windows.

    Raises:
        UserError: It disables them but lists layers with sliding windows.
    """
    use = config_json.get("use_sliding_window", False)
    if not use and hf_config.SLIDING in (config_json.get("layer_types") or ()):
        raise UserError(
            f"config.json: use_sliding_window {use!r}: layer_types has layers with a sliding window; set it to true, "
            f"or those layers to {hf_config.FULL}"
        )
    return use


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    values = hf_config.write_decoder(config, "Qwen2ForCausalLM", **write_windows(config))
    if config.head_size == config.n_embd // config.n_head:
        del values["head_dim"]
    return values


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the window keys of ``config.json``."""
    return {
        "layer_types": hf_config.write_layer_types(config),
        "max_window_layers": config.n_layer,
        "sliding_window": config.sliding_window_size,
        "use_sliding_window": config.sliding_window_size is not None,
    }


weight_map = tables.decoder_weights


def check(config: ModelConfig) -> None:
    """Check that Qwen2ForCausalLM can express the config."""
    hf_config.require_llama(config, free=hf_config.LAYERED_WINDOWS, attn_bias=True)
