"""Describe a model in llama.cpp's metadata, and refuse what llama.cpp computes differently."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.config_checks import yarn_mscale
from toolkit.models.rope import attention_factor, inverse_frequencies

# llama.cpp's architecture by Hugging Face's model_type
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "gpt2": "gpt2", "starcoder2": "starcoder2", "stablelm": "stablelm", "falcon": "falcon",
}  # fmt: skip
USE_INSTEAD = "is not supported in GGUF; run toolkit convert_to_hf, then llama.cpp's convert_hf_to_gguf.py"
# Architectures with sliding windows: one entry per layer, repeated. In others, llama.cpp ignores windows.
_WINDOWS = {"gemma2": [1, 0], "gemma3": [1, 1, 1, 1, 1, 0]}
# RoPE scaling types that llama.cpp applies.
_SCALINGS: dict[str, tuple[str | None, ...]] = {
    "llama": (None, "linear", "yarn", "llama3"), "phi3": (None, "longrope"), "gemma3": (None, "linear")
}  # fmt: skip
_OTHER_SCALINGS = (None, "linear", "yarn")
# llama.cpp recognizes the 27B models of Gemma 2 and 3, which scale scores by n_embd / n_head, by their depth.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
_NORM_TOPK = {"qwen2moe": False, "qwen3moe": True}


def require_supported(config: ModelConfig, folder: Path) -> None:
    """Raise UserError unless llama.cpp computes this model as toolkit does."""
    arch = ARCHITECTURES.get(config.family)
    if config.family_options or arch is None:
        raise UserError(f"checkpoint_dir {folder}: the model type {config.family!r} {USE_INSTEAD}")
    is_27b = config.n_layer == _GEMMA_27B.get(arch)
    score_sizes = (None, config.n_embd // config.n_head if is_27b else config.head_size)
    same = {
        "rope_adjustments": config.rope_kind in _SCALINGS.get(arch, _OTHER_SCALINGS)
        and (config.rope_adjustments or {}).get("truncate", True),
        "attention_scores_scalar": arch not in _WINDOWS or config.attention_scores_scalar in score_sizes,
        "gelu_approximate": arch != "gpt2" or config.gelu_approximate == "tanh",
        "norm_topk_prob": config.norm_topk_prob == _NORM_TOPK.get(arch, config.norm_topk_prob),
        "moe_indices": arch not in _NORM_TOPK or config.n_moe_layer == config.n_layer,
        "final_logit_softcapping": arch not in _WINDOWS
        or (config.final_logit_softcapping is None) == (arch == "gemma3"),
        "attention_logit_softcapping": arch != "gemma2" or config.attention_logit_softcapping is not None,
        "bias": arch != "starcoder2" or config.bias,
        "tie_embeddings": arch != "stablelm" or not config.tie_embeddings,
        "rope_indices": arch != "gemma3" or _has_windows(config),
    }
    if different := [name for name, is_same in same.items() if not is_same]:
        value = f"{different[0]} {getattr(config, different[0])}"
        raise UserError(f"checkpoint_dir {folder}: the model type {config.family!r} with {value} {USE_INSTEAD}")


def _has_windows(config: ModelConfig) -> bool:
    """Whether exactly the layers that have sliding windows in llama.cpp have them here."""
    pattern = _WINDOWS.get(ARCHITECTURES[config.family], [0])
    return all((config.window(i) is not None) == pattern[i % len(pattern)] for i in range(config.n_layer))


def context_length(config: ModelConfig) -> int:
    """Return the longest sequence, in tokens, that llama.cpp computes as toolkit does: the window if it has none."""
    windows = [config.window(i) or config.block_size for i in range(config.n_layer)]
    return config.block_size if _has_windows(config) else min(config.block_size, *windows)


def add_architecture(writer: Any, config: ModelConfig) -> None:
    """Add the metadata of the architecture to a GGUFWriter."""
    import gguf

    arch, context, kind = ARCHITECTURES[config.family], context_length(config), config.rope_kind
    adjustments, is_rms = config.rope_adjustments or {}, config.norm_class_name == "RMSNorm"
    window = (config.sliding_window_size if _has_windows(config) else context) if arch in _WINDOWS else None
    # llama.cpp multiplies YaRN's default attention factor by this one.
    factor = attention_factor(config) / (yarn_mscale(adjustments["factor"], 1.0) if kind == "yarn" else 1.0)
    # GGUFWriter has a method add_NAME for each.
    values = {
        "name": config.name or config.family, "vocab_size": config.padded_vocab_size, "context_length": context,
        "embedding_length": config.n_embd, "block_count": config.n_layer, "head_count": config.n_head,
        "head_count_kv": config.n_query_groups, "key_length": config.head_size, "value_length": config.head_size,
        "feed_forward_length": config.intermediate_size, "layer_norm_rms_eps": config.norm_eps if is_rms else None,
        "layer_norm_eps": None if is_rms else config.norm_eps,
        "parallel_residual": config.parallel_residual if arch == "stablelm" else None,
        # Phi-3-mini's window if missing, which llama.cpp does not apply
        "sliding_window": 0 if arch == "phi3" else window,
        "attn_logit_softcapping": config.attention_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping, "expert_count": config.n_expert or None,
        "expert_used_count": config.n_expert_per_token or None,
        "expert_feed_forward_length": config.expert_size if config.n_expert else None,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }  # fmt: skip
    if config.position_embedding == "rope":
        values |= {
            "rope_dimension_count": config.rope_n_elem, "rope_freq_base": config.rope_base,
            "rope_freq_base_swa": config.rope_local_base_freq,
            "rope_scaling_type": gguf.RopeScalingType(kind) if kind in ("linear", "yarn") else None,
            "rope_scaling_factor": adjustments["factor"] if kind in ("linear", "yarn") else None,
            "rope_scaling_orig_ctx_len": None if kind == "llama3" else adjustments.get("original_max_seq_len"),
            "rope_scaling_attn_factors": None if math.isclose(factor, 1.0) else factor,
            "rope_scaling_yarn_beta_fast": adjustments.get("beta_fast"),
            "rope_scaling_yarn_beta_slow": adjustments.get("beta_slow"),
        }  # fmt: skip
    for name, value in values.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)


def rope_tensors(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the divisors of RoPE's frequencies, (rope_n_elem / 2,), of llama3 and longrope."""
    if config.rope_kind == "llama3":
        unscaled = inverse_frequencies(replace(config, rope_adjustments=None))
        yield "rope_freqs.weight", unscaled / inverse_frequencies(config)
    for length in ("long", "short") if config.rope_kind == "longrope" else ():
        factors = (config.rope_adjustments or {})[f"{length}_factor"]
        yield f"rope_factors_{length}.weight", torch.tensor(factors, dtype=torch.float32)
