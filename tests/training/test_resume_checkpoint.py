"""S7 verified-bytes and N7 finite-or-stop of complete runs."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.compare_runs import assert_same_weights, rows_of
from helpers.damage import flip
from helpers.small_runs import text_data

from toolkit.checkpoints.weights import load_state, load_weights, save_state
from toolkit.cli import main


@pytest.fixture(scope="module")
def flags(corpus) -> list[str]:
    return [
        "pretrain", "pico-llama", "--accelerator", "cpu", *text_data(corpus),
        "--train.global_batch_size", "8", "--train.max_seq_length", "32",
        "--train.lr_schedule", "constant", "--train.save_interval", "2", "--train.keep_last", "0",
        "--train.max_steps", "7",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    """A run with step-2, -4, -6 and final."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main([*flags, "--out_dir", str(out)]) == 0
    return out


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it without final."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    return tmp_path / "run"


def step(run: Path, number: int) -> Path:
    return run / f"step-{number:08d}"


def resume(flags, out: Path, capsys, how="auto", *more: str) -> tuple[int, str, str]:
    code = main([*flags, "--out_dir", str(out), "--resume", str(how), *more])
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if ": given 2 times; " not in line]  # ``more`` overrides flags
    assert "Traceback" not in shown.err and len(lines) == (code != 0)
    return code, shown.out, "\n".join(lines)


def steps(run: Path) -> list[int]:
    return [int(row["step"]) for row in rows_of(run)]


DAMAGED = ["lit_model.pth", "trainer/state.pth", "COMPLETE", "trainer/meta.json"]


@pytest.mark.parametrize("name", slow_except(["lit_model.pth"], DAMAGED))
def test_s7_auto_skips_a_damaged_checkpoint(finished, run, flags, capsys, name):
    flip(step(run, 6) / name)
    for how in ("true", step(run, 6)):  # strict
        code, _, err = resume(flags, run, capsys, how)
        assert code == 2 and "step-00000006" in err and name in err
    code, out, _ = resume(flags, run, capsys, "auto", "--train.keep_last", "1")
    assert code == 0 and "warning: " in out and name in out and f"resuming from {step(run, 4)}: step 4" in out
    assert {path.name for path in run.iterdir() if path.is_dir()} == {
        "logs", "final", "step-00000006", "damaged-step-00000006"
    }  # fmt: skip
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]
    assert_same_weights(run / "final", finished / "final")
    assert main(["verify", str(step(run, 6))]) == 0


@pytest.mark.parametrize("how", ["auto", "path"])
def test_s7_a_huge_manifest_is_damage(run, flags, capsys, how):
    with open(step(run, 6) / "COMPLETE", "ab") as file:
        file.truncate(30 * 2**30)  # sparse
    out = run if how == "auto" else run.with_name("other")
    code, shown, err = resume(flags, out, capsys, how if how == "auto" else step(run, 6))
    if how == "auto":
        assert code == 0 and "COMPLETE: damaged" in shown and f"resuming from {step(run, 4)}: step 4" in shown
    else:
        assert code == 2 and "step-00000006/COMPLETE: damaged: not a manifest (larger than" in err


def test_s7_damaged_final_checkpoint_is_rewritten(finished, flags, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / "final" / "trainer" / "meta.json").write_text("{")
    code, shown, _ = resume(flags, out, capsys)
    assert code == 0 and "final" in shown and f"resuming from {step(out, 6)}" in shown
    assert main(["verify", str(out / "final")]) == 0


def test_s7_run_does_not_restart_if_all_checkpoints_are_damaged(run, flags, capsys):
    for number in (2, 4, 6):
        flip(step(run, number) / "lit_model.pth")
    code, _, err = resume(flags, run, capsys)
    assert code == 2 and "lit_model.pth" in err
    assert len(list(run.glob("step-*"))) == 3


def test_s7_edited_files_are_read_without_verification(run, flags, capsys):
    flip(step(run, 6) / "tokenizer.json")
    code, out, _ = resume(flags, run, capsys, "true", "--verify_checkpoint", "false", "--train.max_steps", "8")
    assert code == 0 and "damaged" not in out


def test_n7_nonfinite_weights_are_never_saved(run, flags, capsys):
    before = {path.name for path in run.iterdir()}
    one_step = ("--train.save_interval", "1", "--train.max_steps", "9")
    code, _, err = resume(flags, run, capsys, "auto", "--train.learning_rate", "1e38", *one_step)
    assert code == 3 and "step-00000007 was not saved: NaN, Inf or too large numbers in lm_head.weight" in err
    assert {path.name for path in run.iterdir()} == before
    code, out, _ = resume(flags, run, capsys, "auto", *one_step)
    assert code == 0 and f"resuming from {step(run, 6)}" in out


@pytest.mark.parametrize("where", slow_except(["moments"], ["weights", "moments"]))
def test_n7_nonfinite_checkpoints_of_older_versions_stop_the_run(run, flags, capsys, where):
    folder = step(run, 6)
    (folder / "COMPLETE").write_bytes(b"")
    if where == "weights":
        weights = {name: tensor.clone() for name, tensor in load_weights(folder).items()}
        weights["transformer.ln_f.weight"][3] = float("nan")  # which is not tied to another
        torch.save(weights, folder / "lit_model.pth")
    else:
        state = deepcopy(load_state(folder / "trainer" / "state.pth"))  # the file is overwritten
        state["optimizer"]["state"]["transformer.ln_f.weight"]["exp_avg"][0] = float("inf")
        save_state(state, folder / "trainer" / "state.pth")
    before = {path.name for path in run.iterdir()}
    code, _, err = resume(flags, run, capsys, "true")
    message = {"weights": "step 7 is not finite: ", "moments": "NaN or Inf; no checkpoint was saved"}[where]
    assert code == 3 and message in err
    assert {path.name for path in run.iterdir()} == before


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_invalid_trainer_state_is_a_one_line_error(run, flags, capsys, every):
    folder = step(run, 6)
    (folder / "COMPLETE").write_bytes(b"")
    path = folder / "trainer" / "meta.json"
    good = json.loads(path.read_text())
    wrong = [
        ("samples", 56), ("samples", -8), ("samples", 5), ("samples", 48.0), ("step", 2.5), ("step", "6"),
        ("step", None), ("step", 4), ("step", True), ("tokens", -1), ("tokens", "many"), ("seconds", float("nan")),
        ("seconds", []), ("schedule", []), ("identity", None), ("schedule.peak", "high"), ("schedule.total_steps", 1.5),
        ("identity.data", 5), ("identity.optimizer", "AdamW"), ("identity.global_batch_size", 0),
    ]  # fmt: skip
    for name, value in wrong[::every]:
        bad = json.loads(json.dumps(good))
        group, _, field = name.rpartition(".")
        (bad[group] if group else bad)[field] = value
        path.write_text(json.dumps(bad))
        code, _, err = resume(flags, run, capsys, "true")
        assert code == 2 and str(path) in err and (field in err or "samples" in err), (name, value, err)
    for text in ["", "{", "[]", "3", "[" * 100_000, json.dumps({"format_version": 1})][::every]:
        path.write_text(text)
        code, _, err = resume(flags, run, capsys, "true")
        assert code == 2 and str(path) in err, (text[:20], err)
    path.write_text(json.dumps(good))
    assert resume(flags, run, capsys, "true")[0] == 0
