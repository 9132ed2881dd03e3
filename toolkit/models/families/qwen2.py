"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with a QKV bias and no other biases.

Sources of the named configurations: LitGPT, and ``config.json`` of Qwen/Qwen2.5-* and Qwen/Qwen2-*-Instruct (from MLC
LLM's presets) on Hugging Face. An Instruct model has a separate entry only if its maximum sequence length differs from
the base model's.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import require_key
from toolkit.models.families.named import named_with

_qwen = named_with(
    family="qwen2", block_size=32768, vocab_size=151936, rope_base=1000000.0, attn_bias=True, norm_eps=1e-6,
    tie_embeddings=True,
)  # fmt: skip
_qwen_7b = partial(_qwen, vocab_size=152064, tie_embeddings=False)
_qwen_large = partial(_qwen_7b, norm_eps=1e-5)

_0_5B, _1_5B, _3B = (24, 896, 14, 2, 4864), (28, 1536, 12, 2, 8960), (36, 2048, 16, 2, 11008)
_7B, _14B = (28, 3584, 28, 4, 18944), (48, 5120, 40, 8, 13824)
_32B, _72B = (64, 5120, 40, 8, 27648), (80, 8192, 64, 8, 29568)

CONFIGS = [
    _qwen("Qwen2.5-0.5B", *_0_5B),
    _qwen("Qwen2.5-1.5B", *_1_5B, block_size=131072),
    _qwen("Qwen2.5-1.5B-Instruct", *_1_5B),
    _qwen("Qwen2.5-3B", *_3B),
    _qwen_7b("Qwen2.5-7B", *_7B, block_size=131072),
    _qwen_7b("Qwen2.5-7B-Instruct", *_7B),
    _qwen_7b("Qwen2.5-7B-Instruct-1M", *_7B, block_size=1010000, norm_eps=1e-5, rope_base=10000000.0),
    _qwen_large("Qwen2.5-14B", *_14B, block_size=131072),
    _qwen_large("Qwen2.5-14B-Instruct-1M", *_14B, block_size=1010000, rope_base=10000000.0),
    _qwen_large("Qwen2.5-32B", *_32B, block_size=131072),
    _qwen_large("Qwen2.5-72B", *_72B, block_size=131072),
    _qwen("Qwen2.5-Coder-0.5B", *_0_5B),
    _qwen("Qwen2.5-Coder-1.5B", *_1_5B),
    _qwen("Qwen2.5-Coder-3B", *_3B),
    _qwen_7b("Qwen2.5-Coder-7B", *_7B),
    _qwen_large("Qwen2.5-Coder-14B", *_14B),
    _qwen_large("Qwen2.5-Coder-32B", *_32B),
    _qwen("Qwen2.5-Math-1.5B", *_1_5B, block_size=4096, rope_base=10000.0),
    _qwen_7b("Qwen2.5-Math-7B", *_7B, block_size=4096, rope_base=10000.0),
    _qwen_large("Qwen2.5-Math-72B", *_72B, block_size=4096, rope_base=10000.0),
    _qwen_large("QwQ-32B-Preview", *_32B),
    _qwen_large("QwQ-32B", *_32B, block_size=131072),
]

ALIASES = {
    "Qwen2.5-0.5B-Instruct": "Qwen2.5-0.5B",
    "Qwen2.5-3B-Instruct": "Qwen2.5-3B",
    **{f"{c.name}-Instruct": c.name for c in CONFIGS if c.name.startswith(("Qwen2.5-Coder", "Qwen2.5-Math"))},
    "Qwen2-0.5B-Instruct": "Qwen2.5-0.5B",
    "Qwen2-1.5B-Instruct": "Qwen2.5-1.5B-Instruct",
    "Qwen2-7B-Instruct": "Qwen2.5-7B-Instruct",
}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    return ModelConfig(
        **hf_config.read_decoder({"num_key_value_heads": 32} | config_json, vocab_size=151936, block_size=32768),
        **read_windows(config_json),
        **hf_rope.read_rope(config_json),
        attn_bias=True,
    )


def read_windows(config_json: Fields) -> Fields:
    """Return the sliding-window fields. By default, layers from max_window_layers on have sliding windows."""
    if not uses_windows(config_json):
        return {}
    has_window = config_json.get("sliding_window", 4096) is not None
    first = config_json.get("max_window_layers", 28) if has_window else config_json["num_hidden_layers"]
    types = [hf_config.FULL if i < first else hf_config.SLIDING for i in range(config_json["num_hidden_layers"])]
    return hf_config.read_windows(config_json, types, default=4096)


def uses_windows(config_json: Fields) -> bool:
    """Whether ``config.json`` enables sliding windows."""
    use = config_json.get("use_sliding_window", False)
    is_listed = hf_config.SLIDING in (config_json.get("layer_types") or ())
    hint = f"layer_types has layers with a sliding window; set it to true, or those layers to {hf_config.FULL}"
    require_key(use or not is_listed, "use_sliding_window", use, hint)
    return use


def to_hf_config(config: ModelConfig) -> Fields:
    values = hf_config.write_decoder(config, "Qwen2ForCausalLM", **write_windows(config))
    if config.head_size == config.n_embd // config.n_head:
        del values["head_dim"]
    return values


def write_windows(config: ModelConfig) -> Fields:
    """Return the sliding-window entries of ``config.json``. Older code reads max_window_layers, not layer_types."""
    types = hf_config.write_layer_types(config)
    return {
        "layer_types": types,
        "max_window_layers": [*types, hf_config.SLIDING].index(hf_config.SLIDING),
        "sliding_window": config.sliding_window_size,
        "use_sliding_window": config.sliding_window_size is not None,
    }


weight_map = tables.decoder_weights
