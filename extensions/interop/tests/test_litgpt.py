"""LitGPT's folders: models that LitGPT wrote compute here what they computed there, and go on to Hugging Face."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from toolkit_interop.litgpt import config_from_litgpt

from toolkit.checkpoints.folder import load_model, read_model_config
from toolkit.checkpoints.hf.export_hf import export_hf, verify_hf
from toolkit.checkpoints.weights import load_weights
from toolkit.errors import UserError

MODELS = Path(__file__).parent / "litgpt"
SCRIPTS = Path(__file__).parents[3] / "scripts"
FAMILIES = {
    "falcon-groups": "falcon", "falcon-one-group": "falcon", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "llama-condensed": "llama", "llama3": "llama", "mistral": "mistral", "olmo": "olmo",
    "olmo2": "olmo2", "phi": "phi", "phi3": "phi3", "pythia": "gpt_neox", "qwen2": "qwen2", "qwen3": "qwen3",
    "stablelm": "stablelm", "mixtral": "mixtral", "qwen3-experts": "qwen3_moe",
}  # fmt: skip


def computed(name):
    """The tokens and what LitGPT computed from them."""
    saved = torch.load(MODELS / name / "logits.pt", weights_only=True)
    return saved["input_ids"], saved["logits"]


def difference(logits, expected):
    return ((logits - expected).abs().max() / expected.abs().max()).item()


def changed(tmp_path, model, values):
    """A copy of one of the models with other values in its configuration."""
    shutil.copytree(MODELS / model, tmp_path / "m")
    path = tmp_path / "m" / "model_config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))
    return tmp_path / "m"


def test_all_models_of_the_folder_are_known():
    assert {path.parent.name for path in MODELS.glob("*/lit_model.pth")} == FAMILIES.keys()


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_litgpt_and_its_export(tmp_path, name):
    ids, expected = computed(name)
    model = load_model(MODELS / name, dtype=torch.float32).eval()
    assert model.config.family == FAMILIES[name]
    assert difference(model(ids), expected) <= 1e-5
    transformers = pytest.importorskip("transformers")
    export_hf(MODELS / name, tmp_path / "hf", torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).eval()
    assert type(reference).__name__.lower().startswith(FAMILIES[name].replace("_", "").removesuffix("text"))
    assert difference(reference(input_ids=ids).logits, expected) <= 1e-5


def test_the_models_see_that_windows_and_rope_and_norms_matter(tmp_path):
    """Else the comparison above could not fail."""
    for name, values in [
        ("mistral", {"sliding_window_size": 9}),
        ("gemma3", {"rope_indices": [0, 1]}),
        ("gemma3", {"name": "renamed"}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("llama-condensed", {"rope_condense_ratio": 4}),
        ("phi3", {"rotary_percentage": 1.0}),
    ]:
        ids, expected = computed(name)
        other = load_model(changed(tmp_path / f"{name} {values}", name, values), dtype=torch.float32)
        assert difference(other(ids), expected) > 1e-3, (name, values)


def test_equal_head_and_embedding_stay_untied(tmp_path):
    folder = changed(tmp_path, "qwen2", {})
    weights = load_weights(folder)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    torch.save(weights, folder / "lit_model.pth")
    model = load_model(folder)
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr()


def test_litgpt_pretrain_checkpoint_with_optimizer_loads():
    assert {"model", "optimizer", "scheduler"} <= torch.load(MODELS / "llama-condensed" / "lit_model.pth").keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_expert_groups": 4}, "n_expert_groups 4: is not supported; run toolkit convert_from_hf"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace 1: unknown field, perhaps of a later version; upgrade"),
        ({"n_shared_expert": 1}, "n_shared_expert 1: unknown field, perhaps of a later version; upgrade"),
        ({"latent_attention": {"q_lora_rank": 8}}, "latent_attention .*: is not supported; run toolkit"),
        ({"rope_interleave": True}, "rope_interleave True: unknown field, perhaps of a later version; upgrade"),
        (
            {"rope_adjustments": {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_seq_len": 16}},
            "rope_adjustments: with beta_fast and beta_slow, LitGPT stretches the high frequencies",
        ),
        ({"rope_condense_ratio": 8}, "rope_condense_ratio 8: is not supported with"),
    ],
)
def test_unsupported_litgpt_fields_are_rejected(tmp_path, values, message):
    folder = changed(tmp_path, "llama3", values)
    with pytest.raises(UserError, match=f"^{folder}/model_config.yaml: .*({message})"):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"mlp_class_name": "GemmaMLP", "scale_embeddings": True}, "gemma"),
        ({"mlp_class_name": "GemmaMLP", "scale_embeddings": True, "post_mlp_norm": True}, "gemma2"),
        ({"mlp_class_name": "GemmaMLP", "post_mlp_norm": True, "norm_qk": True}, "gemma3_text"),
        ({"norm_1": False, "norm_2": False, "norm_qk": True}, "olmo2"),
        ({"norm_qk": True}, "qwen3"),
        ({"attn_bias": True}, "qwen2"),
        ({"norm_class_name": "LayerNorm"}, "stablelm"),
        ({"sliding_window_size": 4096}, "mistral"),
        ({"mlp_class_name": "GptNeoxMLP", "bias": True, "lm_head_bias": True}, "phi"),
        ({"mlp_class_name": "GptNeoxMLP"}, "falcon"),
        ({"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2}, "mixtral"),
        ({"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "norm_qk": True}, "qwen3_moe"),
    ],
)
def test_family_is_inferred_from_architecture_not_name(changes, family):
    values = yaml.safe_load((MODELS / "llama3" / "model_config.yaml").read_text())
    assert config_from_litgpt(values | changes).family == family
    assert config_from_litgpt(values | changes | {"name": "my-Gemma"}).family == family


def test_config_with_missing_litgpt_fields_is_rejected(tmp_path):
    folder = changed(tmp_path, "pythia", {})
    values = yaml.safe_load((folder / "model_config.yaml").read_text())
    del values["parallel_residual"]
    (folder / "model_config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match="parallel_residual is missing"):
        read_model_config(folder)


def test_verify_accepts_bfloat16_export(tmp_path):
    pytest.importorskip("transformers")
    export_hf(MODELS / "gemma2", tmp_path / "hf")
    assert verify_hf(MODELS / "gemma2", tmp_path / "hf") < 1e-5


@pytest.mark.slow
def test_scripts_with_litgpt_names(tmp_path):
    ids, expected = computed("olmo2")
    out, source = tmp_path / "hf", MODELS / "olmo2" / "lit_model.pth"
    run("convert_lit_checkpoint.py", "--checkpoint_path", source, "--output_dir", out, "--dtype", "float32")
    before = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors"} <= before
    run("convert_hf_checkpoint.py", "--checkpoint_dir", out)
    assert {path.name for path in out.iterdir()} == before | {"lit_model.pth", "model_config.yaml"}
    model = load_model(out)
    assert model.config.name == "hf" and difference(model(ids), expected) <= 1e-5


def run(script, *options):
    command = [sys.executable, str(SCRIPTS / script), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("convert_hf_checkpoint.py", ["--checkpoint_dir", MODELS / "phi"], "phi: lit_model.pth already exists"),
        ("convert_hf_checkpoint.py", ["--checkpoint_dir", "none"], "hf_dir none: no such folder"),
        (
            "convert_lit_checkpoint.py",
            ["--checkpoint_path", MODELS / "phi" / "logits.pt", "--output_dir", "new"],
            "logits.pt: must be a lit_model.pth",
        ),
        (
            "convert_lit_checkpoint.py",
            ["--checkpoint_path", MODELS / "phi", "--output_dir", MODELS],
            "litgpt: already exists and is not empty",
        ),
    ],
)
def test_scripts_reject_bad_input(tmp_path, monkeypatch, capsys, script, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
