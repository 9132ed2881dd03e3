from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import DEFAULT_MODEL, config_from_hf, family_of, get_config, list_names
from toolkit.models.gpt import GPT

# Totals as published: model cards and papers of the repositories named.
PARAMETERS = {
    "pythia-14m": 14_067_712,
    "pythia-31m": 30_494_720,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "tiny-llama-1.1b": 1_100_048_384,
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-2-13b-hf": 13_015_864_320,
    "Llama-2-70b-hf": 68_976_648_192,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_named_configs_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = GPT(get_config(name))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_every_name_is_checked_here_and_builds_with_a_vocabulary():
    assert set(list_names()) == {*PARAMETERS, "mini-llama", "pico-llama"}
    assert list_names()[0] == DEFAULT_MODEL == "mini-llama"
    for name in ("mini-llama", "pico-llama"):
        assert get_config(name).vocab_size is None
        with pytest.raises(ValueError, match="vocab_size"):
            GPT(get_config(name))
    with torch.device("meta"):
        model = GPT(get_config(DEFAULT_MODEL).with_vocab_size(4096))
    assert 3e6 < sum(p.numel() for p in model.parameters()) < 6e6


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("tiny-llama-1.1b", "tiny-llama-1.1b"),
        ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "tiny-llama-1.1b"),
        ("llama-2-7b", "Llama-2-7b-hf"),
        ("Llama-2-7b-hf", "Llama-2-7b-hf"),
        ("meta-llama/Llama-2-13b-hf", "Llama-2-13b-hf"),
        ("LLAMA-2-70B", "Llama-2-70b-hf"),
        ("meta-llama/Meta-Llama-3.1-8B", "Llama-3.1-8B"),
        ("llama-3.1-405b", "Llama-3.1-405B"),
        ("meta-llama/llama-3.2-1b", "Llama-3.2-1B"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("meta-llama/Llama-3.2-1B-Instruct", "Llama-3.2-1B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b-hf"),
        ("Qwen/Qwen2.5-7B", "Qwen2.5-7B"),
        ("qwen2.5-0.5b-instruct", "Qwen2.5-0.5B"),
        ("EleutherAI/pythia-14m", "pythia-14m"),
        ("pythia-1.4b-deduped", "pythia-1.4b"),
        ("openai-community/gpt2", "gpt2"),
        ("GPT2-XL", "gpt2-xl"),
        ("gpt2-124M", "gpt2"),
        ("gpt2-1558M", "gpt2-xl"),
        ("Pico-Llama", "pico-llama"),
    ],
)
def test_names_match_without_organisation_and_case(spelling, name):
    assert get_config(spelling).name == name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="'pythia-14n'.*did you mean 'pythia-14m'"):
        get_config("pythia-14n")
    with pytest.raises(UserError, match="'zzz'.*list"):
        get_config("zzz")


def test_names_are_listed_without_torch():
    code = (
        "import sys, toolkit.models.families as f; f.list_names(); f.get_config('gpt2'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_json_leads_back_to_the_config(name):
    config = get_config(name)
    back = config_from_hf(family_of(config).to_hf(config))
    differing = {k for k, v in config.to_dict().items() if getattr(back, k) != v}
    assert differing <= {"name", "padding_multiple"}


def test_config_json_of_a_padded_vocabulary_counts_the_rows_of_the_weights():
    config = ModelConfig(vocab_size=100)
    assert family_of(config).to_hf(config)["vocab_size"] == 128


LLAMA31 = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 131072,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_old_and_new_forms_of_the_rotary_fields_are_read_alike():
    old = config_from_hf(LLAMA31 | {"rope_theta": 500000.0, "rope_scaling": SCALING})
    new = config_from_hf(LLAMA31 | {"rope_parameters": {**SCALING, "rope_theta": 500000.0}})
    assert old == new
    assert (old.rope_base, old.rope_adjustments["original_max_seq_len"]) == (500000.0, 8192)
    neox = {**LLAMA31, "model_type": "gpt_neox"}
    old = config_from_hf(neox | {"rotary_pct": 0.5, "rotary_emb_base": 500})
    new = config_from_hf(neox | {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500}})
    assert old == new
    assert (old.rope_base, old.rotary_percentage) == (500.0, 0.5)
    assert config_from_hf(neox).rotary_percentage == 0.25


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; only llama, .*, granite"),
        ({"model_type": "qwen"}, "'qwen' is not supported; .*; did you mean 'qwen3'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "is not supported"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear_attention", "full_attention"]},
            "layer_types: 'linear_attention' is not supported",
        ),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm True"),
        ({"model_type": "falcon", "alibi": True}, "alibi True"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act 'silu'"),
        ({"rope_parameters": "fast"}, "not a 'llama' model's"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_adjustments .*: the keys must be one of"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias"),
    ],
)
def test_a_config_json_that_we_cannot_compute_is_refused(change, named):
    with pytest.raises(UserError, match=named):
        config_from_hf(LLAMA31 | change)


def test_a_config_json_without_a_fact_names_it():
    with pytest.raises(UserError, match="config.json: hidden_size is missing; a 'llama' model needs it"):
        config_from_hf({key: value for key, value in LLAMA31.items() if key != "hidden_size"})


@pytest.mark.parametrize("name", [name for name in PARAMETERS if "Qwen" in name or "SmolLM2" in name])
def test_transformers_builds_named_configs_with_as_many_parameters(name):
    transformers = pytest.importorskip("transformers")
    config = get_config(name)
    values = family_of(config).to_hf(config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    assert sum(p.numel() for p in theirs.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Qwen2.5-0.5B", {"bias": True}),
        ("Qwen2.5-0.5B", {"attn_bias": False}),
        ("pico-llama", {"parallel_residual": True}),
        ("pico-llama", {"attn_bias": True}),
        ("pico-llama", {"rotary_percentage": 0.5}),
        ("pythia-14m", {"n_query_groups": 2}),
        ("gpt2", {"position_embedding": "rope"}),
    ],
)
def test_a_config_that_hugging_face_cannot_express_is_refused(name, change):
    config = ModelConfig(**(get_config(name).with_vocab_size(100).to_dict() | change))
    for export in (family_of(config).to_hf, family_of(config).weights):
        with pytest.raises(UserError, match=next(iter(change))):
            export(config)


@pytest.mark.parametrize("name", ["pico-llama", "pythia-14m", "gpt2", "Qwen2.5-0.5B"])
def test_n10_a_tied_head_is_listed_once_and_never_exported(name):
    for tied in (True, False):
        config = ModelConfig(
            **(get_config(name).with_vocab_size(100).to_dict() | {"tie_embeddings": tied, "n_layer": 1})
        )
        maps = family_of(config).weights(config)
        ours, theirs = [n for m in maps for n in m.ours], [n for m in maps for n in m.theirs]
        assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
        with torch.device("meta"):
            parameters = {n for n, _ in GPT(config).named_parameters(remove_duplicate=False)}
        assert set(ours) == parameters - ({"lm_head.weight"} if tied else set())
        assert family_of(config).to_hf(config)["tie_word_embeddings"] is tied
