"""`toolkit convert_to_peft`: which base it names, and what comes along."""

import json
import shutil

from tests.checkpoints.test_adapters import make, write_base
from tests.commands.test_merge_lora import add_companions
from tests.models.test_lora import base
from toolkit.cli import main


def named_base(folder) -> str:
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_another_base_is_refused(tmp_path, capsys):
    base_dir, folder, _ = make(tmp_path)
    other = base()
    other.lm_head.weight.data[0, 0] += 1
    other_dir, out_dir = write_base(tmp_path / "other", other), tmp_path / "peft"
    command = ["convert_to_peft", str(folder), str(out_dir)]
    for place, message in [(other_dir, "was trained on another checkpoint"), (tmp_path / "none", "holds no lit_model")]:
        assert main([*command, "--base_checkpoint_dir", str(place)]) == 2
        shown = capsys.readouterr().err
        assert message in shown and "--base_checkpoint_dir" in shown and shown.count("\n") == 1
        assert not out_dir.exists()
    moved = base_dir.rename(tmp_path / "moved")
    assert main([*command, "--base_checkpoint_dir", str(moved)]) == 0
    assert named_base(out_dir) == str(moved) and "unchecked" not in capsys.readouterr().out
    shutil.copytree(other_dir, base_dir)  # the remembered folder, other weights
    assert main(["convert_to_peft", str(folder), str(tmp_path / "again")]) == 2
    assert "was trained on another checkpoint" in capsys.readouterr().err


def test_a_base_that_is_gone_is_said_to_be_unchecked(tmp_path, capsys):
    base_dir, folder, _ = make(tmp_path)
    shutil.rmtree(base_dir)
    assert main(["convert_to_peft", str(folder), str(tmp_path / "peft")]) == 0
    assert "that base is unchecked: its folder is not there any more" in capsys.readouterr().out
    assert named_base(tmp_path / "peft") == str(base_dir)


def test_all_files_of_the_tokenizer_come_along(tmp_path):
    _, folder, _ = make(tmp_path)
    companions = add_companions(folder)
    assert main(["convert_to_peft", str(folder), str(tmp_path / "peft")]) == 0
    for name in companions:
        assert (tmp_path / "peft" / name).read_bytes() == (folder / name).read_bytes(), name
