"""Model folders: round trips, and what does not fit."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from helpers.saving import write_checkpoint

from toolkit.checkpoints import importers
from toolkit.checkpoints.folder import (
    find_checkpoint_dir,
    find_model,
    load_compatible_weights,
    load_model,
    read_model_config,
    write_model_files,
)
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

LLAMA = ModelConfig(vocab_size=100, n_query_groups=2, intermediate_size=96, block_size=32)
NEOX = ModelConfig(
    family="gpt_neox", vocab_size=100, parallel_residual=True, bias=True, rotary_percentage=0.25, block_size=32,
    norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP",
)  # fmt: skip
GPT2 = dataclasses.replace(
    NEOX, family="gpt2", parallel_residual=False, position_embedding="learned", gelu_approximate="tanh"
)
TOKENS = torch.arange(24).view(2, 12)


def save(folder, config, weights=None, **other):
    torch.manual_seed(0)
    model = GPT(config)
    if weights is not None:
        model.load_state_dict(weights)
    write_checkpoint(
        folder,
        lambda tmp: write_model_files(
            tmp, state_dict=model.state_dict(), config=config, **{"hyperparameters": None, "tokenizer": None, **other}
        ),
    )
    return model


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("config", [LLAMA, NEOX, GPT2], ids=["llama", "neox", "gpt2"])
def test_n10_round_trip(tmp_path, config, tie):
    config = dataclasses.replace(config, tie_embeddings=tie)
    model = save(tmp_path / "m", config)
    assert read_model_config(tmp_path / "m") == config
    loaded = load_model(tmp_path / "m")
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == tie
    assert all(p.requires_grad and p.device.type == "cpu" for p in loaded.parameters())
    assert len(list(loaded.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("tie", [False, True])
def test_load_in_another_dtype(tmp_path, tie):
    save(tmp_path / "m", dataclasses.replace(LLAMA, tie_embeddings=tie))
    loaded = load_model(tmp_path / "m", dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == tie


def test_training_a_loaded_model_does_not_change_the_file(tmp_path):
    save(tmp_path / "m", LLAMA)
    before = (tmp_path / "m" / "lit_model.pth").read_bytes()
    model = load_model(tmp_path / "m")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss, _ = model(TOKENS, TOKENS)
    loss.backward()
    optimizer.step()
    assert model(TOKENS, TOKENS)[0] != loss
    assert (tmp_path / "m" / "lit_model.pth").read_bytes() == before


def test_all_files_of_a_model(tmp_path):
    tokenizer = train_bpe(["some text"], 260)
    options = {"train": {"learning_rate": 1e-5, "betas": (0.9, 0.95)}, "resume": False}
    save(tmp_path / "m", LLAMA, hyperparameters=options, tokenizer=tokenizer)
    assert {p.name for p in (tmp_path / "m").iterdir()} == {
        "lit_model.pth", "model_config.yaml", "hyperparameters.yaml", "COMPLETE", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    }  # fmt: skip
    back = yaml.safe_load((tmp_path / "m" / "hyperparameters.yaml").read_text())
    assert back == {"train": {"learning_rate": 1e-5, "betas": [0.9, 0.95]}, "resume": False}


def change(folder, edit):
    state = torch.load(folder / "lit_model.pth", weights_only=True)
    edit(state)
    torch.save(state, folder / "lit_model.pth")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop("lm_head.weight"), r"missing lm_head.weight \(128, 64\)"),
        (lambda s: s.update(more=torch.ones(3)), r"unknown more \(3\)"),
        (
            lambda s: s.update({"transformer.ln_f.weight": torch.ones(5, 1)}),
            r"transformer.ln_f.weight is \(5, 1\), not \(64\)",
        ),
        (lambda s: s.clear(), r"missing lm_head.weight .* and 12 more"),
    ],
)
def test_mismatched_weights_are_named_with_shapes(tmp_path, edit, message):
    save(tmp_path / "m", LLAMA)
    change(tmp_path / "m", edit)
    with pytest.raises(UserError, match=f"lit_model.pth: does not match model_config.yaml: {message}") as error:
        load_model(tmp_path / "m")
    assert "\n" not in str(error.value)


def test_n10_a_tied_model_needs_one_of_the_two_and_refuses_two_that_differ(tmp_path):
    model = save(tmp_path / "m", dataclasses.replace(LLAMA, tie_embeddings=True))
    for name in ("lm_head.weight", "transformer.wte.weight"):
        change(tmp_path / "m", lambda s, name=name: s.pop(name))
        assert torch.equal(load_model(tmp_path / "m")(TOKENS), model(TOKENS))
        save(tmp_path / "m", model.config)
    change(tmp_path / "m", lambda s: s.update({"lm_head.weight": s["lm_head.weight"] + 1}))
    with pytest.raises(UserError, match="tie_embeddings true: .* differ in lit_model.pth"):
        load_model(tmp_path / "m")


def test_n10_an_untied_model_does_not_share_memory_though_its_file_does(tmp_path):
    model = save(tmp_path / "m", LLAMA)
    change(tmp_path / "m", lambda s: s.update({"lm_head.weight": s["transformer.wte.weight"]}))
    weights = load_compatible_weights(tmp_path / "m", model)
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    assert weights["lm_head.weight"].data_ptr() != weights["transformer.wte.weight"].data_ptr()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "must be a mapping"),
        ("- 1", "must be a mapping"),
        ("a: [", "not a model configuration"),
        ("!!python/object/apply:os.mkdir [ran]", "not a model configuration"),
        ("n_layer: many", "not a model configuration"),
        ("n_layer: -1", r"--model_config.n_layer -1: must be greater"),
        ("n_layer: 2", "vocab_size is missing"),
    ],
)
def test_s4_malformed_configs_are_one_line_errors(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "model_config.yaml").write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    with pytest.raises(UserError, match=f"^{tmp_path}/model_config.yaml: .*{message}") as error:
        read_model_config(tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_other_tools_files_alone_need_an_extension(tmp_path, monkeypatch):
    def ask(kind):
        raise UserError("asked")

    monkeypatch.setattr(importers, "registered", ask)
    model = save(tmp_path / "m", LLAMA)
    assert torch.equal(load_model(tmp_path / "m")(TOKENS), model(TOKENS))
    change(tmp_path / "m", lambda s: s.update({"other": torch.zeros(1)}))
    with pytest.raises(UserError, match="^asked"):
        load_model(tmp_path / "m")
    monkeypatch.setattr(importers, "registered", lambda kind: {})
    with pytest.raises(UserError, match="other"):
        load_model(tmp_path / "m")
    (tmp_path / "m" / "model_config.yaml").write_text("n_layer: 2")
    for missing, message in (("", "family is missing"), ("run pip install -e . again", "run pip install -e . again")):
        monkeypatch.setattr(importers, "missing_built_in", lambda missing=missing: missing)
        with pytest.raises(UserError, match=f"model_config.yaml: {message}$"):
            read_model_config(tmp_path / "m")


def test_find_checkpoint_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "checkpoints" / "meta" / "small", LLAMA)
    save(tmp_path / "checkpoints" / "meta" / "tiny", LLAMA)
    save(tmp_path / "run" / "step-000005", LLAMA)
    save(tmp_path / "run" / "final", LLAMA)
    for name in ("hub", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    save(tmp_path / "checkpoints" / "small", LLAMA)
    assert find_checkpoint_dir("run/final").resolve() == tmp_path / "run" / "final"
    assert find_checkpoint_dir("meta/small").resolve() == tmp_path / "checkpoints" / "meta" / "small"
    for value, message in [
        ("none", "checkpoint_dir none: no such folder, .*`toolkit download ORGANIZATION/NAME`"),
        ("run/step-000007", "run/step-000007: no such folder, .*; did you mean run/step-000005?"),
        ("fx/final", "fx/final: no such folder, .*; a run's models are in its"),
        ("meta/large", "`toolkit download meta/large`"),
        ("run", "checkpoint_dir run: holds no model_config.yaml; did you mean run/step-000005?"),
        ("run/final/lit_model.pth", "is a file; give the folder"),
        ("checkpoints", "holds no model_config.yaml; a run's models are in"),
        ("hub", "run `toolkit convert_from_hf hub checkpoints/hub` first"),
        ("small", "did you mean checkpoints/small?"),
        ("Tiny", "Tiny: no such folder; did you mean meta/tiny?"),
        ("checkpoints/tiny", "did you mean meta/tiny?"),
    ]:
        with pytest.raises(UserError, match=message):
            find_checkpoint_dir(value)


def test_model_to_read_is_found_and_verified(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "checkpoints" / "m", LLAMA)
    assert find_model("m") == Path("checkpoints/m")
    with pytest.raises(UserError, match="^checkpoint_dir n: no such folder"):
        find_model("n")
    config = tmp_path / "checkpoints" / "m" / "model_config.yaml"
    config.write_text(config.read_text().replace("block_size: 32", "block_size: 16"))
    with pytest.raises(UserError, match="--base_checkpoint_dir x: has no effect"):  # before the files are read
        find_model("m", "x")
    with pytest.raises(UserError, match=r"damaged: model_config\.yaml"):
        find_model("m")
    assert find_model("m", verify=False) == Path("checkpoints/m")
