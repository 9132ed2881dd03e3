"""GPT-2 (Radford et al. 2019): learned positions, tied embeddings.

Sources of the named configurations: ``config.json`` of openai-community/gpt2* on Hugging Face, and ``mingpt/model.py``
of karpathy/minGPT.
"""

from typing import Any

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, tables
from toolkit.models.families.named import named_with

_FIXED: Fields = {
    "position_embedding": "learned", "bias": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP",
}  # fmt: skip


# padding_multiple 1: the published vocabulary is not padded
_gpt2 = named_with(
    family="gpt2", block_size=1024, vocab_size=50257, padding_multiple=1, gelu_approximate="tanh",
    tie_embeddings=True, **_FIXED,
)  # fmt: skip

# the models of minGPT, with the vocabulary of the data
_mingpt = named_with(family="gpt2", block_size=1024, gelu_approximate="tanh", **_FIXED)

CONFIGS = [
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
    _mingpt("gopher-44m", 8, 512, 16),
    _mingpt("gpt-mini", 6, 192, 6),
    _mingpt("gpt-micro", 4, 128, 4),
    _mingpt("gpt-nano", 3, 48, 3),
]

ALIASES = {
    "gpt2-124m": "gpt2",
    "gpt2-small": "gpt2",
    "gpt2-350m": "gpt2-medium",
    "gpt2-355m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1558m": "gpt2-xl",
    "gpt2-1.5b": "gpt2-xl",
}

_ALIASES_OF_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
_SIZES = {"n_layer": 12, "n_head": 12, "n_embd": 768}  # of the class
_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


def from_hf_config(config_json: Fields) -> ModelConfig:
    disabled = dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), (False,))
    hf_config.require_hf(config_json, activation_function=tuple(_GELU), scale_attn_weights=(True,), **disabled)
    # transformers gives these aliases precedence
    config_json = config_json | hf_config.read_aliases(config_json, _ALIASES_OF_KEYS)
    vocab_size = config_json.get("vocab_size", 50257)
    sizes = {name: config_json.get(name, default) for name, default in _SIZES.items()}
    sizes["intermediate_size"] = config_json.get("n_inner")
    activation: Any = _GELU[config_json.get("activation_function", "gelu_new")]
    return ModelConfig(
        name=hf_config.model_name(config_json), family="gpt2", block_size=config_json.get("n_positions", 1024),
        vocab_size=vocab_size, padded_vocab_size=vocab_size, **sizes,
        norm_eps=config_json.get("layer_norm_epsilon", 1e-5), gelu_approximate=activation,
        tie_embeddings=config_json.get("tie_word_embeddings", True), **_FIXED,
    )  # fmt: skip


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_common(config, "GPT2LMHeadModel") | {
        "activation_function": "gelu_new" if config.gelu_approximate == "tanh" else "gelu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "layer_norm_epsilon": config.norm_eps,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_inner": config.intermediate_size,
        "n_layer": config.n_layer,
        "n_positions": config.block_size,
        "resid_pdrop": 0.0,
    }


_LAYERS = {
    "norm_1": "ln_1", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "norm_2": "ln_2", "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}  # fmt: skip


def weight_map(config: ModelConfig) -> tables.WeightMap:
    transposed = dict.fromkeys([name for name in _LAYERS if "norm" not in name], tables.transpose())
    maps = tables.embedding_and_head(config, "transformer.wte.weight", "lm_head")
    maps.append(tables.one_to_one("transformer.wpe.weight", "transformer.wpe.weight"))
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        maps += tables.layers(config, block, block, _LAYERS, transposed)
    return maps + tables.linear("transformer.ln_f", "transformer.ln_f", True)
