"""`--from_peft` on a base: the one that the adapters were trained on, or not; random weights, on the CPU."""

import dataclasses
import json
import shutil

import pytest
import torch
from helpers.cases import slow_except
from helpers.initialize import initialize
from toolkit_interop.peft.export_peft import export_peft
from toolkit_interop.peft.import_peft import check_base

from extensions.interop.tests.test_export_peft import CONFIGS, make
from tests.checkpoints.test_adapters import write_base
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import build_model
from toolkit.models.lora_config import LoRAConfig


def write_other(folder, config: ModelConfig, seed: int = 5):
    model = build_model(config)
    initialize(model, seed)
    return write_base(folder, model)


@pytest.fixture
def trained(tmp_path):
    """(base, what convert_to_peft made of adapters that were trained on it)"""
    base, folder, _ = make(tmp_path, CONFIGS["llama"], LoRAConfig())
    export_peft(folder, tmp_path / "peft")
    return base, tmp_path / "peft"


def name_base(peft, name) -> None:
    path = peft / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": name}))


def refused(peft, base) -> str:
    with pytest.raises(UserError) as error:
        check_base(peft, base)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_base_checkpoint_is_rejected(trained, tmp_path, monkeypatch):
    base, peft = trained
    assert check_base(peft, base) is None
    other = write_other(tmp_path / "other", CONFIGS["llama"])
    message = refused(peft, other)
    assert f"--from_peft {peft}: was trained on {base}, not on {other}; set checkpoint_dir to {base}" in message
    assert "base_model_name_or_path in adapter_config.json" in message
    shutil.copytree(base, tmp_path / "copy")
    assert check_base(peft, tmp_path / "copy") is None
    monkeypatch.chdir(tmp_path)  # by the name that it has below checkpoints/
    shutil.copytree(base, tmp_path / "checkpoints" / "org" / "name")
    name_base(peft, "org/name")
    assert check_base(peft, base) is None
    assert f"was trained on org/name, not on {other}" in refused(peft, other)


@pytest.mark.parametrize("dtype", slow_except([None], [None, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("family", slow_except(["llama", "gpt2"], CONFIGS))
def test_base_may_be_named_by_its_hf_folder(tmp_path, family, dtype):
    base, folder, _ = make(tmp_path, CONFIGS[family], LoRAConfig())
    export_peft(folder, tmp_path / "peft")
    export_hf(base, tmp_path / "hf", dtype)
    name_base(tmp_path / "peft", str(tmp_path / "hf"))
    import_hf(tmp_path / "hf", tmp_path / "again", torch.float16)
    for place in (base, *([tmp_path / "again"] if dtype is None else [])):
        assert check_base(tmp_path / "peft", place) is None
    other = write_other(tmp_path / "other", CONFIGS[family])
    assert f", not on {other}" in refused(tmp_path / "peft", other)


def test_changed_weight_in_first_block_is_detected(trained, tmp_path):
    base, peft = trained
    export_hf(base, tmp_path / "hf")
    name_base(peft, str(tmp_path / "hf"))
    weights = torch.load(base / "lit_model.pth")
    weights["transformer.h.0.attn.qkv.weight"][3, 4] += 1e-3
    torch.save(weights, base / "lit_model.pth")
    assert f", not on {base}" in refused(peft, base)


def test_another_architecture_is_rejected_without_reading_weights(trained, tmp_path):
    base, peft = trained
    export_hf(base, tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    name_base(peft, str(tmp_path / "hf"))
    assert "could not verify" in check_base(peft, base)
    deeper = write_other(tmp_path / "deeper", dataclasses.replace(CONFIGS["llama"], n_layer=3))
    assert f", not on {deeper}" in refused(peft, deeper)
    longer = write_other(tmp_path / "longer", dataclasses.replace(CONFIGS["llama"], block_size=64))
    assert "could not verify" in check_base(peft, longer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/on-the-hub", "was trained on org/on-the-hub; could not verify that"),
        ("empty", "was trained on empty; could not verify that"),
        ("", "adapter_config.json names no base model"),
        (None, "adapter_config.json names no base model"),
        ("too-long-" * 1000, "was trained on too-long-"),
        ("~no-such-user/base", "was trained on ~no-such-user/base; could not verify that"),
    ],
)
def test_missing_base_is_named(trained, tmp_path, monkeypatch, name, message):
    base, peft = trained
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    name_base(peft, name)
    note = check_base(peft, base)
    assert note.startswith(f"--from_peft {peft}: {message}")
    assert f"could not verify that it is {base}" in note and "\n" not in note


def test_finetune_lora_rejects_wrong_base_or_warns(tmp_path, capsys, refusal):
    config = dataclasses.replace(CONFIGS["llama"], vocab_size=270, padded_vocab_size=270)
    base, folder, _ = make(tmp_path, config, LoRAConfig())
    other, peft = write_other(tmp_path / "other", config), tmp_path / "peft"
    export_peft(folder, peft)
    train_bpe(["a text"], 270).save(other)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "text"}\n' * 8)
    command = [
        "finetune_lora", str(other), "--from_peft", str(peft), "--data", "JSON", "--data.json_path",
        str(tmp_path / "rows.jsonl"), "--data.prompt_style", "plain", "--data.val_split_fraction", "0", "--out_dir",
        str(tmp_path / "out"), "--accelerator", "cpu", "--devices", "1", "--train.max_steps", "1",
        "--train.global_batch_size", "2", "--eval.max_new_tokens", "4",
    ]  # fmt: skip
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert f"was trained on {base}, not on {other}" in shown and shown.count("\n") == 1
    assert not (tmp_path / "out").exists()
    name_base(peft, "org/on-the-hub")
    assert main(command) == 0
    note = f"--from_peft {peft}: was trained on org/on-the-hub; could not verify that it is {other}"
    shown = "".join(capsys.readouterr())
    assert shown.count(note) == 1 and "adapter_config.json does not match its checksum" in shown  # name_base edits it
    tensors = peft / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")  # S7
    assert "adapter_model.safetensors: checksum mismatch" in refusal(*command, "--out_dir", tmp_path / "other")
