"""Llama and models with the same Hugging Face class: Falcon 3, SmolLM, and toolkit's default models.

Sources of the named configurations: LitGPT (Vicuna, LongChat and Nous-Hermes at commit e51aaef, before their removal),
and ``config.json`` of Llama 3.2, SmolLM and SmolLM2 (also in MLC LLM's presets), including tied embeddings. llama-65b
comes from lit-llama, with block_size and norm_eps of the smaller Llamas.
"""

from functools import partial

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables
from toolkit.models.families.named import named, named_with

_SCALED_8X = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_SCALED_32X = {**_SCALED_8X, "factor": 32.0}

_llama2 = named_with(block_size=4096, vocab_size=32000)
_llama1 = partial(_llama2, block_size=2048, norm_eps=1e-6)
# padding_multiple 1: the published vocabulary is not padded
_code_llama = partial(_llama2, block_size=16384, padding_multiple=1, rope_base=1000000.0)
_llama3 = named_with(block_size=131072, vocab_size=128256, rope_base=500000.0)
_smollm = named_with(block_size=2048, vocab_size=49152, tie_embeddings=True)
_smollm2 = partial(_smollm, block_size=8192, rope_base=100000.0)
_falcon3 = named_with(block_size=32768, vocab_size=131072, head_size=256, rope_base=1000042.0, norm_eps=1e-6)

_7B, _13B = (32, 4096, 32, 32, 11008), (40, 5120, 40, 40, 13824)
_30B, _65B = (60, 6656, 52, 52, 17920), (80, 8192, 64, 64, 22016)
_34B, _70B = (48, 8192, 64, 8, 22016), (80, 8192, 64, 8, 28672)

CONFIGS = [
    # The default model: 5.2 million parameters with a vocabulary of 4,096. vocab_size comes from the tokenizer.
    named("mini-llama", 6, 256, 8, 4, 640, block_size=256, tie_embeddings=True),
    named("pico-llama", 2, 64, 4, 2, 160, block_size=128, tie_embeddings=True),
    _llama2("tiny-llama-1.1b", 22, 2048, 32, 4, 5632, block_size=2048),
    _llama2("micro-llama-300M", 12, 1024, 16, 4, 5632, block_size=2048),
    _llama1("llama-7b", *_7B),
    _llama1("llama-13b", *_13B),
    _llama1("llama-30b", *_30B),
    _llama1("llama-65b", *_65B),
    _llama1("open_llama_3b", 26, 3200, 32, 32, 8640),
    _llama1("longchat-7b-16k", *_7B, block_size=16384, rope_adjustments={"factor": 8.0}),
    _llama1("longchat-13b-16k", *_13B, block_size=16384, rope_adjustments={"factor": 8.0}),
    _llama1("Nous-Hermes-13b", *_13B, vocab_size=32001, padding_multiple=1),
    _llama2("Llama-2-7b-hf", *_7B),
    _llama2("Llama-2-13b-hf", *_13B),
    _llama2("Llama-2-70b-hf", *_70B),
    _llama2("LLaMA-2-7B-32K", *_7B, block_size=32768, rope_adjustments={"factor": 8.0}),
    _llama2("vicuna-7b-v1.5-16k", *_7B, block_size=16384, rope_adjustments={"factor": 4.0}),
    _llama2("vicuna-13b-v1.5-16k", *_13B, block_size=16384, rope_adjustments={"factor": 4.0}),
    _llama2("Nous-Hermes-Llama2-13b", *_13B, vocab_size=32032, padding_multiple=1),
    _code_llama("CodeLlama-7b-hf", *_7B, vocab_size=32016),
    _code_llama("CodeLlama-7b-Python-hf", *_7B),
    _code_llama("CodeLlama-13b-hf", *_13B, vocab_size=32016),
    _code_llama("CodeLlama-13b-Python-hf", *_13B),
    _code_llama("CodeLlama-34b-hf", *_34B),
    _code_llama("CodeLlama-70b-hf", *_70B, vocab_size=32016),
    _llama3("Llama-3-8B", 32, 4096, 32, 8, 14336, block_size=8192),
    _llama3("Llama-3-70B", 80, 8192, 64, 8, 28672, block_size=8192),
    _llama3("Llama-3.1-8B", 32, 4096, 32, 8, 14336, rope_adjustments=_SCALED_8X),
    _llama3("Llama-3.1-70B", 80, 8192, 64, 8, 28672, rope_adjustments=_SCALED_8X),
    _llama3("Llama-3.1-405B", 126, 16384, 128, 8, 53248, rope_adjustments=_SCALED_8X),
    _llama3("Llama-3.2-1B", 16, 2048, 32, 8, 8192, rope_adjustments=_SCALED_32X, tie_embeddings=True),
    _llama3("Llama-3.2-3B", 28, 3072, 24, 8, 8192, rope_adjustments=_SCALED_32X, tie_embeddings=True),
    _smollm("SmolLM-135M", 30, 576, 9, 3, 1536),
    _smollm("SmolLM-360M", 32, 960, 15, 5, 2560),
    _smollm("SmolLM-1.7B", 24, 2048, 32, 32, 8192),
    _smollm2("SmolLM2-135M", 30, 576, 9, 3, 1536),
    _smollm2("SmolLM2-360M", 32, 960, 15, 5, 2560),
    _smollm2("SmolLM2-1.7B", 24, 2048, 32, 32, 8192, rope_base=130000.0),
    _falcon3("Falcon3-1B-Base", 18, 2048, 8, 4, 8192, block_size=4096),
    _falcon3("Falcon3-3B-Base", 22, 3072, 12, 4, 9216),
    _falcon3("Falcon3-7B-Base", 28, 3072, 12, 4, 23040),
    _falcon3("Falcon3-10B-Base", 40, 3072, 12, 4, 23040),
    _llama2("salamandra-2b", 24, 2048, 16, 16, 5440, block_size=8192, vocab_size=256000),
    _llama2("salamandra-7b", 32, 4096, 32, 8, 11008, block_size=8192, vocab_size=256000, norm_eps=1e-6),
]

