"""gpt-oss (OpenAI 2025, arXiv 2508.10925).

Experts have biases and clamped SwiGLU. Attention has sinks, and sliding windows in every second layer.

Sources of the named configurations: ``config.json`` of openai/gpt-oss-20b, and transformers' defaults for
openai/gpt-oss-120b.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

# Defaults of transformers' class.
_DEFAULTS: Fields = {
    "num_hidden_layers": 36, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_ROPE: Fields = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_FIXED: Fields = {"bias": True, "attention_sinks": True, **hf_config.MIXTRAL}
# The value in the published files: a default of transformers 4.55, used only with output_router_logits. An auxiliary
# loss of at least 0.9 x 4 would dominate the training loss.
_UNUSED_COEF = 0.9

_YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 4096, "truncate": False}
_gpt_oss = named_with(
    family="gpt_oss", block_size=131072, vocab_size=201088, head_size=64, rope_base=150000.0,
    rope_adjustments=_YARN, sliding_window_size=128, sliding_window_indices=[1, 0] * 18, n_expert_per_token=4,
    swiglu_limit=7.0, **_FIXED,
)  # fmt: skip

# The list with one entry per layer is cut to the number of layers.
CONFIGS = [
    _gpt_oss("gpt-oss-20b", 24, 2880, 64, 8, 2880, n_expert=32),
    _gpt_oss("gpt-oss-120b", 36, 2880, 64, 8, 2880, n_expert=128),
]


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json, attention_bias=(True,), swiglu_alpha=(1.702,))
    config_json = hf_rope.with_default_rope(_DEFAULTS | config_json, _ROPE)
    alternating = [(hf_config.SLIDING, hf_config.FULL)[i % 2] for i in range(config_json["num_hidden_layers"])]
    coef = config_json["router_aux_loss_coef"]
    is_unused = coef == _UNUSED_COEF and not config_json.get("output_router_logits")
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=201088, block_size=131072),
        **hf_config.read_windows(config_json, alternating, default=128),
        **hf_rope.read_rope(config_json, default_theta=150000.0),
        n_expert=config_json["num_local_experts"],
        n_expert_per_token=config_json["num_experts_per_tok"],
        swiglu_limit=config_json["swiglu_limit"],
        router_aux_loss_coef=_DEFAULTS["router_aux_loss_coef"] if is_unused else coef,
        **_FIXED,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    values = {
        "intermediate_size": config.expert_size,
        "layer_types": hf_config.write_layer_types(config),
        "num_experts_per_tok": config.n_expert_per_token,
        "num_local_experts": config.n_expert,
        "output_router_logits": False,
        "rope_parameters": hf_config.write_rope_parameters(config),
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "sliding_window": config.sliding_window_size or config.block_size,  # required by the class, used or not
        "swiglu_limit": config.swiglu_limit,
    }
    return hf_config.write_decoder(config, "GptOssForCausalLM", **values)


def weight_map(config: ModelConfig) -> tables.WeightMap:
    sinks = [
        tables.one_to_one(f"transformer.h.{i}.attn.sinks", f"model.layers.{i}.self_attn.sinks")
        for i in range(config.n_layer)
    ]
    return tables.decoder_weights(config, moe=_experts) + sinks


def _experts(config: ModelConfig, native: str, hf: str) -> tables.WeightMap:
    """Map the experts of a layer. Hugging Face transposes the weights and interleaves gate and up elementwise."""
    native_part, hf_part = f"{native}.mlp.experts", f"{hf}.mlp.experts"
    gate_up = tuple(f"{native_part}.{name}" for name in ("fc_1", "fc_2"))
    maps = tables.linear(f"{native}.mlp.gate", f"{hf}.mlp.router", True)
    for kind, suffix, transforms in (("weight", "", (tables.transpose(),)), ("bias", "_bias", ())):
        names, joined = tuple(f"{name}.{kind}" for name in gate_up), (*transforms, tables.interleave())
        maps.append(tables.WeightMapping(names, (f"{hf_part}.gate_up_proj{suffix}",), joined))
        maps.append(tables.one_to_one(f"{native_part}.proj.{kind}", f"{hf_part}.down_proj{suffix}", *transforms))
    return maps
