"""Out to LitGPT: the files that LitGPT itself wrote come back unchanged, and LitGPT computes the same logits."""

import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch
import yaml
from helpers.cases import check_each
from helpers.peak_memory import rise
from helpers.tiny_models import token_ids
from toolkit_interop import export_litgpt as export_module
from toolkit_interop.export_litgpt import export_litgpt, litgpt_config

from extensions.interop.tests.test_litgpt import FAMILIES, MODELS, difference
from tests.checkpoints.test_adapters import LLAMA, make, tokens, write_base
from toolkit.checkpoints.folder import load_model, read_model_config
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT

# A Python with LitGPT 0.5.13, such as of `python -m venv DIR && DIR/bin/pip install litgpt==0.5.13 torch==2.13`
LITGPT_PYTHON = os.environ.get("TOOLKIT_TEST_LITGPT_PYTHON")
EXPORTED = [
    "llama", "llama-grouped-tied", "llama-one-group-wide-heads", "llama-biases", "llama3-rope", "llama-linear-rope",
    "mistral", "mistral-window", "mixtral", "mixtral-window-wide-heads-one-expert", "qwen2", "qwen2-tied",
    "qwen2-windows", "qwen3", "qwen3-tied", "qwen3-moe", "gemma", "gemma2", "gemma2-without-caps", "gemma3", "phi",
    "phi-grouped", "phi-norms", "phi3", "phi3-window", "neox", "neox-serial-tied", "falcon-one-group", "falcon-groups",
    "falcon-groups-one-norm", "falcon-no-groups", "olmo", "olmo2", "stablelm", "stablelm-parallel", "starcoder2",
    "starcoder2-without-biases", "glm4", "seed-oss", "seed-oss-biases", "ernie4.5",
    "ernie4.5-biases-untied", "olmoe-normed", "ministral-full-below", "exaone4-without-windows-tied",
]  # fmt: skip
REFUSED = {
    "llama-yarn": "rope_adjustments yarn", "phi3-long": "rope_adjustments longrope", "smollm3": "rope_indices",
    "qwen2-moe": "norm_topk_prob False", "qwen2-moe-normed-windows-without-biases": "shared_expert", "gpt2": "learned",
    "qwen3-moe-not-normed-wide-heads-dense-first": "norm_topk_prob", "gpt-oss-without-windows-or-scaling": "bias True",
    "olmo-clipped": "clip_qkv", "olmo3": "yarn", "stablelm-12b": "norm_qk_type per_head", "granite": "multiplier",
    "deepseek-v2": "latent_attention", "llama-attention-biases": "attn_proj_bias", "cohere2": "rope_indices",
    "hunyuan": "norm_qk_after_rope", "apertus": "mlp_class_name XieluMLP",
    "gemma4": "'gemma4_text'",
}  # fmt: skip


def test_files_that_litgpt_wrote_come_back_unchanged(tmp_path):
    changes = {
        "llama-condensed": {"rope_adjustments": {"factor": 8.0}},  # instead of rope_condense_ratio
        **dict.fromkeys(["mixtral", "qwen3-experts"], {"norm_topk_prob": True}),  # LitGPT ignores it
        "mistral": {"sliding_window_indices": None},  # all layers
        "phi3": {"sliding_window_indices": None, "name": "Phi-3-Phi-4-mini-instruct"},
    }

    def check(name):
        export_litgpt(MODELS / name, tmp_path / name)
        expected, actual = load_weights(MODELS / name), load_weights(tmp_path / name)
        assert actual.keys() == expected.keys()
        assert all(
            torch.equal(actual[key], tensor) and actual[key].dtype == tensor.dtype for key, tensor in expected.items()
        )
        before, after = (
            yaml.safe_load((folder / name / "model_config.yaml").read_text()) for folder in (MODELS, tmp_path)
        )
        assert after.keys() <= before.keys()
        after["hf_config"] = before["hf_config"]
        assert {key: value for key, value in after.items() if before[key] != value} == changes.get(name, {})

    check_each(check, FAMILIES)


def test_every_other_architecture_is_exported_or_refused(tmp_path, tiny_models):
    def check(name):
        export_litgpt(tiny_models[name].native, tmp_path / name)
        model, again = load_model(tiny_models[name].native), load_model(tmp_path / name)
        assert torch.equal(again(token_ids()), model(token_ids()))
        weights = load_weights(tmp_path / name)
        assert weights["lm_head.weight"].data_ptr() != weights["transformer.wte.weight"].data_ptr()

    def check_refused(name, reason):
        folder = tiny_models[name].native
        with pytest.raises(UserError, match=f"LitGPT does not support .*{reason}.*; run toolkit convert_to_hf"):
            export_litgpt(folder, tmp_path / "refused")

    check_each(check, ["llama-grouped-tied", "gemma3", "qwen3-moe", "phi-norms"])
    check_each(check_refused, list(REFUSED.items())[:3] + list(REFUSED.items())[-3:])
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_all_other_architectures_are_refused(tmp_path, tiny_models):
    def check(name, reason):
        with pytest.raises(UserError, match=reason):
            export_litgpt(tiny_models[name].native, tmp_path / "refused")

    check_each(check, REFUSED.items())