ALIASES = {
    "TinyLlama-1.1B": "tiny-llama-1.1b",
    "TinyLlama-1.1B-intermediate-step-1431k-3T": "tiny-llama-1.1b",
    "TinyLlama_v1.1": "tiny-llama-1.1b",
    "tiny-llama-1.1b-chat": "tiny-llama-1.1b",
    "TinyLlama-1.1B-Chat-v1.0": "tiny-llama-1.1b",
    "MicroLlama": "micro-llama-300M",
    **{f"Meta-{c.name}": c.name for c in CONFIGS if c.name.startswith(("Llama-3-", "Llama-3.1-"))},
    # same architecture with other training data or finetuning
    **{f"{c.name}-Instruct": c.name for c in CONFIGS if c.name.startswith(("Llama-3", "SmolLM"))},
    **{f"Meta-{c.name}-Instruct": c.name for c in CONFIGS if c.name.startswith(("Llama-3-", "Llama-3.1-"))},
    **{f"{c.name}-instruct": c.name for c in CONFIGS if c.name.startswith("salamandra")},
    **{f"Falcon3-{size}-Instruct": f"Falcon3-{size}-Base" for size in ("1B", "3B", "7B", "10B")},
    "Llama-3.3-70B-Instruct": "Llama-3.1-70B",
    "Llama-3.1-Nemotron-70B-Instruct-HF": "Llama-3.1-70B",
    **{f"{org}R1-Distill-Llama-{size}": f"Llama-3.1-{size}" for org in ("", "DeepSeek-") for size in ("8B", "70B")},
    **{f"Llama-2-{size}": f"Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    **{f"Llama-2-{size}-chat-hf": f"Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    "vicuna-7b-v1.5": "Llama-2-7b-hf",
    "vicuna-13b-v1.5": "Llama-2-13b-hf",
    "Nous-Hermes-llama-2-7b": "Llama-2-7b-hf",
    "Platypus2-7B": "Llama-2-7b-hf",
    "Platypus2-13B": "Llama-2-13b-hf",
    "Camel-Platypus2-13B": "Llama-2-13b-hf",
    "Stable-Platypus2-13B": "Llama-2-13b-hf",
    "Camel-Platypus2-70B": "Llama-2-70b-hf",
    "Platypus2-70B-instruct": "Llama-2-70b-hf",
    "FreeWilly2": "Llama-2-70b-hf",
    "CodeLlama-7b-Instruct-hf": "CodeLlama-7b-hf",
    "CodeLlama-34b-Python-hf": "CodeLlama-34b-hf",
    "CodeLlama-34b-Instruct-hf": "CodeLlama-34b-hf",
    "CodeLlama-70b-Python-hf": "CodeLlama-70b-hf",
    "open_llama_7b": "llama-7b",
    "open_llama_13b": "llama-13b",
    "vicuna-7b-v1.3": "llama-7b",
    "vicuna-13b-v1.3": "llama-13b",
    "vicuna-33b-v1.3": "llama-30b",
    "Platypus-30B": "llama-30b",
}


def from_hf_config(config_json: Fields) -> ModelConfig:
    hf_config.require_silu(config_json)
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=32000, block_size=2048),
        **hf_rope.read_rope(config_json),
        **hf_config.read_biases(config_json),
    )


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(config, "LlamaForCausalLM", mlp_bias=config.bias)


weight_map = tables.decoder_weights
