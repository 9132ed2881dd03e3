"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023, Li et al. 2023).

Parallel residual with a shared norm, biases in all layers, partial rotary.

Sources of the named configurations: LitGPT, and transformers' conversion script for phi-1, which has phi-1.5's
architecture.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # names of the same function
_FIXED: Fields = {
    "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh", "bias": True,
    "lm_head_bias": True, "parallel_residual": True, "shared_attention_norm": True,
}  # fmt: skip


_phi = named_with(family="phi", block_size=2048, vocab_size=51200, **_FIXED)

CONFIGS = [
    _phi("phi-1_5", 24, 2048, 32, rotary_percentage=0.5),
    _phi("phi-2", 32, 2560, 32, rotary_percentage=0.4),
]

ALIASES = {"phi-1": "phi-1_5", "phi-1.5": "phi-1_5"}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_hf(config_json, hidden_act=_GELU, tie_word_embeddings=(False,))
    fields = hf_config.read_decoder(config_json, vocab_size=51200, block_size=2048, **hf_config.LAYER_NORM)
    rope = hf_rope.read_rope(config_json, partial="partial_rotary_factor", default_partial=0.5)
    return ModelConfig(**fields, **rope, norm_qk=config_json.get("qk_layernorm", False), **_FIXED)


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(
        config, "PhiForCausalLM", hidden_act="gelu_new", layer_norm_eps=config.norm_eps,
        partial_rotary_factor=config.rotary_percentage, qk_layernorm=config.norm_qk, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip


weight_map = partial(
    tables.decoder_weights,
    names={"norm_q": "q_layernorm", "norm_k": "k_layernorm", "proj": "dense", "ln_f": "final_layernorm"},
    mlp=partial(tables.dense_mlp, names={"fc": "fc1", "proj": "fc2"}),
)