def test_names_from_which_litgpt_derives_norms():
    for config, name in [
        (get_config("gemma-2-2b"), "Gemma-2-2b"),
        (replace(get_config("gemma-3-1b"), name="mine"), "Gemma-3-mine"),
        (replace(get_config("SmolLM2-135M"), name="after-Gemma"), "after-gemma"),
        (replace(get_config("pythia-14m"), name="OLMo-like"), "olmo-like"),
        (replace(get_config("SmolLM2-135M"), name=""), "llama"),
    ]:
        assert litgpt_config(config)["name"] == name
    for values in ({"clip_qkv": 1.0}, {"norm_affine": False}, {"norm_offset": True}, {"attention_multiplier": 0.5}):
        with pytest.raises(UserError, match=f"with {next(iter(values))} "):
            litgpt_config(replace(LLAMA, **values))


def test_command_merges_adapters_and_completes_the_tokenizer(tmp_path, capsys, refusal):
    _, folder, model = make(tmp_path, replace(LLAMA, tie_embeddings=True), head=True)
    tokenizer = train_bpe(["a text"], 270)
    settings = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None}
    tokenizer.with_files({"tokenizer_config.json": json.dumps(settings).encode()}).save(folder)
    command = ["convert_to_litgpt", str(folder), str(tmp_path / "x"), "--verify_checkpoint", "false"]
    assert "holds adapters and no merged weights; --merge true merges" in refusal(*command)
    assert main([*command, "--merge", "true"]) == 0, capsys.readouterr().err
    assert difference(load_model(tmp_path / "x")(tokens()), model(tokens())) < 1e-5
    assert main(["verify", str(tmp_path / "x")]) == 0
    written = json.loads((tmp_path / "x" / "tokenizer_config.json").read_text())
    assert written == settings | {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "add_bos_token": False
    }  # fmt: skip
    assert json.loads((tmp_path / "x" / "generation_config.json").read_text())["eos_token_id"] == 0
    assert "already exists and is not empty" in refusal(*command, "--merge", "true")


def test_nothing_remains_of_a_failed_export(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "write_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_litgpt(MODELS / "pythia", tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_m2_memory_is_a_few_weights(tmp_path):
    experts = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "norm_topk_prob": True}
    config = ModelConfig(
        vocab_size=32000, n_layer=10, n_embd=512, intermediate_size=2048, tie_embeddings=True, **experts
    )
    write_base(tmp_path / "m", GPT(config))
    largest = 4 * 32000 * 512
    peak, _, _ = rise(export_litgpt, tmp_path / "m", tmp_path / "x")
    assert (tmp_path / "x" / "lit_model.pth").stat().st_size > 8 * largest and peak < 2 * largest


# Prints the largest relative difference from the expected logits, and token ids, of each folder.
LITGPT_SCRIPT = """
import json, pathlib, sys
import lightning, torch
from litgpt import Config, GPT, Tokenizer
from litgpt.utils import check_valid_checkpoint_dir, load_checkpoint

for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    check_valid_checkpoint_dir(folder)
    model = GPT(Config.from_checkpoint(folder))
    load_checkpoint(lightning.Fabric(accelerator="cpu", devices=1), model, folder / "lit_model.pth")
    ids, expected = torch.load(folder / "expected.pt")
    with torch.no_grad():
        logits = model.float()(ids)
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    tokenizer = Tokenizer(folder)
    encoded = tokenizer.encode("a text, twice: a text").tolist()
    print("RESULT", json.dumps([folder.name, difference, encoded, tokenizer.eos_id]))
"""


@pytest.mark.slow
@pytest.mark.skipif(LITGPT_PYTHON is None, reason="TOOLKIT_TEST_LITGPT_PYTHON names no Python with LitGPT")
def test_litgpt_computes_the_same_logits_and_tokens(tmp_path, tiny_models):
    tokenizer = train_bpe(["a text"], 270)
    no_rotation = replace(read_model_config(tiny_models["neox"].native), rotary_percentage=0.0)
    write_base(tmp_path / "no-rotation", GPT(no_rotation))
    sources = {name: tiny_models[name].native for name in EXPORTED} | {"no-rotation": tmp_path / "no-rotation"}
    for name, source in sources.items():
        folder = tmp_path / "out" / name
        export_litgpt(source, folder)
        tokenizer.save(folder)
        torch.save([token_ids(), load_model(source)(token_ids()).detach()], folder / "expected.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(LITGPT_PYTHON), "-c", LITGPT_SCRIPT, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert [name for name, *_ in results] == sorted(sources), done.stderr[-2000:]
    ids = tokenizer.encode("a text, twice: a text")
    for name, error, encoded, eos_id in results:
        print(f"{name} {error:.1e}")
        assert (error < 1e-5, encoded, eos_id) == (True, ids, tokenizer.eos_id), (name, error)
