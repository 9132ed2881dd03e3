"""Checkpoints of older commits (tests/fixtures/checkpoints/write.py) are verified, resumed and generate text."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import Forked, clean, finish
from toolkit_metric.evaluate import data_of_run
from torch.nn.functional import cross_entropy

from toolkit import cli, load
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.training.checkpoint_meta import uses_old_ends, uses_old_tokenizer

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
spec = importlib.util.spec_from_file_location("write_checkpoints", FOLDER / "write.py")
write = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write)
ARCHIVES = sorted(FOLDER.glob("*/*.tar.xz"))


def unpack(folder: Path, commit: str, *kinds: str) -> None:
    """Write the inputs and these kinds' checkpoints as the older commit left them."""
    write.write_inputs(folder)
    for kind in kinds:
        shutil.unpack_archive(FOLDER / commit / f"{kind}.tar.xz", folder)


def test_there_are_checkpoints_of_each_kind():
    assert {path.name.removesuffix(".tar.xz") for path in ARCHIVES} == write.RUNS.keys()
    assert sum(path.stat().st_size for path in ARCHIVES) < 350_000


CASES = [
    pytest.param(path, marks=[] if path.name == "full.tar.xz" else pytest.mark.slow)
    for path in ARCHIVES
    if not path.name.startswith("fsdp1")
]


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.name.removesuffix('.tar.xz')}")
def test_an_old_checkpoint_is_resumed_as_the_old_code_went_on(path, tmp_path, monkeypatch, capsys):
    """Losses of the next two steps are those that the older code computed after the checkpoint."""
    kind = path.name.removesuffix(".tar.xz")
    unpack(tmp_path, path.parent.name, *write.with_base([kind]))
    monkeypatch.chdir(tmp_path)
    step = f"{kind}/{write.STEP}"
    assert cli.main(["verify", step]) == 0
    process = Forked([*write.RUNS[kind], "--resume", step, "--out_dir", "resumed"])
    _, err = finish(process)
    assert process.returncode == 0, err
    expected = json.loads((tmp_path / kind / "losses.json").read_text())[2:]
    assert write.losses(tmp_path / "resumed") == pytest.approx(
        expected, rel=1e-6
    )  # the order of sums has changed since
    capsys.readouterr()
    assert cli.main(["generate", step, "--prompt", "the page", "--max_new_tokens", "4", "--accelerator", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the page")


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_sharded"])
def test_s2_a_checkpoint_of_fsdp1_is_resumed_under_fsdp(kind, devices, tmp_path, monkeypatch):
    """Full and sharded, its files name whole parameters and their moments: each engine goes on as fsdp1 did."""
    unpack(tmp_path, "7341057", kind)
    monkeypatch.chdir(tmp_path)
    options = ["--resume", f"{kind}/{write.STEP}", "--out_dir", "resumed", "--devices", devices, "--strategy", "fsdp"]
    process = Forked([*write.FSDP1, *options])
    _, err = finish(process)
    assert process.returncode == 0, err
    expected = json.loads((tmp_path / kind / "losses.json").read_text())[2:]
    assert len(expected) == 3
    assert write.losses(tmp_path / "resumed") == pytest.approx(expected, rel=1e-6)  # measured: the same bits


def test_the_configuration_of_a_run_under_fsdp1_names_what_to_use(tmp_path, monkeypatch, capsys):
    unpack(tmp_path, "7341057", "fsdp1")
    monkeypatch.chdir(tmp_path)
    options = ["--config", f"fsdp1/{write.STEP}/hyperparameters.yaml", "--out_dir", "again"]
    assert cli.main(["pretrain", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "strategy fsdp1: must be one of" in line and line.endswith("; use fsdp, which resumes its checkpoints")
    assert not Path("again").exists()


def test_s2_a_run_begun_without_bos_resumes_without_it(tmp_path, monkeypatch, capsys):
    """Its checkpoints and its evaluation keep that rule, although its tokenizer adds bos."""
    unpack(tmp_path, "7341057", "bos")
    monkeypatch.chdir(tmp_path)
    old, resumed = tmp_path / "bos" / write.STEP, tmp_path / "resumed" / "final"
    assert cli.main([*write.RUNS["bos"], "--resume", str(old), "--out_dir", "resumed"]) == 0
    lines = capsys.readouterr().out
    for name in ("text", "more"):
        assert f"Data: {name}: documents begin without bos, as in toolkit 0.1.0 (--data.add_bos null)" in lines
    expected = json.loads((tmp_path / "bos" / "losses.json").read_text())
    assert write.losses(tmp_path / "resumed") == pytest.approx(expected[2:], rel=1e-6)
    for folder in (old, resumed):
        data, _ = data_of_run(folder, trust=True)
        assert [module.add_bos for module in data.sources_by_name.values()] == [None, None]
        assert uses_old_ends(folder)
    shutil.copytree(old, resumed.parent / write.STEP)
    (resumed / "trainer" / "meta.json").write_text("{")  # the older checkpoint says it
    assert uses_old_ends(resumed) and not uses_old_ends(None)


def test_s2_tokens_of_a_run_with_bos_by_setting_alone_stay(tmp_path, monkeypatch, capsys):
    """Its data is found in the cache again, its text begins with bos, and its export gives transformers these ids."""
    from transformers import AutoTokenizer

    unpack(tmp_path, "d7aa1e6", "bos_setting")
    monkeypatch.chdir(tmp_path)
    old = f"bos_setting/{write.STEP}"
    assert cli.main([*write.RUNS["bos_setting"], "--resume", old, "--out_dir", "resumed"]) == 0
    assert "Data: each document begins with <bos>" in capsys.readouterr().out
    expected = json.loads((tmp_path / "bos_setting" / "losses.json").read_text())
    assert write.losses(tmp_path / "resumed") == pytest.approx(expected[2:], rel=1e-6)
    ids = [0, *(" abcdefghijklmnopqrstuvwxyz".index(letter) + 2 for letter in "the")]
    for folder in (old, "resumed/final"):
        assert Tokenizer.load(folder).encode("the") == ids
    assert cli.main(["convert_to_hf", old, "exported"]) == 0
    assert AutoTokenizer.from_pretrained("exported")("the")["input_ids"] == ids
    assert Tokenizer.load("exported").encode("the") == ids
    new = Tokenizer.load("setting_tokenizer")
    assert new.encode("the") == [29]
    assert cli.main([*write.RUNS["bos_setting"], "--out_dir", "new"]) == 0
    assert "--tokenizer_dir setting_tokenizer: tokenizer_config.json has add_bos_token true" in capsys.readouterr().out
    shutil.copytree(old, f"resumed/{write.STEP}")
    Path("resumed/final/tokenizer.json").write_text("{")  # the older checkpoint says it
    assert uses_old_tokenizer("setting_tokenizer", Path("resumed/final"))
    assert not uses_old_tokenizer("setting_tokenizer", Path("new/final"))


@pytest.mark.slow
def test_s2_all_ranks_resume_a_run_begun_without_bos(tmp_path):
    unpack(tmp_path, "7341057", "bos")
    options = [*write.RUNS["bos"], "--resume", f"bos/{write.STEP}", "--out_dir", "resumed", "--devices", "2"]
    done = subprocess.run([sys.executable, "-m", "toolkit", *options], env=clean({}), cwd=tmp_path)
    assert done.returncode == 0
    expected = json.loads((tmp_path / "bos" / "losses.json").read_text())
    assert write.losses(tmp_path / "resumed") == pytest.approx(expected[2:], rel=1e-5)


def test_n6_a_new_run_and_its_evaluation_leave_out_the_loss_of_bos(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write.write_bos_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"the page {'on ' * (i % 5)}")
    data = [write.CACHE, "--data=TextFiles", "--data.train_data_path=text", "--data.val_fraction=0.4"]
    options = [*write.MODEL, *write.STEPS, *data, "--tokenizer_dir=tokenizer", "--out_dir=new"]
    assert cli.main(["pretrain", "pico-llama", *options]) == 0
    assert "Data: each document begins with <bos> and ends with <eos> (--data.add_bos auto)" in capsys.readouterr().out
    assert (
        cli.main(["evaluate", "new/final", "--trust_checkpoint_data=true", "--format=json", "--accelerator=cpu"]) == 0
    )
    result = json.loads(capsys.readouterr().out)
    data, _ = data_of_run(tmp_path / "new" / "final", trust=True)
    assert data.add_bos == "auto" and not uses_old_ends(tmp_path / "new" / "final")
    rows = data.prepare(tokenizer=Tokenizer.load("tokenizer"), max_seq_length=16, report=lambda line: None).val
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        losses = cross_entropy(load("new/final")(ids).flatten(0, 1), labels.flatten(), reduction="none")
    is_bos = labels.flatten() == 0
    assert is_bos.any() and result["loss"] == pytest.approx(float(losses[~is_bos].mean()), rel=1e-5)
    assert write.losses(tmp_path / "new", "val_loss")[-1] == pytest.approx(result["loss"], rel=1e-5)


@pytest.mark.parametrize("file", ["COMPLETE", "trainer/meta.json"])
def test_a_newer_format_is_refused_in_one_line(file, tmp_path, monkeypatch, capsys):
    unpack(tmp_path, "978715c", "full")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "full" / write.STEP
    changed = re.sub(r'("format_version": *)1', r"\g<1>2", (folder / file).read_text())
    (folder / file).write_text(changed)
    options = ["--verify_checkpoint", "false"] if file != "COMPLETE" else []
    words = [*write.RUNS["full"], "--resume", str(folder), "--out_dir", "resumed", *options]
    assert cli.main(words) == UserError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file}: format version 2, this version of toolkit reads 1; upgrade toolkit" in line
