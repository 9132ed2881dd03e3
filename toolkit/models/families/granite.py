"""Granite 3 models (Granite Team 2024), dense or with experts in all layers: Llama with four constant multipliers.

Sources of the named configurations: the Foundation Model Stack (``fms/models/granite.py``), and for the model with
experts a copy of ``config.json`` of ibm-granite/granite-3.1-1b-a400m-instruct.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_granite = named_with(
    vocab_size=49155, padding_multiple=1, embedding_multiplier=12.0, residual_multiplier=0.22, tie_embeddings=True,
)  # fmt: skip

CONFIGS = [  # padding_multiple 1: the published vocabulary is not padded
    _granite(
        "granite-3.0-8b-base", 40, 4096, 32, 8, 12800, family="granite", block_size=8192,
        attention_multiplier=0.0078125, logits_scaling=16.0,
    ),
    _granite(
        "granite-3.1-1b-a400m-base", 24, 1024, 16, 8, 512, family="granitemoe", block_size=131072, rope_base=1500000.0,
        attention_multiplier=0.015625, logits_scaling=6.0, norm_eps=1e-6, n_expert=32, n_expert_per_token=8,
        router_aux_loss_coef=0.0, **hf_config.MIXTRAL,
    ),
]  # fmt: skip

ALIASES = {f"{name}-instruct": f"{name}-base" for name in ("granite-3.0-8b", "granite-3.1-1b-a400m")}

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    fields = hf_config.read_decoder(config_json, vocab_size=32000, block_size=2048)
    fields |= {name: float(config_json.get(name, 1.0)) for name in _MULTIPLIERS}
    if config_json["model_type"] == "granitemoe":
        fields |= hf_config.read_experts(config_json)
    return ModelConfig(**fields, **hf_rope.read_rope(config_json), **hf_config.read_biases(config_json))


def to_hf_config(config: ModelConfig) -> Fields:
    multipliers = {name: getattr(config, name) for name in _MULTIPLIERS}
    multipliers["attention_multiplier"] = config.attention_scale
    if config.family == "granite":
        return hf_config.write_decoder(config, "GraniteForCausalLM", mlp_bias=config.bias, **multipliers)
    multipliers |= hf_config.write_experts(config)
    return hf_config.write_decoder(config, "GraniteMoeForCausalLM", **multipliers)


def _experts(config: ModelConfig, native: str, hf: str) -> tables.WeightMap:
    """Map the experts of a layer. Hugging Face stacks them, too, with gate and up in one tensor."""
    maps = tables.linear(f"{native}.mlp.gate", f"{hf}.block_sparse_moe.router.layer", False)
    return maps + tables.fused_gate_up(
        config, f"{native}.mlp.experts", f"{hf}.block_sparse_moe.input_linear", f"{hf}.block_sparse_moe.output_linear"
    )


weight_map = partial(tables.decoder_weights, moe=_experts)
