"""Tiny models of each style, with weights large enough for varied outputs."""

import math

import pytest
import torch
from helpers.cases import slow_except

from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, build_model

STYLES = {
    "llama": {"n_query_groups": 2, "padded_vocab_size": 128},
    "gpt_neox": {
        "family": "gpt_neox", "parallel_residual": True, "rotary_percentage": 0.25, "bias": True,
        "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "padded_vocab_size": 128,
    },
    "gpt2": {
        "family": "gpt2", "position_embedding": "learned", "bias": True, "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh", "tie_embeddings": True, "padded_vocab_size": 101,
    },
    "gemma2": {
        "family": "gemma2", "n_query_groups": 2, "padded_vocab_size": 128, "norm_offset": True,
        "scale_embeddings": True, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "post_attention_norm": True,
        "post_mlp_norm": True, "attention_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
        "sliding_window_size": 7,
        "sliding_window_indices": [1, 0],
    },
    "gemma3": {
        "family": "gemma3_text", "n_query_groups": 1, "padded_vocab_size": 128, "norm_qk": True, "norm_offset": True,
        "scale_embeddings": True, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "post_attention_norm": True,
        "post_mlp_norm": True, "sliding_window_size": 5, "sliding_window_indices": [1, 0], "rope_indices": [1, 0],
        "rope_local_base_freq": 100.0,
    },
    "gemma4": {
        "family": "gemma4_text", "n_layer": 5, "n_query_groups": 2, "padded_vocab_size": 128, "norm_qk": True,
        "scale_embeddings": True, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "post_attention_norm": True,
        "post_mlp_norm": True, "attention_multiplier": 1.0, "sliding_window_size": 5,
        "sliding_window_indices": [1, 0, 1, 1, 0], "rope_indices": [1, 0, 1, 1, 0], "rope_local_base_freq": 100.0,
        "rope_adjustments": {"partial_rotary_factor": 0.5},
        "family_options": {
            "full_attention": {"head_size": 24, "n_query_groups": 1}, "keys_are_values": True, "n_shared_kv_layers": 2,
            "double_wide_mlp": True, "per_layer_size": 8, "per_layer_vocab_size": 512,
        },
    },
    "qwen2_moe": {
        "family": "qwen2_moe", "n_query_groups": 2, "padded_vocab_size": 128, "attn_bias": True,
        "mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40, "moe_indices": [0, 1],
    },
    "mixtral": {
        "family": "mixtral", "n_query_groups": 2, "padded_vocab_size": 128, "mlp_class_name": "LLaMAMoE",
        "n_expert": 4, "n_expert_per_token": 2, "norm_topk_prob": True,
    },
    "gpt_oss": {
        "family": "gpt_oss", "n_query_groups": 2, "padded_vocab_size": 128, "head_size": 24, "bias": True,
        "attention_sinks": True, "mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2,
        "norm_topk_prob": True, "swiglu_limit": 2.0, "sliding_window_size": 7, "sliding_window_indices": [1, 0],
    },
    "deepseek_v3": {
        "family": "deepseek_v3", "padded_vocab_size": 128, "mlp_class_name": "LLaMAMoE", "n_expert": 8,
        "n_expert_per_token": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "shared_expert_gate": False, "router_scores": "sigmoid", "n_expert_groups": 4, "n_topk_groups": 2,
        "moe_indices": [0, 1],
        "latent_attention": {
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
        },
    },
    "qwen3_5": {
        "family": "qwen3_5_text", "n_query_groups": 2, "padded_vocab_size": 128, "norm_offset": True, "norm_qk": True,
        "attention_gate": True, "rotary_percentage": 0.25, "linear_attention_indices": [1, 0],
        "linear_attention": {"n_key_heads": 2, "n_value_heads": 4, "key_size": 12, "value_size": 16, "conv_size": 4},
    },
    "qwen3_next": {
        "family": "qwen3_next", "n_query_groups": 2, "padded_vocab_size": 128, "norm_offset": True, "norm_qk": True,
        "attention_gate": True, "rotary_percentage": 0.25, "n_layer": 3, "linear_attention_indices": [0, 1, 1],
        "linear_attention": {"n_key_heads": 2, "n_value_heads": 2, "key_size": 16, "value_size": 8, "conv_size": 3},
        "mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "moe_indices": [0, 1, 1],
    },
    "phi3": {
        "family": "phi3", "n_query_groups": 2, "padded_vocab_size": 128,
        "rope_adjustments": {
            "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
            "original_max_seq_len": 16, "attention_factor": math.sqrt(1 + math.log(3) / math.log(16)),
        },
    },
    "ministral3": {
        "family": "ministral3", "n_query_groups": 2, "padded_vocab_size": 128, "query_scaling_beta": 0.5,
        "rope_adjustments": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 8},
    },
    "hunyuan": {
        "family": "hunyuan_v1_dense", "n_query_groups": 2, "padded_vocab_size": 128, "norm_qk": True,
        "norm_qk_after_rope": True,
    },
    "smollm3": {
        "family": "smollm3", "n_query_groups": 2, "padded_vocab_size": 128, "rope_indices": [0, -1],
        "sliding_window_size": 7, "sliding_window_indices": [0, 1],
    },
}  # fmt: skip


def make_model(style: str, seed: int = 0, block_size: int = 48, **changes) -> GPT:
    torch.manual_seed(seed)
    sizes = {"block_size": block_size, "vocab_size": 101, "n_layer": 2, "n_head": 4, "n_embd": 64}
    config = ModelConfig(name=style, **(sizes | {"intermediate_size": 96} | STYLES[style] | changes))
    model = build_model(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 or name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(parameter, std=0.07 if name.endswith("bias") else 0.2)
    return model


@pytest.fixture(params=slow_except(["llama", "gpt_neox", "gemma3", "mixtral", "smollm3"], STYLES))
def model(request) -> GPT:
    return make_model(request.param)


@torch.no_grad()
def greedy_without_cache(model: GPT, prompt: torch.Tensor, count: int) -> list[int]:
    """Return the greedy continuation of a prompt, with one pass over the complete sequence for each token."""
    ids = prompt
    for _ in range(min(count, model.config.block_size - len(prompt))):
        logits = model(ids[None])[0, -1, : model.config.vocab_size]
        ids = torch.cat([ids, logits.argmax()[None]])
    return ids[len(prompt) :].tolist()
