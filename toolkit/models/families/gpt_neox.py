"""GPT-NeoX: the Pythia suite (Biderman et al. 2023), and other models trained with its code.

Sources of the named configurations: ``config.json`` of EleutherAI's Hugging Face repositories. From LitGPT: StableLM
and StableCode; Dolly and RedPajama (commit e51aaef, before their removal). gpt-neox-20b has the defaults of
transformers' ``GPTNeoXConfig`` and the activation in its ``config.json``.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named_with

_FIXED: Fields = {"bias": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP"}

# padding_multiple 1: the published vocabulary is not padded
_neox = named_with(
    family="gpt_neox", block_size=2048, padding_multiple=1, rotary_percentage=0.25, parallel_residual=True,
    **_FIXED,
)  # fmt: skip
_pythia = partial(_neox, vocab_size=50304, padding_multiple=64)
_red_pajama = partial(_neox, vocab_size=50432, rotary_percentage=1.0, parallel_residual=False)

_PYTHIA = [
    _pythia("pythia-14m", 6, 128, 4),
    _pythia("pythia-31m", 6, 256, 8),
    _pythia("pythia-70m", 6, 512, 8),
    _pythia("pythia-160m", 12, 768, 12),
    _pythia("pythia-410m", 24, 1024, 16),
    _pythia("pythia-1b", 16, 2048, 8),
    _pythia("pythia-1.4b", 24, 2048, 16),
    _pythia("pythia-2.8b", 32, 2560, 32),
    _pythia("pythia-6.9b", 32, 4096, 32, vocab_size=50432),
    _pythia("pythia-12b", 36, 5120, 40, vocab_size=50688),
]

CONFIGS = [
    *_PYTHIA,
    _neox("gpt-neox-20b", 44, 6144, 64, vocab_size=50432, gelu_approximate="tanh"),
    _neox("dolly-v2-3b", 32, 2560, 32, vocab_size=50280),
    _neox("dolly-v2-7b", 32, 4096, 32, vocab_size=50280),
    _neox("dolly-v2-12b", 36, 5120, 40, vocab_size=50280),
    _red_pajama("RedPajama-INCITE-Base-3B-v1", 32, 2560, 32),
    _red_pajama("RedPajama-INCITE-7B-Base", 32, 4096, 32),
    _neox("stablelm-base-alpha-3b", 16, 4096, 32, vocab_size=50688, block_size=4096),
    _neox("stablelm-base-alpha-7b", 16, 6144, 48, vocab_size=50432, block_size=4096),
    _neox("stablecode-completion-alpha-3b", 32, 2560, 32, vocab_size=49152, block_size=16384),
    _neox("stablecode-completion-alpha-3b-4k", 32, 2560, 32, vocab_size=49152, block_size=4096),
]

# same architecture with other training data or finetuning
ALIASES = {
    **{f"{c.name}-deduped": c.name for c in _PYTHIA},
    **{f"RedPajama-INCITE-{kind}-3B-v1": "RedPajama-INCITE-Base-3B-v1" for kind in ("Chat", "Instruct")},
    **{f"RedPajama-INCITE-7B-{kind}": "RedPajama-INCITE-7B-Base" for kind in ("Chat", "Instruct")},
    **{f"RedPajama-INCITE-{kind}-7B-v0.1": "RedPajama-INCITE-7B-Base" for kind in ("Base", "Chat", "Instruct")},
    "stablelm-tuned-alpha-3b": "stablelm-base-alpha-3b",
    "stablelm-tuned-alpha-7b": "stablelm-base-alpha-7b",
    "stablecode-instruct-alpha-3b": "stablecode-completion-alpha-3b-4k",
}

_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_hf(config_json, hidden_act=tuple(_GELU), attention_bias=(True,))
    fields = hf_config.read_decoder(config_json, vocab_size=50432, block_size=2048, **hf_config.LAYER_NORM)
    fields |= hf_rope.read_rope(config_json, theta="rotary_emb_base", partial="rotary_pct", default_partial=0.25)
    fields |= {
        "n_query_groups": None,
        "parallel_residual": config_json.get("use_parallel_residual", True),
        "gelu_approximate": _GELU[config_json.get("hidden_act", "gelu")],
    }
    return ModelConfig(**fields, **_FIXED)


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_common(config, "GPTNeoXForCausalLM") | {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "gelu" if config.gelu_approximate == "none" else "gelu_new",
        "hidden_dropout": 0.0,
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.block_size,
        "num_attention_heads": config.n_head,
        "num_hidden_layers": config.n_layer,
        "rope_scaling": hf_config.write_rope_scaling(config),
        "rotary_emb_base": config.rope_base,
        "rotary_pct": config.rotary_percentage,
        "use_parallel_residual": config.parallel_residual,
    }


_LAYERS = {
    "norm_1": "input_layernorm", "attn.qkv": "attention.query_key_value", "attn.proj": "attention.dense",
    "norm_2": "post_attention_layernorm", "mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def weight_map(config: ModelConfig) -> tables.WeightMap:
    per_head = {"attn.qkv": tables.interleave_groups(config.n_head, config.n_head, config.head_size)}
    maps = tables.embedding_and_head(config, "gpt_neox.embed_in.weight", "embed_out")
    for i in range(config.n_layer):
        maps += tables.layers(config, f"transformer.h.{i}", f"gpt_neox.layers.{i}", _LAYERS, per_head)
    return maps + tables.linear("transformer.ln_f", "gpt_neox.final_layer_norm", True)
