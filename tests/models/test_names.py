"""Every named configuration: parameter counts and fields, against transformers and LitGPT."""

import dataclasses
import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.cases import check_each

from toolkit.commands import pretrain
from toolkit.dotted_paths import import_object
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import (
    DEFAULT_MODEL,
    FAMILIES,
    config_from_hf,
    family_of,
    get_config,
    list_aliases,
    list_names,
    list_names_by_family,
)
from toolkit.models.gpt import GPT, model_on_meta
from toolkit.planning.training_options import PretrainOptions

# Published totals, from model cards and papers; for Gemma, Qwen 3 and the larger Qwen 2.5, from KerasHub's presets.
# Unlike LitGPT's counts, they show which embeddings are tied.
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
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-Coder-0.5B": 494_032_768,
    "Qwen2.5-Coder-3B": 3_085_938_688,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_099_328,
    "gemma-3-12b": 11_765_788_416,
    "gemma-3-27b": 27_009_002_240,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


# Written by write_litgpt_parameters.py.
LITGPT = json.loads(Path(__file__).with_name("litgpt_parameters.json").read_text())

# LitGPT's configurations that contradict the published models; toolkit has no such names.
LEFT_OUT = {
    "stable-code-3b",  # rope_base
    "CodeLlama-13b-Instruct-hf",  # block_size is an eighth of the others'
    "CodeLlama-70b-Instruct-hf",  # vocab_size is one less than the weights'
    "Platypus2-70B",  # no grouped queries, unlike the base Llama 2
    "Phi-3-mini-128k-instruct",  # no longrope
    "Llama-2-7b-chat-hf-function-calling-v2",  # norm_eps is not Llama 2's
    "Qwen2.5-14B-Instruct", "Qwen2.5-32B-Instruct", "Qwen2.5-72B-Instruct",  # no source for block_size
}  # fmt: skip

# Fields in which LitGPT differs from the published models.
CORRECTED = {
    "block_size": {
        "pythia-14m", "pythia-31m",  # trained on 2,048: models/14M/pythia-14m.yml of EleutherAI/pythia
        "gemma-2b", "gemma-7b", "gemma-3-1b", "LLaMA-2-7B-32K", "Phi-3.5-mini-instruct", "Mistral-7B-v0.1",
        "Qwen2.5-1.5B-Instruct", "Qwen2.5-7B-Instruct",
    },
    "norm_eps": {name for name in list_names() if name.startswith("gemma")},
    "padded_vocab_size": {"Mixtral-8x22B-v0.1"},  # the Instruct model's
    "sliding_window_size": {
        "Phi-3-mini-4k-instruct",  # LitGPT adds one
        "Phi-4-mini-instruct",  # larger than block_size
    },
}  # fmt: skip


def count(config: ModelConfig) -> int:
    return sum(p.numel() for p in model_on_meta(config).parameters())


@functools.cache
def count_untied(name: str) -> int:
    """Count parameters of all layers from models with one and two layers of each type (dense, experts)."""
    config = dataclasses.replace(get_config(name), tie_embeddings=False)
    kinds, layers = Counter(int(config.has_experts(i)) for i in range(config.n_layer)), 0
    for kind, number in kinds.items():
        one, two = (
            count(dataclasses.replace(config, n_layer=n, moe_indices=[kind] * n if config.n_expert else None))
            for n in (1, 2)
        )
        layers += number * (two - one)
    return 2 * one - two + layers


def test_named_configs_have_the_published_number_of_parameters():
    def check(name, parameters):
        config = get_config(name)
        head = config.padded_vocab_size * config.n_embd if config.tie_embeddings else 0
        assert count_untied(config.name) - head == parameters

    check_each(check, PARAMETERS.items())


def test_shared_names_match_litgpt():
    def check(name):
        config = get_config(name)
        litgpt = dict(zip(LITGPT["fields"], LITGPT["models"][name], strict=True))
        more_tokens = config.padded_vocab_size - litgpt["padded_vocab_size"]
        assert count_untied(config.name) == litgpt.pop("parameters") + 2 * more_tokens * config.n_embd
        assert (config.rope_adjustments or {}).get("factor", 1) == litgpt.pop("rope_factor")
        differing = {field for field, value in litgpt.items() if getattr(config, field) != value}
        assert differing == {field for field, names in CORRECTED.items() if config.name in names}

    check_each(check, sorted(LITGPT["models"].keys() - LEFT_OUT))


def test_excluded_litgpt_names_are_absent():
    for name in LEFT_OUT:
        assert name in LITGPT["models"]
        with pytest.raises(UserError):
            get_config(name)


def count_in_transformers(config: ModelConfig) -> int:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        values = transformers.AutoConfig.for_model(**family_of(config).to_hf_config(config))
        return sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(values).parameters())


@pytest.mark.slow
def test_two_layer_configs_have_as_many_parameters_in_transformers():
    def check(name):
        config = get_config(name).with_vocab_size(4096)
        if config.family == "gemma4_text":  # all layers, in the next test: the last one must have full attention
            return
        config = dataclasses.replace(config, n_layer=2)
        assert count(config) == count_in_transformers(config)

    check_each(check, list_names())


