"""Logits equal to transformers', through files in both directions, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.checkpoints.from_hf import import_hf
from toolkit.checkpoints.hf import export_hf
from toolkit.checkpoints.store import write_checkpoint
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

transformers = pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
QWEN2_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
NEOX = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}

HF_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-grouped-tied": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "llama-one-group-wide-heads": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=1, head_dim=24),
    "llama-biases": lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, num_key_value_heads=2),
    "qwen2-tied": lambda: transformers.Qwen2Config(
        **LLAMA, num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=QWEN2_ROPE
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**NEOX),
    "neox-serial-tied": lambda: transformers.GPTNeoXConfig(
        **NEOX, use_parallel_residual=False, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT2, n_inner=96, tie_word_embeddings=False),
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights so large that attention is far from uniform; norms and biases away from one and zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.15, generator=generator)
            if p.dim() == 1 and name.endswith("weight"):
                p.add_(1.0)


def token_ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(1))


def from_folder(folder: Path) -> GPT:
    """Our model from a Hugging Face folder, by the way that users go; its checkpoint is left beside the folder."""
    ours = folder.with_name(f"{folder.name}-ours")
    import_hf(folder, ours)
    return load_model(ours).eval()


def to_folder(model: GPT, folder: Path) -> None:
    files = {"state_dict": model.state_dict(), "config": model.config, "hyperparameters": None, "tokenizer": None}
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    write_checkpoint(checkpoint, lambda tmp: write_model_files(tmp, **files))
    export_hf(checkpoint, folder)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected).abs().max() / expected.abs().max()).item()


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual.float() - expected).pow(2).mean().sqrt().item()


@torch.no_grad()
@pytest.mark.parametrize("name", HF_CONFIGS)
def test_logits_equal_those_of_a_hugging_face_folder_in_fp32_and_bf16(name, tmp_path):
    hf = transformers.AutoModelForCausalLM.from_config(HF_CONFIGS[name]()).eval()
    randomize(hf, seed=0)
    hf.save_pretrained(tmp_path / "hf")
    ours, ids = from_folder(tmp_path / "hf"), token_ids()
    expected = hf(ids).logits
    assert relative_error(ours(ids), expected) < 1e-5

    ours.bfloat16(), hf.bfloat16()
    assert rms_error(ours(ids), expected) <= 1.5 * rms_error(hf(ids).logits, expected)


OUR_CONFIGS = {
    "llama-tied": {"vocab_size": 90, "n_query_groups": 2, "tie_embeddings": True},
    "llama-untied-wide-heads": {"vocab_size": 90, "head_size": 32, "norm_eps": 1e-6, "rope_base": 500.0},
    "llama3-rope": {
        "vocab_size": 96, "rope_base": 500.0,
        "rope_adjustments": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32,
        },
    },
    "llama-biases": {"vocab_size": 96, "bias": True},
    "qwen2": {"family": "qwen2", "vocab_size": 90, "n_query_groups": 2, "attn_bias": True, "tie_embeddings": True},
    "qwen2-wide-heads": {"family": "qwen2", "vocab_size": 96, "head_size": 32, "attn_bias": True, "norm_eps": 1e-6},
    "neox": {
        "family": "gpt_neox", "vocab_size": 90, "rotary_percentage": 0.5, "rope_base": 100.0, "bias": True,
        "parallel_residual": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP",
        "gelu_approximate": "tanh",
    },
    "gpt2": {
        "family": "gpt2", "vocab_size": 90, "position_embedding": "learned", "bias": True, "tie_embeddings": True,
        "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh",
    },
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", OUR_CONFIGS)
def test_our_model_opens_in_transformers_with_equal_logits(name, tmp_path):
    ours = GPT(ModelConfig(block_size=64, n_layer=2, n_head=4, n_embd=64, **OUR_CONFIGS[name]))
    randomize(ours, seed=2)
    to_folder(ours, tmp_path / "hf")
    hf, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = token_ids() % 90
    assert relative_error(ours(ids), hf(ids).logits) < 1e-5
    tied = hf.get_input_embeddings().weight is hf.get_output_embeddings().weight
    assert tied == ours.config.tie_embeddings

    back = from_folder(tmp_path / "hf")  # the other direction of the same table undoes it, bit for bit
    for key, value in ours.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_weights_of_a_hugging_face_folder_come_back_bit_for_bit(name, tmp_path):
    hf = transformers.AutoModelForCausalLM.from_config(HF_CONFIGS[name]())
    randomize(hf, seed=3)
    hf.save_pretrained(tmp_path / "hf")
    from_folder(tmp_path / "hf")
    export_hf(tmp_path / "hf-ours", tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_attention_of_the_random_models_is_not_uniform(tmp_path):
    """Or else the tests above would not see a wrong rotation or mask."""
    config = HF_CONFIGS["llama"]()
    config._attn_implementation = "eager"
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(hf, seed=0)
    with torch.no_grad():
        last_row = hf(token_ids(), output_attentions=True).attentions[1][:, :, -1]
    assert last_row.max(-1).values.mean() > 5 / 48
