"""Falcon 1 (Almazrouei et al. 2023): parallel residual, LayerNorm, no biases, QKV interleaved by group.

For Falcon 3, which has model_type llama, see llama.py.

Sources of the named configurations: LitGPT, and transformers' ``FalconConfig`` default for tied embeddings.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_FIXED: Fields = {
    "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "none",
    "parallel_residual": True,
}  # fmt: skip

_falcon = named_with(family="falcon", block_size=2048, vocab_size=65024, tie_embeddings=True, **_FIXED)

CONFIGS = [
    _falcon("falcon-7b", 32, 4544, 71, 1, shared_attention_norm=True),
    _falcon("falcon-40b", 60, 8192, 128, 8),
    _falcon("falcon-180B", 80, 14848, 232, 8),
]

ALIASES = {
    "falcon-7b-instruct": "falcon-7b",
    "falcon-40b-instruct": "falcon-40b",
    "falcon-180B-chat": "falcon-180B",
}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_hf(config_json, activation=("gelu",), alibi=(False,), bias=(False,), parallel_attn=(True,))
    n_head, new = config_json["num_attention_heads"], config_json.get("new_decoder_architecture", False)
    groups = 1 if config_json.get("multi_query", True) else n_head
    if new:
        groups = config_json.get("num_kv_heads") or n_head
    norms = config_json.get("num_ln_in_parallel_attn") or (2 if new else 1)
    width = config_json.get("ffn_hidden_size") or 4 * config_json["hidden_size"]
    sizes = {"num_key_value_heads": groups, "intermediate_size": width}
    norm: Fields = {"norm_eps": "layer_norm_epsilon", "default_eps": 1e-5}
    fields = hf_config.read_decoder(config_json | sizes, vocab_size=65024, block_size=2048, tied=True, **norm)
    fields |= hf_rope.read_rope(config_json)
    return ModelConfig(**fields, shared_attention_norm=not (new and norms == 2), **_FIXED)


def to_hf_config(config: ModelConfig) -> Fields:
    shared, new = config.shared_attention_norm, _is_new_architecture(config)
    return hf_config.write_common(config, "FalconForCausalLM") | {
        "activation": "gelu",
        "alibi": False,
        "attention_dropout": 0.0,
        "bias": False,
        "ffn_hidden_size": config.intermediate_size,
        "hidden_dropout": 0.0,
        "hidden_size": config.n_embd,
        "layer_norm_epsilon": config.norm_eps,
        "max_position_embeddings": config.block_size,
        "multi_query": not new and config.n_query_groups == 1,
        "new_decoder_architecture": new,
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "num_kv_heads": config.n_query_groups,
        "num_ln_in_parallel_attn": (1 if shared else 2) if new else None,
        "parallel_attn": True,
        "rope_scaling": hf_config.write_rope_scaling(config),
        "rope_theta": config.rope_base,
    }


def _is_new_architecture(config: ModelConfig) -> bool:
    """Whether the config needs Falcon's ``new_decoder_architecture``: grouped queries or separate norms."""
    return not config.shared_attention_norm or 1 < config.n_query_groups < config.n_head


def weight_map(config: ModelConfig) -> tables.WeightMap:
    by_group = {"attn.qkv": tables.interleave_groups(config.n_head, config.n_query_groups, config.head_size)}
    shared = config.shared_attention_norm
    names = {"norm_1": "input_layernorm"} if shared else {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
    names |= {"attn.qkv": "self_attention.query_key_value", "attn.proj": "self_attention.dense"}
    names |= {"mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}
    maps = tables.embedding_and_head(config, "transformer.word_embeddings.weight", "lm_head")
    for i in range(config.n_layer):
        maps += tables.layers(config, f"transformer.h.{i}", f"transformer.h.{i}", names, by_group)
    return maps + tables.linear("transformer.ln_f", "transformer.ln_f", True)
