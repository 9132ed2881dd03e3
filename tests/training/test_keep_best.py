"""`--train.keep_best`: the right checkpoint is kept across saving, pruning and resuming."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.compare_runs import assert_same_weights
from helpers.groups import Case, run_group
from helpers.small_runs import text_data

from toolkit.checkpoints.store import complete_checkpoints, newest, step_of
from toolkit.checkpoints.weights import load_state
from toolkit.cli import main
from toolkit.planning.best_metric import VAL_LOSS, BestMetric
from toolkit.training.callbacks.best import EarlyStopping
from toolkit.training.run import Run

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 1.5, 12: 1.9}  # the best so far: 2, 4, 4, 4, 10, 10


@pytest.fixture
def flags(corpus) -> list[str]:
    return [
        "pico-llama", "--accelerator", "cpu", *text_data(corpus),
        "--train.global_batch_size", "4", "--train.micro_batch_size", "2",
        "--train.max_seq_length", "32", "--train.learning_rate", "3e-3", "--train.lr_schedule", "constant",
        "--train.save_interval", "0", "--eval.interval", "2", "--train.keep_best", "true",
    ]  # fmt: skip


@pytest.fixture
def fake_losses(monkeypatch) -> dict[int, float]:
    """Validation losses by step, returned by a patched validation."""
    found = dict(LOSSES)
    monkeypatch.setattr(Run, "validate", lambda trainer: {"val_loss": found[trainer.progress.step]})
    return found


def pretrain(flags: list[str], out: Path, steps: int, *more: str) -> int:
    return main(["pretrain", *flags, "--out_dir", str(out), "--train.max_steps", str(steps), *more])


def best_loss(folder: Path) -> float:
    return load_state(folder / "trainer" / "callbacks.pth")["KeepBest"]["val_loss"]


@pytest.mark.parametrize(("steps", "expected"), [(3, 2), (8, 4), pytest.param(12, 10, marks=pytest.mark.slow)])
def test_first_checkpoint_with_the_lowest_loss_is_kept(flags, fake_losses, tmp_path, steps, expected):
    fake_losses[3] = 3.5  # at the end of the run of three steps
    assert pretrain(flags, tmp_path / "run", steps, "--train.save_interval", "1", "--train.keep_last", "0") == 0
    best = tmp_path / "run" / "best"
    assert step_of(best) == expected and best_loss(best) == best_loss(tmp_path / "run" / "final") == LOSSES[expected]
    assert_same_weights(best, tmp_path / "run" / f"step-{expected:08d}")


def test_pruning_keeps_the_best_checkpoint(flags, fake_losses, tmp_path):
    assert pretrain(flags, tmp_path / "run", 8, "--train.save_interval", "1", "--train.keep_last", "2") == 0
    kept = {path.name for path in (tmp_path / "run").iterdir() if (path / "COMPLETE").exists()}
    assert kept == {"step-00000006", "step-00000007", "best", "final"}  # the last step is final's


def test_no_best_checkpoint_without_the_flag(flags, fake_losses, tmp_path):
    assert pretrain(flags, tmp_path / "run", 2, "--train.keep_best", "false") == 0
    assert "best" not in dict(complete_checkpoints(tmp_path / "run"))


@pytest.mark.parametrize("metric", [VAL_LOSS, BestMetric("val_f1", is_higher_better=True)], ids=str)
def test_s2_best_value_and_patience_are_restored(metric):
    """A worse value after a resume is no new best one; the state of another direction is left alone."""
    best, worse = (2.0, 1.0) if metric.is_higher_better else (1.0, 2.0)
    states = [EarlyStopping(3, metric) for _ in range(2)]
    states[0].on_validation_end(None, {metric.name: best})
    states[0].on_validation_end(None, {metric.name: worse})
    states[1].load_state_dict(states[0].state_dict())
    assert states[1].best == best and states[1].stale_validations == 1 and not states[1].restarts
    assert not states[1].is_new_best({metric.name: worse})
    other = EarlyStopping(3, BestMetric(metric.name, not metric.is_higher_better))
    other.load_state_dict(states[0].state_dict())
    assert other.restarts and (other.best, other.stale_validations) == (None, 0)


@pytest.mark.slow
def test_s2_resumed_run_restores_the_best_loss(flags, fake_losses, tmp_path):
    assert pretrain(flags, tmp_path / "uninterrupted", 12) == 0
    assert pretrain(flags, tmp_path / "run", 6) == 0
    assert pretrain(flags, tmp_path / "run", 8, "--resume", "auto") == 0
    assert step_of(tmp_path / "run" / "best") == 4  # 2.5 and 2.0 are not below
    assert pretrain(flags, tmp_path / "run", 12, "--resume", "auto") == 0
    assert step_of(tmp_path / "run" / "best") == 10
    assert_same_weights(tmp_path / "run" / "best", tmp_path / "uninterrupted" / "best")


@pytest.mark.slow
def test_s2_run_resumes_from_best_if_it_is_the_latest(flags, fake_losses, tmp_path, capsys):
    """As after a kill between the best validation and the next checkpoint."""
    assert pretrain(flags, tmp_path / "uninterrupted", 12) == 0
    assert pretrain(flags, tmp_path / "run", 12) == 0
    shutil.rmtree(tmp_path / "run" / "final")
    assert newest(tmp_path / "run") == tmp_path / "run" / "best"
    capsys.readouterr()
    assert pretrain(flags, tmp_path / "run", 12, "--resume", "auto") == 0
    assert "best: step 10" in capsys.readouterr().out
    assert_same_weights(tmp_path / "run" / "final", tmp_path / "uninterrupted" / "final")


def test_run_resumes_from_later_checkpoints_than_best(flags, fake_losses, tmp_path):
    assert pretrain(flags, tmp_path / "run", 8, "--train.save_interval", "5") == 0
    out = tmp_path / "run"
    assert newest(out) == out / "final"
    shutil.rmtree(out / "final")
    assert newest(out) == out / "step-00000005"
    # a checkpoint that was being replaced at a power failure is still used
    shutil.rmtree(out / "step-00000005")
    (out / "best").rename(out / ".old-best")
    assert newest(out) == dict(complete_checkpoints(out))["best"] == out / ".old-best"


@pytest.mark.slow
def test_missing_best_checkpoint_is_recreated(flags, fake_losses, tmp_path):
    assert pretrain(flags, tmp_path / "run", 4) == 0
    shutil.rmtree(tmp_path / "run" / "best")
    assert pretrain(flags, tmp_path / "run", 6, "--resume", "auto") == 0
    assert step_of(tmp_path / "run" / "best") == 6
    other = ["--resume", str(tmp_path / "run" / "final")]
    assert pretrain(flags, tmp_path / "other", 8, *other) == 0  # this folder has no best checkpoint
    assert step_of(tmp_path / "other" / "best") == 8


def test_initial_weights_can_be_the_best(flags, fake_losses, tmp_path):
    fake_losses |= {0: 1.0}
    assert pretrain(flags, tmp_path / "run", 4, "--eval.initial_validation", "true") == 0
    assert step_of(tmp_path / "run" / "best") == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data.val_fraction", "0"], "--train.keep_best true: this data has no validation split"),
        (
            ["--eval.interval", "0", "--eval.final_validation", "false"],
            "--train.keep_best true is not supported with a run without validations",
        ),
    ],
)
def test_keep_best_without_validation_is_an_error(flags, tmp_path, capsys, more, message):
    assert pretrain(flags, tmp_path / "run", 4, *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.slow
def test_keep_best_of_adapters_and_shards_on_two_ranks(flags, fake_losses, tmp_path):
    """With real validation: the loss decreases, so the last checkpoint is the best."""
    assert pretrain(flags, tmp_path / "base", 2) == 0
    rows = "".join(json.dumps({"text": "the model reads a line of text and learns"}) + "\n" for _ in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    lora = [
        str(tmp_path / "base" / "final"), "--data", "JSON", "--data.json_path", str(tmp_path / "rows.jsonl"),
        "--train.learning_rate", "1e-2", "--eval.max_new_tokens", "0",
    ]  # fmt: skip
    more = ["--strategy", "fsdp", "--train.keep_best", "true", "--eval.interval", "2", "--train.max_steps", "4"]
    more += ["--train.global_batch_size", "4", "--train.micro_batch_size", "2", "--accelerator", "cpu"]
    sharded = [*flags, "--fsdp.state_dict_type", "sharded"]
    cases = [Case("lora", lora, command="finetune_lora"), Case("sharded", sharded)]
    run_group(tmp_path, 2, [Case(c.name, [*c.flags, *more], command=c.command) for c in cases], [])
    for name in ("lora", "sharded"):
        best, final = tmp_path / name / "best", tmp_path / name / "final"
        assert step_of(best) == 4 and best_loss(best) == best_loss(final)
    assert_same_weights(tmp_path / "lora" / "best", tmp_path / "lora" / "final")
    assert_same_weights(tmp_path / "sharded" / "best", tmp_path / "sharded" / "final")
