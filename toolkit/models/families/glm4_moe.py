"""GLM-4.5, 4.6 and 4.7 (GLM-4.5 Team 2025, arXiv 2508.06471): DeepSeek-V3's experts with grouped-query attention.

GLM-4.7-Flash (glm4_moe_lite) has DeepSeek-V3's attention as well.

Sources of the named configurations: ``config.json`` of GLM-4.5-Air, GLM-4.6, GLM-4.7 and GLM-4.7-Flash (copies in
vLLM's and others' tests and logs), and for GLM-4.5, llama.cpp (pull request 15026) and slime (scripts/models). The
coefficient of the load-balancing loss, which the files lack, is the report's (section 2.4).
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import deepseek, hf_config, hf_rope, tables
from toolkit.models.families.hf_keys import require_key
from toolkit.models.families.named import named_with

_SHARED: Fields = {
    "rope_base": 1000000.0, "mlp_class_name": "LLaMAMoE", "norm_topk_prob": True, "router_scores": "sigmoid",
    "shared_expert_gate": False,
}  # fmt: skip
_glm = named_with(
    **_SHARED, family="glm4_moe", vocab_size=151552, head_size=128, attn_bias=True, rotary_percentage=0.5,
    n_expert_per_token=8, router_aux_loss_coef=0.0001 / 8,
)  # fmt: skip
_355B, _355B_SIZES = {
    "norm_qk": True, "n_expert": 160, "moe_intermediate_size": 1536, "shared_expert_intermediate_size": 1536,
    "routed_scaling_factor": 2.5, "moe_indices": [0] * 3 + [1] * 89,
}, (92, 5120, 96, 8, 12288)  # fmt: skip

_LATENT: Fields = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
}  # fmt: skip

CONFIGS = [
    _glm("GLM-4.5", *_355B_SIZES, **_355B, block_size=131072),
    _glm("GLM-4.6", *_355B_SIZES, **_355B, block_size=202752),
    _glm(
        "GLM-4.5-Air", 46, 4096, 96, 8, 10944, block_size=131072, n_expert=128, moe_intermediate_size=1408,
        shared_expert_intermediate_size=1408, moe_indices=[0] + [1] * 45,
    ),
    ModelConfig(
        **_SHARED, name="GLM-4.7-Flash", family="glm4_moe_lite", vocab_size=154880, block_size=202752, n_layer=47,
        n_head=20, n_embd=2048, intermediate_size=10240, n_expert=64, n_expert_per_token=4, moe_intermediate_size=1536,
        shared_expert_intermediate_size=1536, routed_scaling_factor=1.8, moe_indices=[0] + [1] * 46,
        router_aux_loss_coef=0.0001 / 4,
        latent_attention=_LATENT,
    ),
]  # fmt: skip
ALIASES = {"GLM-4.5-Base": "GLM-4.5", "GLM-4.5-Air-Base": "GLM-4.5-Air", "GLM-4.7": "GLM-4.6"}

# Defaults of transformers' classes. Most sizes must be given.
_DEFAULTS: Fields = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}


def from_hf_config(config_json: Fields) -> ModelConfig:
    is_lite = config_json["model_type"] == "glm4_moe_lite"
    config_json = _DEFAULTS | (_LATENT if is_lite else {"num_key_value_heads": 8}) | config_json
    hf_config.require_silu(config_json, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    vocab_size, block_size = (154880, 202752) if is_lite else (151552, 131072)
    fields = hf_config.read_decoder(config_json, vocab_size=vocab_size, block_size=block_size, default_eps=1e-5)
    if is_lite:
        fields |= _read_lite(config_json)
        config_json = config_json | {"first_k_dense_replace": fields["moe_indices"].count(0)}
    else:
        fields |= hf_rope.read_rope(config_json, partial="partial_rotary_factor", default_partial=0.5)
        fields["attn_bias"] = config_json.get("attention_bias", False)
        fields["norm_qk"] = config_json.get("use_qk_norm", False)
    return ModelConfig(**deepseek.read_experts(config_json, config_json["n_group"], "sigmoid") | fields)


def _read_lite(config_json: Fields) -> Fields:
    """Return the fields of latent attention, and which layers have experts: by default, all but the first."""
    fields = deepseek.read_latent_attention(config_json)
    n_layer = config_json["num_hidden_layers"]
    types = config_json.get("mlp_layer_types") or ["dense"] + ["sparse"] * (n_layer - 1)
    is_valid = len(types) == n_layer and set(types) <= {"dense", "sparse"}
    require_key(is_valid, "mlp_layer_types", types, f"must be dense or sparse for each of the {n_layer} layers")
    first = config_json.get("first_k_dense_replace", types.count("dense"))
    hint = "transformers ignores it; mlp_layer_types must have as many dense layers"
    require_key(first == types.count("dense"), "first_k_dense_replace", first, hint)
    return fields | {"moe_indices": [int(kind == "sparse") for kind in types]}


def to_hf_config(config: ModelConfig) -> Fields:
    values = deepseek.write_experts(config) | {"num_nextn_predict_layers": 0}
    if config.family == "glm4_moe":
        values |= {"partial_rotary_factor": config.rotary_percentage, "use_qk_norm": config.norm_qk}
        return hf_config.write_decoder(config, "Glm4MoeForCausalLM", **values)
    types = ["sparse" if config.has_experts(i) else "dense" for i in range(config.n_layer)]
    if types != sorted(types):  # other code reads only the number of dense layers, which come first
        del values["first_k_dense_replace"]
    values |= {**(config.latent_attention or {}), "mlp_layer_types": types, "head_dim": config.rope_n_elem}
    return hf_config.write_decoder(config, "Glm4MoeLiteForCausalLM", **values, rope_interleave=True)


is_mtp = deepseek.is_mtp


def weight_map(config: ModelConfig) -> tables.WeightMap:
    if config.family == "glm4_moe_lite":
        return deepseek.weight_map(config)
    return tables.decoder_weights(config, moe=deepseek.experts)
