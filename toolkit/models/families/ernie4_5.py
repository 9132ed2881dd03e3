"""ERNIE 4.5 (Baidu 2025): Llama with an independent head_dim, dense with optional biases, or with experts.

The router's selection bias stays fixed.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import require_key

CONFIGS: list[ModelConfig] = []

# Defaults of transformers' classes.
_DEFAULTS: Fields = {
    "ernie4_5": {"head_dim": 128, "num_key_value_heads": 2},
    "ernie4_5_moe": {
        "num_key_value_heads": 4, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
}  # fmt: skip


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    aliases = hf_config.read_aliases(config_json, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    config_json = {"rms_norm_eps": 1e-5} | _DEFAULTS[config_json["model_type"]] | aliases | config_json
    has_experts = config_json["model_type"] == "ernie4_5_moe"
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=103424, block_size=131072, tied=True),
        **hf_rope.read_rope(config_json, default_theta=500000.0),
        **(_read_experts(config_json) if has_experts else {"bias": config_json.get("use_bias", False)}),
    )


def _read_experts(config_json: Fields) -> Fields:
    """Return the fields of the experts, which the layers from the start to the end index have."""
    hf_config.require_hf(config_json, use_bias=(False, None), moe_norm_min=(1e-12,))
    first, last, every = (config_json[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval"))
    n_layer, shared = config_json["num_hidden_layers"], config_json["moe_num_shared_experts"]
    last = n_layer - 1 if last == -1 else last
    indices = [int((i + 1) % every == 0 and first <= i <= last) for i in range(n_layer)]
    require_key(any(indices), "moe_layer_start_index", first, "no layer has experts; use model_type 'ernie4_5'")
    return {
        "mlp_class_name": "LLaMAMoE",
        "router_scores": "biased_softmax",
        "norm_topk_prob": True,
        "shared_expert_gate": False,
        "n_expert": config_json["moe_num_experts"],
        "n_expert_per_token": config_json["moe_k"],
        "moe_intermediate_size": config_json["moe_intermediate_size"],
        "shared_expert_intermediate_size": shared * config_json["moe_intermediate_size"] or None,
        "moe_indices": None if all(indices) else indices,
        "router_aux_loss_coef": config_json.get("router_aux_loss_coef", 0.001),
    }


def is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a weight belongs to the multi-token prediction layers."""
    return "mtp_" in name


def to_hf_config(config: ModelConfig) -> Fields:
    if config.family == "ernie4_5":
        values = hf_config.write_decoder(config, "Ernie4_5ForCausalLM", use_bias=config.bias)
    else:
        values = hf_config.write_decoder(
            config, "Ernie4_5_MoeForCausalLM", use_bias=False, moe_k=config.n_expert_per_token, moe_layer_interval=1,
            moe_intermediate_size=config.expert_size, moe_num_experts=config.n_expert, moe_norm_min=1e-12,
            moe_num_shared_experts=(config.shared_expert_intermediate_size or 0) // config.expert_size,
            moe_layer_start_index=_layers(config)[0], moe_layer_end_index=_layers(config)[-1],
            output_router_logits=False, router_aux_loss_coef=config.router_aux_loss_coef,
        )  # fmt: skip
    del values["attention_bias"]
    return values


def _layers(config: ModelConfig) -> list[int]:
    """Return the layers with experts; the first if there are none."""
    return [i for i in range(config.n_layer) if config.has_experts(i)] or [0]


_experts = partial(
    tables.experts, shared="shared_experts", correction="moe_statics.e_score_correction_bias",
    correction_transforms=(tables.unsqueeze(),),
)  # fmt: skip
weight_map = partial(tables.decoder_weights, rope_pairs=True, moe=_experts)
