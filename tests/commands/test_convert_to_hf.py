"""`toolkit convert_to_hf`: output and exit codes."""

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.processes import finish, start
from helpers.saving import write_checkpoint
from helpers.sealing import seal

from tests.checkpoints.test_adapters import LLAMA, make, tokens
from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.merge import merge_in_place
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.commands import convert_to_hf
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import GuardError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora_layers import LoRALinear

CONFIG = ModelConfig(name="small", vocab_size=280, block_size=32, tie_embeddings=True)


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    files = {"state_dict": GPT(CONFIG).state_dict(), "config": CONFIG, "hyperparameters": None}
    tokenizer = train_bpe(["a text"], 270)
    write_checkpoint(tmp_path / "m", lambda tmp: write_model_files(tmp, **files, tokenizer=tokenizer))
    return tmp_path / "m"


def test_converts_and_verifies(checkpoint, tmp_path, capsys, refusal):
    pytest.importorskip("transformers")
    out_dir = str(tmp_path / "hf")
    assert main(["convert_to_hf", str(checkpoint), out_dir, "--dtype", "bfloat16", "--verify", "true"]) == 0
    shown = capsys.readouterr().out
    assert f"wrote {out_dir}" in shown
    assert "largest difference of the logits, relative to the largest logit: " in shown
    assert "already exists and is not empty" in refusal("convert_to_hf", checkpoint, out_dir)
    levels = [logging.getLogger("torchao").isEnabledFor(level) for level in (logging.WARNING, logging.ERROR)]
    assert levels == [False, True]


@pytest.mark.slow
def test_messages_of_libraries_are_not_shown(checkpoint, tmp_path):
    pytest.importorskip("torchao")
    process = start("-m", "toolkit", "convert_to_hf", str(checkpoint), str(tmp_path / "hf"), "--verify", "true")
    _, err = finish(process)
    assert (process.returncode, err) == (0, "")


def test_missing_or_damaged_checkpoint_is_a_one_line_error(checkpoint, tmp_path, refusal):
    os.truncate(checkpoint / "lit_model.pth", 1000)
    for source, message in [(tmp_path / "none", "no such folder"), (checkpoint, "damaged: lit_model.pth")]:
        assert message in refusal("convert_to_hf", source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_different_logits_raise_guard_error(checkpoint, tmp_path, monkeypatch, difference):
    seen = []
    monkeypatch.setattr(
        "toolkit.checkpoints.hf.export_hf.verify_hf", lambda _, out, *__: seen.append(Path(out)) or difference
    )
    with pytest.raises(
        GuardError, match=f"transformers computes different logits: .*; {tmp_path / 'hf'} was not written"
    ):
        convert_to_hf.setup(str(checkpoint), str(tmp_path / "hf"), verify=True)
    assert seen and [path.name for path in tmp_path.iterdir()] == ["m"]


def test_missing_transformers_fails_before_writing(checkpoint, tmp_path, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(
        "toolkit.checkpoints.hf.export_hf.export_hf", lambda *_, **__: pytest.fail("too late: this takes long")
    )
    assert "needs transformers; run: pip install 'transformers>=4.50'" in refusal(
        "convert_to_hf", checkpoint, tmp_path / "hf", "--verify", "true"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_missing_tokenizer_warns(checkpoint, tmp_path, capsys):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    seal(checkpoint)
    convert_to_hf.setup(str(checkpoint), str(tmp_path / "hf"))
    shown = capsys.readouterr()
    assert shown.err == (f"warning: {checkpoint} holds no tokenizer.json: copy one into {tmp_path / 'hf'}\n")
    assert shown.out == f"wrote {tmp_path / 'hf'}\n"


@torch.no_grad()
@pytest.mark.parametrize("tied", slow_except([True], [False, True]))
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"head": True}], ids=["lora", "dora", "head"])
@pytest.mark.parametrize("dtype", slow_except([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_merge_true_exports_merged_weights(tmp_path, refusal, tied, options, dtype):
    transformers = pytest.importorskip("transformers")
    _, folder, model = make(tmp_path, dataclasses.replace(LLAMA, tie_embeddings=tied), dtype, **options)
    before, out_dir = {p.name for p in folder.iterdir()}, tmp_path / "hf"
    assert "holds adapters and no merged weights; --merge true merges" in refusal("convert_to_hf", folder, out_dir)
    assert not out_dir.exists()
    assert main(["convert_to_hf", str(folder), str(out_dir), "--merge", "true", "--verify", "true"]) == 0
    assert {p.name for p in folder.iterdir()} == before
    reference = transformers.AutoModelForCausalLM.from_pretrained(out_dir, dtype="auto")
    assert reference.dtype == dtype
    expected = model.float()(tokens())
    difference = (reference.float()(tokens()).logits - expected).abs().max() / expected.abs().max()
    assert difference < (1e-5 if dtype == torch.float32 else 2e-2)
    assert json.loads((out_dir / "generation_config.json").read_text())["eos_token_id"] == [0, 5]
    one = reference.get_input_embeddings().weight is reference.get_output_embeddings().weight
    assert one == (tied and "head" not in options)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_merge_with_dtype_rounds_once(tmp_path, tied, dtype):
    """Of a base in bfloat16, whose type the sum never takes; by merge_lora as by convert_to_hf."""
    base_dir, folder, model = make(tmp_path, dataclasses.replace(LLAMA, tie_embeddings=tied), torch.bfloat16)
    wanted, base = getattr(torch, dtype), load_weights(base_dir)
    layers = {f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, LoRALinear)}
    exact = {name: layers[name].merged(base[name]) for name in layers}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in exact.values())
    assert main(["merge_lora", str(folder), "--out_dir", str(tmp_path / "merged"), "--dtype", dtype]) == 0
    assert main(["convert_to_hf", str(folder), str(tmp_path / "a"), "--merge", "true", "--dtype", dtype]) == 0
    assert main(["convert_to_hf", str(tmp_path / "merged"), str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    merged = load_weights(tmp_path / "merged")
    for name, value in merged.items():
        assert torch.equal(value, exact.get(name, base[name]).to(wanted)) and value.dtype == wanted
    head, embedding = merged["lm_head.weight"], merged["transformer.wte.weight"]
    assert (head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()) == tied


def test_adapter_flags_are_rejected_for_complete_models(tmp_path, capsys):
    base_dir, folder, _ = make(tmp_path)
    merge_in_place(folder)
    for model in (base_dir, folder):
        for flag, value in (("--merge", "true"), ("--base_checkpoint_dir", str(base_dir))):
            assert main(["convert_to_hf", str(model), str(tmp_path / "hf"), flag, value]) == 2
            shown = capsys.readouterr().err
            assert f"{flag} {value}: has no effect, {model} holds a complete model; remove it" in shown
            assert shown.count("\n") == 1 and not (tmp_path / "hf").exists()
    assert main(["convert_to_hf", str(folder), str(tmp_path / "hf"), "--merge", "false"]) == 0


def test_moved_base_is_reported(tmp_path, refusal):
    base_dir, folder, _ = make(tmp_path)
    base_dir.rename(tmp_path / "moved")
    command = ["convert_to_hf", str(folder), str(tmp_path / "hf"), "--merge", "true"]
    assert "--base_checkpoint_dir" in refusal(*command)
    assert main([*command, "--base_checkpoint_dir", str(tmp_path / "moved")]) == 0
