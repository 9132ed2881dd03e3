"""S7 verified-bytes: `toolkit verify`, and every command that reads a checkpoint or writes one."""

import json
import shutil

import pytest
from helpers.damage import flip
from helpers.sealing import seal
from helpers.talker import make_talker

import toolkit
from tests.checkpoints.test_adapters import make
from toolkit.cli import main
from toolkit.errors import UserError


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = make_talker(tmp_path_factory.mktemp("models") / "talker")
    flip(folder / "lit_model.pth")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "generate {folder}", "chat {folder} --prompt 1", "evaluate {folder}", "convert_to_hf {folder} {out}",
        "finetune_full {folder} --data.json_path {rows} --out_dir {out} --train.max_steps 1",
        "finetune_lora {folder} --data.json_path {rows} --out_dir {out} --train.max_steps 1",
        "pretrain --initial_checkpoint_dir {folder} --data TextFiles --data.train_data_path {rows} --out_dir {out} "
        "--train.max_steps 1 --train.max_seq_length 16",
        "consolidate {folder} {out}", "verify {folder}",
    ],
)  # fmt: skip
def test_every_command_names_a_damaged_file(damaged, tmp_path, capsys, words):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"instruction": str(i), "output": "2"} for i in range(100)]))
    values = {"folder": damaged, "out": tmp_path / "out", "rows": rows}
    assert main([word.format(**values) for word in words.split()]) == 2
    shown = capsys.readouterr()
    assert "lit_model.pth" in (shown.err if words[:6] != "verify" else shown.out) and "Traceback" not in shown.err
    assert not (tmp_path / "out").exists()


def test_load_names_the_damaged_file(damaged):
    with pytest.raises(UserError, match="damaged: lit_model.pth"):
        toolkit.load(damaged)
    toolkit.load(damaged, verify_checkpoint=False)


def test_the_model_is_read_without_the_trainers_state(tmp_path, capsys):
    base_dir, _, _ = make(tmp_path)
    (base_dir / "trainer").mkdir()
    (base_dir / "trainer" / "state.pth").write_bytes(b"state")
    seal(base_dir)
    shutil.rmtree(base_dir / "trainer")
    toolkit.load(base_dir)
    assert main(["verify", str(base_dir)]) == 2 and "trainer/state.pth: missing" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["merge_lora {} --out_dir {}", "convert_to_peft {} {}", "generate {} --prompt a"])
def test_the_base_of_adapters_is_verified(tmp_path, refusal, command):
    base_dir, folder, _ = make(tmp_path)
    seal(base_dir)
    with open(base_dir / "lit_model.pth", "ab") as file:
        file.write(b"!")
    words = command.format(folder, tmp_path / "out").split()
    assert f"{base_dir}: damaged: lit_model.pth" in refusal(*words)


def test_what_merge_lora_writes_is_listed(tmp_path, capsys):
    _, folder, _ = make(tmp_path)
    assert main(["merge_lora", str(folder), "--out_dir", str(tmp_path / "merged")]) == 0
    assert main(["merge_lora", str(folder)]) == 0  # next to the adapters
    capsys.readouterr()
    for written in (folder, tmp_path / "merged"):
        assert main(["verify", str(written)]) == 0
        assert f"{written}: intact, " in capsys.readouterr().out
        with open(written / "lit_model.pth", "ab") as file:
            file.write(b"!")
        assert main(["verify", str(written)]) == 2
        assert f"{written / 'lit_model.pth'}: " in capsys.readouterr().out


def test_verify_checks_all_checkpoints_of_a_run(tmp_path, capsys, refusal):
    for name in ("step-1", "step-2", "step-3", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lit_model.pth").write_text(name)
        seal(tmp_path / name)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": intact, 1 files, ") == 4
    (tmp_path / "step-1" / "lit_model.pth").unlink()
    (tmp_path / "step-2" / "COMPLETE").write_text("{")
    (tmp_path / "step-3" / "COMPLETE").write_text("")
    assert main(["verify", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "step-1/lit_model.pth: missing" in shown.out and "step-2/COMPLETE: damaged" in shown.out
    assert "step-3: has no checksums" in shown.out and f"{tmp_path / 'final'}: intact" in shown.out
    assert shown.err.count("\n") == 1 and "3 of 4" in shown.err
    assert main(["verify", str(tmp_path / "none")]) == 2
    (tmp_path / "step-1" / "COMPLETE").unlink()
    (tmp_path / "step-1" / "lit_model.pth").touch()
    assert "has no checksums (no file COMPLETE)" in refusal("verify", tmp_path / "step-1")
