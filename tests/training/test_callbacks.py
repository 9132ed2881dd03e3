"""Callbacks: the order of the moments, metrics of one's own, stopping, errors, and --train.patience."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.compare_runs import rows_of
from helpers.small_runs import text_data

from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.hf.card import write_model_card
from toolkit.checkpoints.store import step_of
from toolkit.cli import main
from toolkit.errors import CallbackError, UserError
from toolkit.training.checkpoint_meta import read_callback_states
from toolkit.training.run import Callback, Run, callback_states

OLD = Path(__file__).parents[1] / "fixtures" / "old_callbacks.py"
MODULE = textwrap.dedent("""
    import torch

    import toolkit

    class Recorder(toolkit.Callback):
        columns = ("largest_gradient",)

        def __init__(self, path="moments.txt"):
            self.path = path

        def write(self, *words):
            with open(self.path, "a") as file:
                print(*words, file=file)

        def on_train_start(self, trainer):
            self.write("on_train_start", trainer.progress.step)

        def on_before_optimizer_step(self, trainer):
            self.largest = max(float(p.grad.abs().max()) for p in trainer.model.parameters())

        def on_step_end(self, trainer, metrics):
            self.write("on_step_end", trainer.progress.step, metrics["step_tokens"])

        def on_log(self, trainer, metrics):
            metrics["largest_gradient"] = self.largest
            self.write("on_log", metrics["step"], metrics["tokens_per_sec"] > 0)

        def on_validation_end(self, trainer, metrics):
            self.write("on_validation_end", trainer.progress.step, sorted(metrics))

        def on_checkpoint_saved(self, trainer, folder):
            self.write("on_checkpoint_saved", folder.name)

        def on_exception(self, trainer, error):
            self.write("on_exception", type(error).__name__)

        def on_train_end(self, trainer):
            self.write("on_train_end", trainer.progress.step)

    class StopAfter(toolkit.Callback):
        def __init__(self, step):
            self.step = step

        def on_step_end(self, trainer, metrics):
            if trainer.progress.step == self.step and trainer.fabric.global_rank == trainer.fabric.world_size - 1:
                trainer.request_stop("enough")

    class Counter(toolkit.Callback):
        def __init__(self, kind="tensor"):
            self.kind, self.total = kind, torch.zeros(())

        def on_step_end(self, trainer, metrics):
            self.total += metrics["loss"]

        def on_train_end(self, trainer):
            with open("totals.txt", "a") as file:
                print(float(self.total), file=file)

        def state_dict(self):
            return {"total": self.total if self.kind == "tensor" else self}

        def load_state_dict(self, state):
            self.total = state["total"].clone()

    class Broken(toolkit.Callback):
        def on_step_end(self, trainer, metrics):
            metrics["no such metric"]

    SCORES = {1: float("nan"), 2: 0.2, 3: 0.5, 4: 0.3, 5: float("inf"), 6: 0.9, 7: 0.1}

    class Scores(toolkit.Callback):
        columns = ("val_my_score", "val_my_score_stderr")
        higher_is_better = {"val_my_score": True}

        def __init__(self, prefix="val_"):
            self.prefix = prefix

        def validation_metrics(self, trainer):
            return {f"{self.prefix}my_score": SCORES[trainer.progress.step], "val_my_score_stderr": 0.01}
