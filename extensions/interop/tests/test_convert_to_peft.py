"""`toolkit convert_to_peft`: which base it names, and what comes along."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.initialize import add_lora
from helpers.sealing import seal

from tests.checkpoints.test_adapters import make, write_adapted, write_base
from tests.commands.test_merge_lora import add_companions
from tests.models.test_lora import base, stir, tokens
from toolkit.checkpoints.folder import load_model, read_model_config, write_model_config
from toolkit.checkpoints.hf.origin import ORIGIN_FILE
from toolkit.cli import main
from toolkit.io.safe_parse import write_yaml
from toolkit.models.lora_config import LoRAConfig


def named_base(folder) -> str:
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_another_base_is_rejected(tmp_path, capsys, refusal):
    base_dir, folder, _ = make(tmp_path)
    other = base()
    other.lm_head.weight.data[0, 0] += 1
    other_dir, out_dir = write_base(tmp_path / "other", other), tmp_path / "peft"
    command = ["convert_to_peft", str(folder), str(out_dir)]
    for place, message in [
        (other_dir, "these adapters were not trained on"),
        (tmp_path / "none", "no such folder"),
    ]:
        shown = refusal(*command, "--base_checkpoint_dir", place)
        assert message in shown and "--base_checkpoint_dir" in shown
        assert not out_dir.exists()
    moved = base_dir.rename(tmp_path / "moved")
    assert main([*command, "--base_checkpoint_dir", str(moved)]) == 0
    assert named_base(out_dir) == str(moved) and "not verified" not in capsys.readouterr().out
    shutil.copytree(other_dir, base_dir)  # the remembered folder, other weights
    assert "these adapters were not trained on" in refusal("convert_to_peft", folder, tmp_path / "again")


@pytest.mark.parametrize("given", ["./nosuch", "../nosuch", "/nosuch"])
def test_base_model_that_is_a_missing_path_is_rejected(tmp_path, capsys, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    _, folder, _ = make(tmp_path)
    assert main(["convert_to_peft", str(folder), "peft", "--base_model", given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--base_model {given}: no such folder" in line and not (tmp_path / "peft").exists()
    (tmp_path / "existing").mkdir()
    assert main(["convert_to_peft", str(folder), "peft", "--base_model", "./existing"]) == 0
    assert named_base(tmp_path / "peft") == "./existing"


def test_the_result_loads_with_the_model_that_the_base_was_imported_from(tmp_path, capsys, monkeypatch):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained("hf")
    assert main(["convert_from_hf", "hf", "checkpoints/mine"]) == 0
    base_dir, lora = Path("checkpoints/mine"), LoRAConfig(r=4)
    model = load_model(base_dir)
    add_lora(model, lora)
    stir(model)
    folder = write_adapted(Path("run"), base_dir, model, lora)
    capsys.readouterr()
    old = os.umask(0o027)
    try:
        assert main(["convert_to_peft", str(folder), "peft"]) == 0
    finally:
        os.umask(old)
    captured = capsys.readouterr()
    assert named_base(Path("peft")) == str(tmp_path / "hf") and "warning" not in captured.err
    assert {path.stat().st_mode & 0o777 for path in Path("peft").rglob("*") if path.is_file()} == {0o640}
    with torch.no_grad():
        expected = model.eval()(tokens())
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained("peft").eval()(input_ids=tokens()).logits
    assert torch.allclose(expected, loaded, atol=1e-5)

    assert main(["convert_to_peft", str(folder), "other", "--base_model", "org/name"]) == 0
    assert named_base(Path("other")) == "org/name" and "warning" not in capsys.readouterr().err
    shutil.rmtree("hf")  # then the record is of no use
    assert main(["convert_to_peft", str(folder), "unknown"]) == 0
    warning = capsys.readouterr().err
    assert "toolkit convert_to_hf" in warning
    assert "set base_model_name_or_path in unknown/adapter_config.json to its" in warning


def test_the_name_and_revision_of_a_downloaded_base(tmp_path, capsys):
    base_dir, folder, _ = make(tmp_path)
    for revision, expected in [("main", None), ("v2", "v2")]:
        write_yaml(base_dir / ORIGIN_FILE, {"repo_id": "org/name", "revision": revision, "commit": "abc"})
        out_dir = tmp_path / f"peft-{revision}"
        assert main(["convert_to_peft", str(folder), str(out_dir)]) == 0
        assert named_base(out_dir) == "org/name" and capsys.readouterr().err == ""
        assert json.loads((out_dir / "adapter_config.json").read_text())["revision"] == expected


def test_missing_base_is_reported_as_not_verified(tmp_path, capsys):
    base_dir, folder, _ = make(tmp_path)
    shutil.rmtree(base_dir)
    assert main(["convert_to_peft", str(folder), str(tmp_path / "peft")]) == 0
    assert "base not verified: its folder no longer exists" in capsys.readouterr().out
    assert named_base(tmp_path / "peft") == str(base_dir)


def test_a_quantized_base_is_exported_as_the_adapters_know_it(tmp_path, capsys):
    """Before quantization, which convert_to_hf does not write by default."""
    base_dir, folder, _ = make(tmp_path)
    command = ["convert_to_peft", str(folder), "--verify_checkpoint", "false"]
    assert main([*command, str(tmp_path / "plain")]) == 0
    assert f"`toolkit convert_to_hf {base_dir} DIR` writes" in capsys.readouterr().err
    qat = {"weights": "int4", "group_size": 32, "dtype": "float32"}
    write_model_config(replace(read_model_config(base_dir), qat=qat), base_dir / "model_config.yaml")
    assert main([*command, str(tmp_path / "quantized")]) == 0
    assert f"`toolkit convert_to_hf {base_dir} DIR --quantize none` writes" in capsys.readouterr().err


def test_all_tokenizer_files_are_copied(tmp_path):
    _, folder, _ = make(tmp_path)
    companions = add_companions(folder)
    seal(folder)
    assert main(["convert_to_peft", str(folder), str(tmp_path / "peft")]) == 0
    for name in companions:
        assert (tmp_path / "peft" / name).read_bytes() == (folder / name).read_bytes(), name
