"""Conversions name the tensors that contain NaN or Inf, whatever the way; sound weights convert without a word."""

import pytest
import torch
from helpers.saving import save_sharded, write_checkpoint
from helpers.sealing import seal

from tests.checkpoints.test_adapters import make
from toolkit.checkpoints.folder import write_model_files
from toolkit.cli import main
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

CONFIG = ModelConfig(name="small", vocab_size=280, block_size=32, n_layer=2)
NORM = "transformer.h.1.norm_1.weight"


def write(folder, value: float, *names: str):
    model = GPT(CONFIG)
    for name in names:
        model.get_parameter(name).data.view(-1)[0] = value
    files = {"state_dict": model.state_dict(), "config": CONFIG, "hyperparameters": None, "tokenizer": None}
    write_checkpoint(folder, lambda tmp: write_model_files(tmp, **files))
    return model


def warnings_of(capsys, *words) -> list[str]:
    assert main([str(word) for word in words]) == 0
    return [line for line in capsys.readouterr().err.splitlines() if "NaN or Inf" in line]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_export_and_import_warn(tmp_path, capsys, value):
    write(tmp_path / "good", 1.0, NORM)
    write(tmp_path / "m", value, NORM, "lm_head.weight")
    assert warnings_of(capsys, "convert_to_hf", tmp_path / "good", tmp_path / "sound") == []
    assert warnings_of(capsys, "convert_from_hf", tmp_path / "sound", tmp_path / "sound-again") == []
    (line,) = warnings_of(capsys, "convert_to_hf", tmp_path / "m", tmp_path / "hf")
    names = "lm_head.weight, model.layers.1.input_layernorm.weight"
    assert line == f"warning: NaN or Inf in 2 tensor(s) of {tmp_path / 'hf'}: {names}"
    (line,) = warnings_of(capsys, "convert_from_hf", tmp_path / "hf", tmp_path / "again")
    assert line == f"warning: NaN or Inf in 2 tensor(s) of {tmp_path / 'again'}: lm_head.weight, {NORM}"


def test_overflow_in_a_smaller_dtype_warns(tmp_path, capsys):
    write(tmp_path / "m", 1e6, NORM)
    assert warnings_of(capsys, "convert_to_hf", tmp_path / "m", tmp_path / "hf") == []
    for command, source in (("convert_to_hf", "m"), ("convert_from_hf", "hf")):
        (line,) = warnings_of(capsys, command, tmp_path / source, tmp_path / command, "--dtype", "float16")
        assert line.endswith((": model.layers.1.input_layernorm.weight", f": {NORM}"))


def test_many_are_counted(tmp_path, capsys):
    write(tmp_path / "m", float("nan"), *[name for name, _ in GPT(CONFIG).named_parameters()])
    (line,) = warnings_of(capsys, "convert_to_hf", tmp_path / "m", tmp_path / "hf")
    assert line.count(",") == 4 and " in 17 tensor(s) of " in line and line.endswith(" and 12 more")


def test_adapters(tmp_path, capsys):
    _, folder, _ = make(tmp_path)
    assert warnings_of(capsys, "convert_to_peft", folder, tmp_path / "sound") == []
    assert warnings_of(capsys, "merge_lora", folder, "--out_dir", tmp_path / "sound-merged") == []
    adapters = torch.load(folder / "lit_model.pth.lora", weights_only=True)
    name = next(name for name in adapters if ".h.0.attn.proj.lora" in name and name.endswith(".B"))
    adapters[name][0, 0] = float("nan")
    torch.save(adapters, folder / "lit_model.pth.lora")
    seal(folder)
    (line,) = warnings_of(capsys, "convert_to_peft", folder, tmp_path / "peft")
    assert "layers.0.self_attn.o_proj.lora_B.weight" in line
    (line,) = warnings_of(capsys, "merge_lora", folder, "--out_dir", tmp_path / "merged")
    assert line == f"warning: NaN or Inf in 1 tensor(s) of {tmp_path / 'merged'}: transformer.h.0.attn.proj.weight"


def test_consolidated(tmp_path, capsys):
    for name, value, expected in (("good", 1.0, 0), ("m", float("nan"), 1)):
        model = write(tmp_path / name, value, NORM)
        (tmp_path / name / "lit_model.pth").unlink()
        save_sharded(dict(model.state_dict()), tmp_path / name / "lit_model.pth")
        (tmp_path / name / "COMPLETE").unlink()
        lines = warnings_of(capsys, "consolidate", tmp_path / name, tmp_path / f"{name}-one")
        assert lines == [f"warning: NaN or Inf in 1 tensor(s) of {tmp_path / 'm-one'}: {NORM}"] * expected