""")


@pytest.fixture
def pretrain(corpus, tmp_path, monkeypatch):
    """Run `toolkit pretrain` in a folder that has a module of callbacks; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_callbacks.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", sys.path[:])  # the run adds this folder
    for name in ("my_callbacks", "old_callbacks"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(*flags, steps=4) -> int:
        return main([
            "pretrain", "pico-llama", "--accelerator", "cpu", *text_data(corpus), "--train.global_batch_size", "4",
            "--train.micro_batch_size", "2", "--train.max_seq_length", "32", "--train.save_interval", "0",
            "--out_dir", "run", "--train.max_steps", str(steps), *flags,
        ])  # fmt: skip

    return run


def test_module_that_exits_is_named(pretrain, tmp_path, capsys):
    (tmp_path / "leaving_callbacks.py").write_text("import sys; sys.exit(0)")
    assert pretrain("--callbacks", "leaving_callbacks.C") == 2
    assert "--callbacks leaving_callbacks.C: leaving_callbacks calls sys.exit(0)" in (capsys.readouterr().err)


def test_moments_come_in_order_and_metrics_become_columns(pretrain, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "callbacks:\n- class_path: my_callbacks.Recorder\n  init_args: {path: seen.txt}\n"
        "train: {log_interval: 2}\neval: {interval: 2, max_iters: 1, final_validation: false}\n"
    )
    assert pretrain("--config", "run.yaml", "--train.save_interval", "3") == 0
    metrics = ["val_bpb", "val_loss", "val_ppl"]
    step = "on_step_end {} 128"
    assert (tmp_path / "seen.txt").read_text().splitlines() == [
        "on_train_start 0", step.format(1), step.format(2), "on_log 2 True", f"on_validation_end 2 {metrics}",
        step.format(3), "on_checkpoint_saved step-00000003", step.format(4), "on_log 4 True",
        "on_checkpoint_saved final", "on_train_end 4",
    ]  # fmt: skip
    assert [float(row["largest_gradient"]) > 0 for row in rows_of(tmp_path / "run")] == [True, True]
    # resumed without the callback: its column and its values stay
    assert pretrain("--resume", "run/step-00000003", "--out_dir", "other", "--train.log_interval", "1", steps=5) == 0
    before = rows_of(tmp_path / "run")
    assert pretrain("--resume", "auto", steps=5) == 0
    after = rows_of(tmp_path / "run")
    assert after[:2] == before and after[-1]["largest_gradient"] == ""


def test_callbacks_written_for_the_trainer_run_unchanged_and_end_the_run(pretrain, tmp_path, capsys):
    shutil.copy(OLD, tmp_path)
    (tmp_path / "run.yaml").write_text(
        "callbacks:\n- old_callbacks.GradientQuartiles\n- old_callbacks.EveryName\n"
        "- {class_path: old_callbacks.StopAtLoss, init_args: {target: 100.0}}\n"
    )
    assert pretrain("--config", "run.yaml") == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "saved mine at step 1",
        "stopping after step 1: the loss is 100.0 or less",
        "ended at step 1, 0 skipped",
    ):
        assert line in lines
    assert any(line.startswith("val_loss 5.") and line.endswith(" in mine") for line in lines)
    assert (tmp_path / "run" / "final" / "COMPLETE").is_file() and rows_of(tmp_path / "run")[-1]["step"] == "1"
    assert float(rows_of(tmp_path / "run")[-1]["grad_q75"]) > 0


@pytest.mark.slow
def test_one_rank_that_asks_stops_all(corpus, tmp_path):
    (tmp_path / "my_callbacks.py").write_text(MODULE)
    stop = '[{"class_path": "my_callbacks.StopAfter", "init_args": {"step": 2}}]'
    command = [
        sys.executable, "-m", "toolkit", "pretrain", "pico-llama", "--accelerator", "cpu", "--devices", "2",
        *text_data(corpus),
        "--train.global_batch_size", "4", "--train.micro_batch_size", "1", "--train.max_seq_length", "32",
        "--train.max_steps", "4", "--out_dir", "run", "--callbacks", stop,
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True)
    assert rows_of(tmp_path / "run")[-1]["step"] == "2"


def test_an_error_in_a_callback_names_it(pretrain, tmp_path, capsys):
    assert pretrain("--callbacks", "my_callbacks.Recorder,my_callbacks.Broken") == 1
    assert "callback Broken failed in on_step_end: KeyError: 'no such metric'" in capsys.readouterr().err
    assert (tmp_path / "moments.txt").read_text().splitlines()[-1] == "on_exception CallbackError"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("my_callbacks.Nothing", "my_callbacks.Nothing: my_callbacks has no Nothing"),
        ("no_module.Nothing", "no_module.Nothing: no such class in the current folder or an installed package"),
        ("my_callbacks.sub.Nothing", "my_callbacks.sub.Nothing: there is no module my_callbacks.sub"),
        ("failing_callbacks.C", "failing_callbacks.C: module 'sys' has no attribute 'no_such_name'"),
        ("pathlib.Path", "pathlib.Path: must be a class derived from toolkit.Callback"),
        ("my_callbacks.StopAfter", "my_callbacks.StopAfter: missing a required argument: 'step'"),
    ],
)
def test_mistakes_in_callbacks_are_one_line(pretrain, tmp_path, capsys, value, message):
    (tmp_path / "failing_callbacks.py").write_text("import sys; sys.no_such_name")
    assert pretrain("--callbacks", value) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


