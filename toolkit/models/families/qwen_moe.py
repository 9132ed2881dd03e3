"""Qwen2-MoE and Qwen3-MoE (Yang et al. 2024, 2025): Qwen with experts in all or some layers; Qwen2 has a shared expert.

Sources of the named configurations: LitGPT (Qwen3), and ``config.json`` of Qwen1.5-MoE-A2.7B,
Qwen3-Coder-30B-A3B-Instruct, Qwen2-57B-A14B (copy in TensorRT-LLM's tests) and Qwen3-Coder-480B-A35B-Instruct (copy in
vLLM-Kunlun's docs). All use Qwen's load-balancing coefficient of 0.001. The Coder models' files set it to 0, which is
unsuitable for pretraining from scratch.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, qwen2, tables
from toolkit.models.families.named import named_with

_moe = named_with(
    vocab_size=151936, rope_base=1000000.0, norm_eps=1e-6, mlp_class_name="LLaMAMoE", n_expert_per_token=8
)
_a2_7b = partial(
    _moe, family="qwen2_moe", attn_bias=True, n_expert=60, n_expert_per_token=4, moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
)  # fmt: skip
_qwen3_moe = partial(
    _moe, family="qwen3_moe", block_size=40960, head_size=128, norm_qk=True, n_expert=128, norm_topk_prob=True
)
_30b, _235b = partial(_qwen3_moe, moe_intermediate_size=768), partial(_qwen3_moe, moe_intermediate_size=1536)
_A2_7B, _30B, _235B = (24, 2048, 16, 16, 5632), (48, 2048, 32, 4, 6144), (94, 4096, 64, 4, 12288)
_CODER: Fields = {"block_size": 262144, "rope_base": 10000000.0}

CONFIGS = [
    _a2_7b("Qwen1.5-MoE-A2.7B", *_A2_7B, block_size=8192),
    _a2_7b("Qwen1.5-MoE-A2.7B-Chat", *_A2_7B, block_size=32768),
    _moe(
        "Qwen2-57B-A14B", 28, 3584, 28, 4, 18944, family="qwen2_moe", block_size=131072, attn_bias=True, n_expert=64,
        moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
    ),
    _30b("Qwen3-30B-A3B", *_30B),
    _30b("Qwen3-30B-A3B-Instruct-2507", *_30B, block_size=262144, rope_base=10000000.0),
    _235b("Qwen3-235B-A22B", *_235B),
    _235b("Qwen3-235B-A22B-Instruct-2507", *_235B, block_size=262144, rope_base=5000000.0),
    _30b("Qwen3-Coder-30B-A3B-Instruct", 48, 2048, 32, 4, 5472, **_CODER),
    _qwen3_moe(
        "Qwen3-Coder-480B-A35B-Instruct", 62, 6144, 96, 8, 8192, n_expert=160, moe_intermediate_size=2560, **_CODER
    ),
]  # fmt: skip

ALIASES = {
    "Qwen3-30B-A3B-Base": "Qwen3-30B-A3B",
    "Qwen3-30B-A3B-Thinking-2507": "Qwen3-30B-A3B-Instruct-2507",
    "Qwen3-235B-A22B-Thinking-2507": "Qwen3-235B-A22B-Instruct-2507",
    "Qwen3-Coder-30B-A3B": "Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-Coder-480B-A35B": "Qwen3-Coder-480B-A35B-Instruct",
}

# Defaults of transformers' classes.
_DEFAULTS: Fields = {
    "qwen2_moe": {
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "intermediate_size": 5632,
        "shared_expert_intermediate_size": 5632, "num_key_value_heads": 16,
    },
    "qwen3_moe": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
        "num_key_value_heads": 4,
    },
}  # fmt: skip


def from_hf_config(config_json: Fields) -> ModelConfig:
    is_qwen2 = config_json["model_type"] == "qwen2_moe"
    hf_config.require_silu(config_json, attention_bias=(False,))
    alias = hf_config.read_aliases(config_json, {"num_local_experts": "num_experts"})
    config_json = _DEFAULTS[config_json["model_type"]] | alias | config_json
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=151936, block_size=32768),
        **_read_windows(config_json),
        **hf_rope.read_rope(config_json),
        **read_experts({"norm_topk_prob": False} | config_json, has_shared=is_qwen2),
        attn_bias=is_qwen2 and config_json.get("qkv_bias", True),
        norm_qk=not is_qwen2,
    )


def read_experts(config_json: Fields, *, has_shared: bool) -> Fields:
    """Return the ModelConfig fields of the experts."""
    return {
        "mlp_class_name": "LLaMAMoE",
        "n_expert": config_json["num_experts"],
        "n_expert_per_token": config_json["num_experts_per_tok"],
        "moe_intermediate_size": config_json["moe_intermediate_size"],
        "norm_topk_prob": config_json["norm_topk_prob"],
        "shared_expert_intermediate_size": config_json["shared_expert_intermediate_size"] if has_shared else None,
        "moe_indices": _read_layers(config_json),
        "router_aux_loss_coef": config_json.get("router_aux_loss_coef", 0.001),
    }


def _read_layers(config_json: Fields) -> list[int] | None:
    """Return ``moe_indices``: every ``decoder_sparse_step``-th layer has experts, except ``mlp_only_layers``."""
    step, dense = config_json.get("decoder_sparse_step", 1), config_json.get("mlp_only_layers") or []
    indices = [int(i not in dense and (i + 1) % step == 0) for i in range(config_json["num_hidden_layers"])]
    return None if all(indices) else indices


def _read_windows(config_json: Fields) -> Fields:
    """Return the sliding-window fields: even layers below ``max_window_layers`` (Qwen2) or all layers (Qwen3)."""
    if not qwen2.uses_windows(config_json):
        return {}
    if config_json["model_type"] == "qwen3_moe":
        return hf_config.read_windows({**config_json, "layer_types": None}, default=4096)
    first = config_json.get("max_window_layers", 28)
    slides = [i % 2 == 0 and i < first for i in range(config_json["num_hidden_layers"])]
    types = [hf_config.SLIDING if here else hf_config.FULL for here in slides]
    return hf_config.read_windows(config_json, types, default=4096)


def write_experts(config: ModelConfig) -> Fields:
    """Invert :func:`read_experts`, except for shared experts."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.n_layer) if not config.has_experts(i)],
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.norm_topk_prob,
        "num_experts": config.n_expert,
        "num_experts_per_tok": config.n_expert_per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }


def to_hf_config(config: ModelConfig) -> Fields:
    values = {
        **write_experts(config),
        **qwen2.write_windows(config),
        "max_window_layers": config.n_layer,  # layers below it may have windows
    }
    if config.family == "qwen3_moe":
        return hf_config.write_decoder(config, "Qwen3MoeForCausalLM", **values)
    values["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    values["qkv_bias"] = config.attn_bias
    values = hf_config.write_decoder(config, "Qwen2MoeForCausalLM", **values)
    del values["attention_bias"]
    return values


weight_map = tables.decoder_weights
