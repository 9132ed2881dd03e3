"""StarCoder 2 (Lozhkov et al. 2024): LayerNorm, non-gated MLP, biases, optional sliding windows. Names are Llama's.

Sources of the named configuration: MLC LLM's presets, and transformers' ``Starcoder2Config`` default for tied
embeddings.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

_FIXED: Fields = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh"}

CONFIGS = [
    ModelConfig(
        name="starcoder2-7b", family="starcoder2", block_size=16384, vocab_size=49152, n_layer=32, n_embd=4608,
        n_head=36, n_query_groups=4, intermediate_size=18432, rope_base=1000000.0, sliding_window_size=4096, bias=True,
        tie_embeddings=True, **_FIXED,
    ),
]  # fmt: skip


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_hf(config_json, hidden_act=("gelu_pytorch_tanh", "gelu_new"), layer_types=(None,))
    config_json = {"norm_epsilon": 1e-5, "num_key_value_heads": 2, **config_json}
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=49152, block_size=4096, norm_eps="norm_epsilon", tied=True),
        **hf_rope.read_rope(config_json),
        **hf_config.read_windows(config_json),
        bias=config_json.get("use_bias", True),
        **_FIXED,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(
        config, "Starcoder2ForCausalLM", hidden_act="gelu_pytorch_tanh",
        norm_epsilon=config.norm_eps, sliding_window=config.sliding_window_size, use_bias=config.bias,
        embedding_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


def weight_map(config: ModelConfig) -> tables.WeightMap:
    names = {"attn.proj": "self_attn.o_proj", "norm_2": "post_attention_layernorm"}
    names |= {"mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj"}
    maps = tables.embedding_and_head(config, "model.embed_tokens.weight", "lm_head")
    for i in range(config.n_layer):
        native, hf = f"transformer.h.{i}", f"model.layers.{i}"
        maps += tables.layers(config, native, hf, {"norm_1": "input_layernorm"})
        maps += tables.queries_keys_values(config, native, hf)
        maps += tables.layers(config, native, hf, names)
    return maps + tables.linear("transformer.ln_f", "model.norm", True)