@pytest.mark.slow
def test_patience_stops_early_and_survives_a_resume(pretrain, tmp_path, monkeypatch, capsys):
    losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.2, 10: 2.1, 12: 1.0}
    monkeypatch.setattr(Run, "validate", lambda trainer: {"val_loss": losses[trainer.progress.step]})
    flags = ["--eval.interval", "2", "--eval.final_validation", "false", "--train.patience"]
    assert pretrain(*flags, "2", "--train.save_interval", "7", steps=7) == 0  # one of two validations so far
    assert pretrain(*flags, "2", "--resume", "auto", steps=12) == 0
    assert "stopping after step 8: the lowest val_loss is 2 validations old" in capsys.readouterr().out
    assert pretrain(*flags, "2", "--resume", "auto", steps=12) == 0
    assert "the run is finished, nothing to do" in capsys.readouterr().out
    assert pretrain(*flags, "4", "--resume", "auto", steps=12) == 0
    assert rows_of(tmp_path / "run")[-1]["step"] == "12"


def test_s2_states_of_callbacks_are_resumed_by_name(pretrain, tmp_path, capsys):
    two = ["--callbacks", "my_callbacks.Counter,my_callbacks.Counter"]
    assert pretrain(*two, "--train.save_interval", "2", "--train.async_save", "true") == 0
    shutil.rmtree(tmp_path / "run" / "final")
    capsys.readouterr()
    assert pretrain(*two, "--resume", "true") == 0
    assert "step 2," in (shown := capsys.readouterr().out) and "callback" not in shown
    assert len(totals := (tmp_path / "totals.txt").read_text().split()) == 4 and len(set(totals)) == 1
    keep_best = ["--eval.interval", "2", "--train.keep_best", "true"]
    assert pretrain(*keep_best, "--resume", "true", steps=6) == 0
    shown = capsys.readouterr().out
    assert "callback KeepBest: the checkpoint has no state for this callback; it starts" in shown
    assert "callback Counter 2: ignored its state in the checkpoint" in shown
    (tmp_path / "callbacks.yaml").write_text("callbacks: [{class_path: my_callbacks.Counter, init_args: {kind: self}}]")
    assert pretrain("--config", "callbacks.yaml", "--resume", "true", steps=8) == 1
    assert "callback Counter: state_dict()['total'] contains the type Counter, which a" in capsys.readouterr().err


def test_s2_a_state_is_a_dictionary():
    class Listed(Callback):
        def state_dict(self):
            return [1]

    with pytest.raises(CallbackError, match=r"Listed: state_dict\(\) returns a list, not a dictionary"):
        callback_states([Listed()])


def test_s2_older_checkpoints_have_two_states_in_meta_json(pretrain, tmp_path):
    flags = ["--eval.interval", "2", "--train.keep_best", "true", "--train.patience", "3"]
    assert pretrain(*flags) == 0
    states, folder = [], tmp_path / "run" / "final"
    for _ in range(2):
        states.append(read_callback_states(folder))
        (folder / "trainer" / "callbacks.pth").unlink(missing_ok=True)
        best, stop = (states[0][name] for name in ("KeepBest", "EarlyStopping"))
        meta = json.loads((folder / "trainer" / "meta.json").read_text())
        meta |= {"best_val_loss": best["val_loss"], "lowest_val_loss": stop["val_loss"], "stale_validations": 0}
        (folder / "trainer" / "meta.json").write_text(json.dumps(meta))
    assert states[0] == states[1] and states[0]["EarlyStopping"]["stale_validations"] == 0
    for name in ("stale_validations", "best_val_loss"):
        (folder / "trainer" / "meta.json").write_text(json.dumps(meta | {name: "x"}))
        with pytest.raises(UserError, match="meta.json: .*: .* 'x' is no number; resume from another checkpoint"):
            read_callback_states(folder)


