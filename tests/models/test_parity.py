"""Logits match transformers' after import and export through files, for every family."""

import pytest
import torch
from helpers.cases import slow_except
from helpers.tiny_configs import HF_CONFIGS, NATIVE_CONFIGS
from helpers.tiny_models import from_folder, randomize, relative_error, to_folder, token_ids
from safetensors.torch import load_file

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import build_model
from toolkit.models.kv_cache import KVCache

transformers = pytest.importorskip("transformers")

# one model of each kind of blocks, cache and weight map
FAST = ("llama", "llama-grouped-tied", "qwen3-moe", "gpt-oss", "gemma3", "phi3", "falcon-groups", "deepseek-v3", "gpt2")
MASKED = (*FAST, "mistral-window", "gemma2", "ministral3", "olmo3", "smollm3", "falcon-one-group", "phi3-long")

# Without the slow tests each model type is exported and read again, or imported, once at least.
TYPE_OF = {name: make().model_type for name, make in HF_CONFIGS.items()}
FAST_TYPES = {TYPE_OF[name] for name in FAST}
EXPORTED = {  # the first of each type
    options.get("family", "llama"): name
    for name, options in reversed(NATIVE_CONFIGS.items())
    if options.get("family", "llama") not in FAST_TYPES
}
OTHERS = {kind: name for name, kind in reversed(TYPE_OF.items()) if kind not in EXPORTED.keys() | FAST_TYPES}


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual.float() - expected).pow(2).mean().sqrt().item()


def typical_rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The median over tokens: rounding occasionally routes a token to another expert, in both models."""
    return (actual.float() - expected).pow(2).mean(-1).sqrt().median().item()


@torch.no_grad()
@pytest.mark.parametrize("name", slow_except({*MASKED, *OTHERS.values()}, HF_CONFIGS))
def test_imported_model_has_equal_logits_in_fp32_and_bf16(name, tiny_models):
    tiny, ids = tiny_models[name], token_ids()
    native = load_model(tiny.native).eval()
    assert relative_error(native(ids), tiny.logits) < 1e-5

    error = typical_rms_error if native.config.n_expert else rms_error
    assert error(native.bfloat16()(ids), tiny.logits) <= 1.5 * error(tiny.bf16_logits, tiny.logits)


@torch.no_grad()
@pytest.mark.parametrize("name", slow_except(MASKED, HF_CONFIGS))
def test_cached_and_packed_rows_have_the_logits_of_transformers(name, tiny_models):
    """A prompt of 20 tokens, then one token at a time; and documents of 48 and 16 tokens in one row."""
    tiny, ids = tiny_models[name], token_ids()
    native = load_model(tiny.native).eval()
    cache = KVCache(native.config, max_length=48, batch_size=2)
    cache.sequence_length = 48
    pieces = ids.split([20] + [1] * 28, dim=1)
    cached = torch.cat([native(piece, kv_cache=cache) for piece in pieces], dim=1)
    assert relative_error(cached, tiny.logits) < 1e-5

    if native.config.original_max_position == 16:  # of longrope: the second document has other factors
        return
    row = torch.cat([ids[0], ids[1, :16]])[None]
    documents = torch.tensor([0] * 48 + [1] * 16)[None]
    packed = native(row, documents=documents, positions=torch.cat([torch.arange(48), torch.arange(16)]))
    assert relative_error(packed[0], torch.cat([tiny.logits[0], tiny.logits[1, :16]])) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", slow_except(["llama-tied", *EXPORTED.values()], NATIVE_CONFIGS))
def test_exported_model_has_equal_logits_in_transformers(name, tmp_path):
    native = build_model(ModelConfig(block_size=64, n_layer=2, n_head=4, n_embd=64, **NATIVE_CONFIGS[name]))
    randomize(native, seed=2)
    to_folder(native, tmp_path / "hf")
    hf, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = token_ids() % 90
    assert relative_error(native(ids), hf(ids).logits) < 1e-5
    tied = hf.get_input_embeddings().weight is hf.get_output_embeddings().weight
    assert tied == native.config.tie_embeddings

    back = from_folder(tmp_path / "hf")  # the inverse of the weight map is exact
    for key, value in native.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


@pytest.mark.parametrize("name", slow_except(FAST, HF_CONFIGS))
def test_weights_round_trip_bit_for_bit(name, tiny_models, tmp_path):
    tiny = tiny_models[name]
    export_hf(tiny.native, tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny.hf, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_random_models_have_nonuniform_attention(tmp_path):
    """Otherwise the tests above would not detect a wrong RoPE or mask."""
    config = HF_CONFIGS["llama"]()
    config._attn_implementation = "eager"
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(hf, seed=0)
    with torch.no_grad():
        last_row = hf(token_ids(), output_attentions=True).attentions[1][:, :, -1]
    assert last_row.max(-1).values.mean() > 5 / 48