@pytest.mark.slow
def test_named_configs_have_as_many_parameters_in_transformers():
    def check(name):
        config = get_config(name).with_vocab_size(4096)
        assert count(config) == count_in_transformers(config) == PARAMETERS.get(name, count(config))

    check_each(check, list_names())


def test_config_json_round_trip():
    def check(name):
        config = get_config(name).with_vocab_size(4096)
        back = config_from_hf(family_of(config).to_hf_config(config))
        differing = {k for k, v in config.to_dict().items() if getattr(back, k) != v}
        assert differing <= {"name", "padding_multiple"}

    check_each(check, list_names())


def test_names_are_unique_and_numerous():
    names = [name.lower() for name in (*list_names(), *list_aliases())]
    assert len(set(names)) == len(names) >= 309
    assert len(list_names()) >= 143
    assert {get_config(alias).name for alias in list_aliases()} <= set(list_names())
    assert [name for names in list_names_by_family().values() for name in names] == list_names()


def test_configurations_name_the_family_of_their_module():
    configs = {path: import_object(path).CONFIGS for path in FAMILIES.values()}
    wrong = [config.name for path in configs for config in configs[path] if FAMILIES.get(config.family) != path]
    assert not wrong


def test_pretrain_list_prints_every_name_wrapped(monkeypatch, capsys):
    pretrain.setup(PretrainOptions(model_name="list"))
    out = capsys.readouterr().out
    assert set(list_names()) <= set(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert "\nqwen3       Qwen3-0.6B  Qwen3-1.7B" in out
    monkeypatch.setattr("toolkit.commands.pretrain.list_names_by_family", lambda: {"free_transformer": ["free-tiny"]})
    pretrain.setup(PretrainOptions(model_name="list"))
    assert "free_transformer free-tiny\n" in capsys.readouterr().out


def test_default_is_first_and_builds_with_a_vocabulary():
    assert list_names()[0] == DEFAULT_MODEL == "mini-llama"
    for name in ("mini-llama", "pico-llama"):
        assert get_config(name).vocab_size is None
        with pytest.raises(ValueError, match="vocab_size"):
            GPT(get_config(name))
    assert 3e6 < count(get_config(DEFAULT_MODEL).with_vocab_size(4096)) < 6e6


SPELLINGS = {
    "tiny-llama-1.1b": "tiny-llama-1.1b",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": "tiny-llama-1.1b",
    "llama-2-7b": "Llama-2-7b-hf",
    "Llama-2-7b-hf": "Llama-2-7b-hf",
    "meta-llama/Llama-2-13b-hf": "Llama-2-13b-hf",
    "LLAMA-2-70B": "Llama-2-70b-hf",
    "meta-llama/Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "llama-3.1-405b": "Llama-3.1-405B",
    "meta-llama/llama-3.2-1b": "Llama-3.2-1B",
    "HuggingFaceTB/SmolLM2-135M": "SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "SmolLM2-135M",
    "meta-llama/Llama-3.2-1B-Instruct": "Llama-3.2-1B",
    "meta-llama/Llama-2-7b-chat-hf": "Llama-2-7b-hf",
    "Qwen/Qwen2.5-7B": "Qwen2.5-7B",
    "qwen2.5-0.5b-instruct": "Qwen2.5-0.5B",
    "EleutherAI/pythia-14m": "pythia-14m",
    "pythia-1.4b-deduped": "pythia-1.4b",
    "openai-community/gpt2": "gpt2",
    "GPT2-XL": "gpt2-xl",
    "gpt2-124M": "gpt2",
    "gpt2-1558M": "gpt2-xl",
    "Pico-Llama": "pico-llama",
    "meta-llama/Meta-Llama-3-8B-Instruct": "Llama-3-8B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "Llama-3.1-70B",
    "google/gemma-3-4b-it": "gemma-3-4b",
    "Gemma-2-9b": "gemma-2-9b",
    "Qwen/Qwen3-8B-Base": "Qwen3-8B",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "Qwen3-30B-A3B-Instruct-2507",
    "qwen3-coder-30b-a3b": "Qwen3-Coder-30B-A3B-Instruct",
    "lmsys/vicuna-7b-v1.5": "Llama-2-7b-hf",
}


def test_names_ignore_organization_and_case():
    def check(spelling, name):
        assert get_config(spelling).name == name

    check_each(check, SPELLINGS.items())


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match="'pythia-14n'.*did you mean 'pythia-14m'"):
        get_config("pythia-14n")
    with pytest.raises(UserError, match="did you mean 'Llama-3.1-8B-Instruct'"):
        get_config("Llama-3.1-8B-Instuct")
    with pytest.raises(UserError, match="'zzz'.*list"):
        get_config("zzz")


def test_listing_names_does_not_import_torch():
    code = (
        "import sys, toolkit.models.families as f; f.list_names(); f.get_config('gpt2'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