def test_metrics_of_callbacks_are_shown_and_decide_and_resume(pretrain, tmp_path, capsys):
    scores = ["--callbacks", "my_callbacks.Scores", "--data.val_fraction", "0", "--eval.interval", "1"]
    flags = [*scores, "--train.keep_best", "true", "--train.patience", "2", "--eval.best_by", "my_score"]
    assert pretrain(*flags, steps=4) == 0  # after the best: one of two validations
    out = tmp_path / "run"
    shown = capsys.readouterr().out.splitlines()
    assert "best/ is the checkpoint with the highest val_my_score; see --eval.best_by and --eval.best_mode" in shown
    assert [line.rpartition(" | ")[2] for line in shown if "| validation " in line] == [
        f"validation my score {score} ± 0.01" for score in ("nan", "0.2", "0.5", "0.3")
    ]
    assert [row["val_my_score"] for row in rows_of(tmp_path / "run")] == ["nan", "0.2", "0.5", "0.3"]
    assert step_of(out / "best") == 3
    states = read_callback_states(out / "final")
    assert states["KeepBest"] == {"val_my_score": 0.5, "is_higher_better": True}
    page = (out / "report.html").read_text()
    assert "<dt>my score</dt><dd>0.3 ± 0.01</dd>" in page and '["My score","",["val_my_score"]]' in page
    write_model_card(tmp_path / "README.md", read_model_config(out / "final"), out / "final", has_tokenizer=True)
    assert "| Validation my score | 0.3 ± 0.01 |" in (tmp_path / "README.md").read_text()

    assert pretrain(*flags, "--resume", "auto", steps=7) == 0
    assert "stopping after step 5: the highest val_my_score is 2 validations old" in capsys.readouterr().out
    assert step_of(out / "best") == 3  # neither nan nor inf is better
    by_lowest = [*flags, "--eval.best_mode", "min", "--resume", "auto"]
    assert pretrain(*by_lowest, steps=7) == 0  # the run stopped early only by the other direction
    shown = capsys.readouterr().out
    for name in ("KeepBest", "EarlyStopping"):
        line = f"callback {name}: the checkpoint has another metric or direction; it starts anew with the lowest val_my"
        assert shown.count(line) == 1
    assert step_of(out / "best") == 7 and read_callback_states(out / "final")["KeepBest"] == {"val_my_score": 0.1}


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--eval.best_by", "my_scre"], 2, "--eval.best_by val_my_scre: no metric of this run's validations has this"),
        (["--eval.best_by", "val_loss"], 2, "--eval.best_by val_loss: no metric"),
        (["--eval.best_by", "my_score_stderr"], 2, "whether the highest or the lowest value is the best; add --eval.b"),
        (["--eval.best_by", "my_score", "--train.keep_best", "false"], 2, "--eval.best_by my_score has no effect with"),
        ([], 2, "--train.keep_best true: this data has no validation split"),
        (["--callbacks", '[{"class_path": "my_callbacks.Scores", "init_args": {"prefix": ""}}]', "--eval.best_by",
          "my_score"], 1, "callback Scores: validation_metrics returns 'my_score'; names must start with val_"),
    ],
)  # fmt: skip
def test_mistakes_in_metrics_are_one_line(pretrain, capsys, flags, code, message):
    scores = ["--callbacks", "my_callbacks.Scores", "--data.val_fraction", "0", "--train.keep_best", "true"]
    assert pretrain(*scores, *flags, steps=1) == code
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_patience_without_validations_is_refused(pretrain, capsys):
    assert pretrain("--train.patience", "2", "--eval.interval", "0") == 2
    assert "--train.patience 2 has no effect with --eval.interval 0" in capsys.readouterr().err
