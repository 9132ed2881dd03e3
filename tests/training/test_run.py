"""Complete runs, from arguments to disk, with a pico model on a small corpus."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers.compare_runs import assert_same_weights, losses, rows_of
from helpers.groups import read_until
from helpers.processes import pretrain
from helpers.small_runs import text_data
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from toolkit_doctor.short_run import short_run_args

from toolkit.checkpoints.lock import exclusive_lock
from toolkit.checkpoints.weights import load_state, load_weights
from toolkit.config import EvalArgs, LogArgs, OptimizerArgs, TrainArgs
from toolkit.data import Mixture, TextFiles
from toolkit.data.loader import train_batches
from toolkit.distributed.signals import restore_handlers_on_exit
from toolkit.errors import GuardError, StoppedBySignalError, UserError
from toolkit.io.tempfiles import temporary_path
from toolkit.models.config import ModelOverrides
from toolkit.planning import resolve
from toolkit.planning.limits import Intervals
from toolkit.planning.run_args import RunArgs
from toolkit.planning.start_checks import check_options, check_start
from toolkit.training import data_reader, engine, launch, rank_consistency
from toolkit.training import run as run_module
from toolkit.training.checkpoint_meta import RunFingerprint
from toolkit.training.engine import resolve_run, run_training, start
from toolkit.training.run import Run


def arguments(corpus: Path, out_dir: Path, *, train=None, evaluation=None, data=None, **options) -> RunArgs:
    train = {"global_batch_size": 8, "micro_batch_size": 4, "max_seq_length": 32, "learning_rate": 3e-3} | (train or {})
    values = {
        "command": "pretrain",
        "model_name": "pico-llama",
        "data": TextFiles(train_data_path=str(corpus), vocab_size=300, **(data or {})),
        "train": TrainArgs(**({"max_steps": 12} | train)),
        "eval": EvalArgs(**(evaluation or {"interval": 5})),
        "optimizer": OptimizerArgs(),
        "out_dir": str(out_dir),
        "accelerator": "cpu",
        "devices": 1,
    }
    return RunArgs(**(values | options))


def prepared(corpus: Path):
    data = TextFiles(train_data_path=str(corpus), vocab_size=300)
    return data.prepare(tokenizer=None, max_seq_length=32, report=lambda line: None)


def folders(out_dir: Path) -> set[str]:
    return {path.name for path in out_dir.iterdir() if (path / "COMPLETE").exists()}


def test_run_learns_and_writes_the_documented_layout(corpus, tmp_path, plots):
    out = tmp_path / "run"
    train = {"max_steps": 30, "save_interval": 10, "keep_last": 2, "tie_embeddings": True}
    run_training(arguments(corpus, out, train=train))
    assert folders(out) == {"step-00000010", "step-00000020", "final"}
    rows = rows_of(out)
    assert [int(row["step"]) for row in rows] == list(range(1, 31))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.5
    assert int(rows[-1]["tokens"]) == 30 * 8 * 32
    assert [row["step"] for row in rows if row["val_loss"]] == ["5", "10", "15", "20", "25", "30"]
    last = rows[-1]
    assert float(last["val_ppl"]) == pytest.approx(math.exp(float(last["val_loss"])))
    assert 0 < float(last["val_bpb"]) < 8 and float(last["tokens_per_sec"]) > 0 and float(last["peak_memory_gb"]) > 0
    final = out / "final"
    assert {"lit_model.pth", "model_config.yaml", "hyperparameters.yaml", "tokenizer.json", "trainer", "COMPLETE"} <= {
        path.name for path in final.iterdir()
    }
    assert yaml.safe_load((final / "hyperparameters.yaml").read_text())["train"]["max_steps"] == 30
    assert yaml.safe_load((final / "model_config.yaml").read_text())["tie_embeddings"] is True
    assert (out / "loss.png").stat().st_size > 1000


def test_model_larger_than_memory_is_an_error_before_initialization(corpus, tmp_path):
    options = arguments(corpus, tmp_path / "run", model_config=ModelOverrides(n_embd=1_000_000))
    with pytest.raises(UserError, match=r"needs about [\d,.]+ GB \(optimizer .*, weights .*use a smaller model"):
        run_training(options)
    assert not (tmp_path / "run").exists()


def test_n3_repeated_run_is_bit_equal_and_other_micro_batches_agree(corpus, tmp_path):
    for name, micro in (("a", 4), ("b", 4), ("c", 1)):
        run_training(arguments(corpus, tmp_path / name, train={"micro_batch_size": micro, "max_steps": 6}))
    assert_same_weights(tmp_path / "a" / "final", tmp_path / "b" / "final")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "c") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


@pytest.fixture(scope="module")
def few_texts(corpus, tmp_path_factory) -> Path:
    """Four files of the corpus: a short epoch."""
    folder = tmp_path_factory.mktemp("few-texts")
    for file in sorted(corpus.iterdir())[:4]:
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("SGD", marks=pytest.mark.slow)])
def test_s2_resumed_run_is_bit_equal_across_an_epoch_end(few_texts, tmp_path, optimizer):
    corpus = few_texts
    options = {"optimizer": OptimizerArgs(name=optimizer, options={"momentum": 0.9} if optimizer == "SGD" else {})}
    length = {"max_seq_length": 63}  # half as many rows as the other tests have, so that an epoch is short
    n_rows = len(TextFiles(train_data_path=str(corpus), vocab_size=300).prepare(tokenizer=None, **length).train)
    steps = n_rows // 8 + 6  # the second epoch begins in the middle of a batch
    assert n_rows % 8
    run_training(arguments(corpus, tmp_path / "uninterrupted", train={"max_steps": steps, **length}, **options))
    # Remove everything after a checkpoint, as if the run had been killed there: right before the end of the epoch, and
    # long before.
    train = {"max_steps": steps, "save_interval": 5, "keep_last": 0, **length}
    part = arguments(corpus, tmp_path / "parts", train=train, **options)
    run_training(part)
    assert n_rows // 8 // 5 * 5 > 5
    for kept in (n_rows // 8 // 5 * 5, 5):
        shutil.rmtree(tmp_path / "parts" / "final")
        for folder in folders(tmp_path / "parts"):
            if int(folder.split("-")[1]) > kept:
                shutil.rmtree(tmp_path / "parts" / folder)
        run_training(replace(part, resume="auto"))
        assert_same_weights(tmp_path / "uninterrupted" / "final", tmp_path / "parts" / "final")
        assert losses(tmp_path / "parts") == losses(tmp_path / "uninterrupted")


def flags_for(corpus: Path, out: Path, **train) -> list[str]:
    train = {"global_batch_size": 8, "micro_batch_size": 4, "max_seq_length": 32, "max_steps": 400} | train
    flags = [*text_data(corpus), "--out_dir", str(out), "--resume", "auto", "--eval.interval", "0"]
    return flags + [part for name, value in train.items() for part in (f"--train.{name}", str(value))]


@pytest.mark.slow
def test_s2_run_after_two_sigkills_around_an_epoch_end_is_bit_equal(corpus, tmp_path):
    train = {"max_steps": 160, "save_interval": 20, "keep_last": 2}
    uninterrupted = pretrain(*flags_for(corpus, tmp_path / "uninterrupted", **train))
    _, errors = uninterrupted.communicate()
    assert uninterrupted.returncode == 0, errors
    n_rows = len(prepared(corpus).train)
    assert 20 < n_rows / 8 < 100  # an epoch ends between the two kills
    for step in (20, 100):
        process = pretrain(*flags_for(corpus, tmp_path / "killed", **train))
        read_until(process, f"step-{step:08d}")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = pretrain(*flags_for(corpus, tmp_path / "killed", **train))
    out, err = last.communicate()
    assert last.returncode == 0, err
    assert "resuming from" in out
    assert_same_weights(tmp_path / "uninterrupted" / "final", tmp_path / "killed" / "final")
    assert losses(tmp_path / "killed") == losses(tmp_path / "uninterrupted")
    assert json.loads((tmp_path / "killed/final/trainer/meta.json").read_text())["step"] == 160


# tests/distributed/test_failures.py covers SIGTERM, SIGINT and SIGUSR1 with two ranks
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGHUP,
    ],
)
def test_s3_signal_saves_and_exits_with_its_number(corpus, tmp_path, number):
    out = tmp_path / "run"
    process = pretrain(*flags_for(corpus, out, max_steps=100_000, save_interval=0))
    read_until(process, "step 1")
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + number, stderr
    (name,) = folders(out)
    assert f"{name} is saved; resume with --resume auto" in stderr and "Traceback" not in stderr
    rows = rows_of(out)
    assert int(rows[-1]["step"]) == int(name.split("-")[1])
    process = pretrain(*flags_for(corpus, out, max_steps=int(rows[-1]["step"]) + 2, save_interval=0))
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "final" in folders(out)


def test_s3_signal_during_the_last_save_does_not_interrupt_it(corpus, tmp_path, monkeypatch):
    def save(run, name):
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(run, name)

    original = Run.save
    monkeypatch.setattr(Run, "save", save)
    run_training(arguments(corpus, tmp_path / "run", train={"save_interval": 0}))
    assert folders(tmp_path / "run") == {"final"}


def test_s3_signal_during_a_step_that_is_saved_saves_it_once(corpus, tmp_path, monkeypatch, capsys):
    def save(run, name):
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(run, name)

    original = Run.save
    monkeypatch.setattr(Run, "save", save)
    with pytest.raises(StoppedBySignalError, match="step-00000002 is saved; resume"):
        run_training(arguments(corpus, tmp_path / "run", train={"save_interval": 2}))
    assert capsys.readouterr().out.count("saved") == 1


def test_s1_full_disk_is_one_line_and_the_previous_checkpoint_survives(corpus, small_disk):
    out = small_disk("3m") / "run"
    process = pretrain(*flags_for(corpus, out, max_steps=100, save_interval=5, keep_last=0))
    stdout, stderr = process.communicate()
    assert process.returncode == 2, stderr
    assert len(stderr.strip().splitlines()) == 1 and ("disk" in stderr or "space" in stderr)
    kept = folders(out)
    assert kept and "final" not in kept
    for name in kept:
        load_weights(out / name)
    assert not [path for path in out.iterdir() if path.name.startswith(".tmp-")]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A finished run, to be read only."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run_training(arguments(corpus, out))
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"global_batch_size": 16}}, "--train.global_batch_size 16"),
        ({"seed": 1}, "--seed 1"),
        ({"precision": "bf16-mixed"}, "--precision bf16-mixed"),
        ({"train": {"max_seq_length": 16}}, "--data"),
        ({"model_config": ModelOverrides(n_layer=3)}, "--model_config.n_layer 3"),
    ],
)
def test_resume_of_a_different_run_is_an_error(corpus, finished, change, message):
    before = sorted(path.stat().st_mtime_ns for path in finished.parent.rglob("*"))
    change = dict(change, train={"max_steps": 20} | change.get("train", {}))
    with pytest.raises(UserError, match=message):
        run_training(arguments(corpus, finished, resume=True, **change))
    assert sorted(path.stat().st_mtime_ns for path in finished.parent.rglob("*")) == before


def test_lost_and_changed_rows_of_metrics_are_said_on_resume(corpus, tmp_path, capsys):
    run_training(arguments(corpus, tmp_path, train={"max_steps": 6}))
    path = tmp_path / "logs" / "metrics.csv"

    def flip(lines: list[bytes], at: int, bit: int) -> list[bytes]:
        return [*lines[:2], lines[2][:at] + bytes([lines[2][at] ^ bit]) + lines[2][at + 1 :], *lines[3:]]

    for max_steps, change, message in (
        (7, lambda lines: lines, None),
        (8, lambda lines: flip(lines, lines[2].index(b".") + 1, 1), "some of the 7 rows to step 7 are"),  # a digit
        (9, lambda lines: lines, None),
        (10, lambda lines: flip(lines, 0, 64)[:6], "5 of the 9 rows to step 9 are lost or damaged"),
        (11, None, "10 of the 10 rows to step 10 are lost or damaged"),
    ):
        if change is None:
            path.unlink()
        else:
            path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
        capsys.readouterr()
        run_training(arguments(corpus, tmp_path, train={"max_steps": max_steps}, resume="auto"))
        output = capsys.readouterr().out
        assert message in output if message else "damaged" not in output, output


@pytest.mark.slow
def test_run_that_was_killed_after_its_last_step_leaves_what_an_uninterrupted_one_does(corpus, tmp_path, plots):
    run_training(arguments(corpus, tmp_path, train={"max_steps": 6, "save_interval": 6}))
    final, states = tmp_path / "final", []
    for _ in range(2):
        states.append(load_state(final / "trainer" / "state.pth")["optimizer"]["param_groups"])
        shutil.move(final, tmp_path / "step-00000006")
        (tmp_path / temporary_path(tmp_path / "loss.png").name.replace(f"-{os.getpid()}-", "-4194305-")).touch()
        run_training(arguments(corpus, tmp_path, train={"max_steps": 6, "save_interval": 6}, resume="auto"))
    assert str(states[0]) == str(states[1]) and "lr" in str(states[0])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
    leftover = tmp_path / temporary_path(tmp_path / "loss.png").name.replace(f"-{os.getpid()}-", "-4194305-")
    plot = tmp_path / "loss.png"
    for killed_before_it_was_drawn in (plot.unlink, lambda: os.utime(plot, (1, 1))):  # the last one: of a shorter run
        leftover.touch()
        (tmp_path / "report.html").unlink()
        killed_before_it_was_drawn()
        run_training(arguments(corpus, tmp_path, train={"max_steps": 6, "save_interval": 6}, resume="auto"))
        assert plot.stat().st_mtime > 1 and (tmp_path / "report.html").exists() and not leftover.exists()


def test_resume_of_a_finished_run_and_of_an_extended_run(corpus, tmp_path, capsys):
    run_training(arguments(corpus, tmp_path / "run"))
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))
    run_training(arguments(corpus, tmp_path / "run", resume="auto"))
    assert "nothing to do" in capsys.readouterr().out
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")) == before
    run_training(arguments(corpus, tmp_path / "run", resume="auto", train={"max_steps": 15}))
    assert "total_steps 12 -> 15" in capsys.readouterr().out
    assert [int(row["step"]) for row in rows_of(tmp_path / "run")] == list(range(1, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"global_batch_size": 10}}, "--train.global_batch_size 10"),
        ({"train": {"max_seq_length": 4096}}, "--train.max_seq_length 4096"),
        ({"train": {"global_batch_size": 4096}}, "--train.global_batch_size 4096"),
        ({"model_name": "pico-lama"}, "pico-llama"),
        ({"accelerator": "cuda"}, "--accelerator cuda"),
        ({"precision": "16-mixed"}, "--precision 16-mixed"),
        ({"resume": True}, "--resume"),
        ({"seed": -1}, "--seed -1"),
        ({"log": LogArgs(run="x")}, "--log.run"),
        ({"initial_checkpoint_dir": "some"}, "model_name pico-llama"),
        ({"optimizer": OptimizerArgs(name="Adamw2")}, "--optimizer.name Adamw2"),
        ({"logger_name": "tensorbord"}, "tensorboard"),
        (
            {"train": {"max_steps": None}, "model_name": None, "model_config": ModelOverrides(name="mine")},
            "--train.max_tokens: the run has no limit",
        ),
        ({"tokenizer_dir": "missing"}, "--tokenizer_dir missing"),
        ({"model_config": ModelOverrides(vocab_size=100)}, "vocab"),
        ({"model_config": ModelOverrides(family="bert")}, "bert"),
    ],
)
def test_user_errors_are_found_before_anything_is_written(corpus, tmp_path, change, message):
    if change.get("accelerator") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(UserError, match=message) as error:
        args = arguments(corpus, tmp_path / "run", **change)
        check_options(args), check_start(args)  # as the commands do
        run_training(args)
    assert "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_a_named_architecture_without_a_limit_trains_4_epochs_or_20_tokens_per_parameter(
    few_texts, tmp_path, capsys, monkeypatch
):
    n_rows = len(prepared(few_texts).train)
    train = {"max_steps": None, "global_batch_size": 64, "micro_batch_size": 64}
    args = arguments(few_texts, tmp_path / "epochs", train=train, evaluation={"interval": 0})
    run_training(args)
    tokens = 4 * 32 * n_rows
    assert f"\nLength: {tokens:,} tokens, 4 epochs: " in capsys.readouterr().out
    rows = rows_of(tmp_path / "epochs")
    assert int(rows[-1]["step"]) == math.ceil(tokens / (64 * 32))
    assert float(rows[-1]["learning_rate"]) == pytest.approx(3e-4, rel=0.1)  # the schedule ends with it
    saved = yaml.safe_load((tmp_path / "epochs/final/hyperparameters.yaml").read_text())["train"]
    assert (saved["max_tokens"], saved["epochs"], saved["max_steps"]) == (tokens, None, None)
    run_training(replace(args, resume="auto"))
    assert "nothing to do" in capsys.readouterr().out

    monkeypatch.setattr(resolve, "matmul_parameters", lambda model: 8)
    run_training(replace(args, out_dir=str(tmp_path / "parameters")))
    assert "\nLength: 160 tokens, " in capsys.readouterr().out
    assert [row["tokens"] for row in rows_of(tmp_path / "parameters")] == ["2048"]


@pytest.mark.slow
def test_s2_extended_epochs_continue_with_the_next_sample(few_texts, tmp_path, monkeypatch):
    """The last batch of an epoch-limited run is short; the samples missing from it must not be lost."""
    corpus, seen = few_texts, []

    def watch(*args, **options):
        for batches in train_batches(*args, **options):
            seen.extend(row for batch in batches for row in batch.ids if row >= 0)
            yield batches

    monkeypatch.setattr(data_reader, "train_batches", watch)
    n_rows = len(prepared(corpus).train)
    assert n_rows % 8
    for epochs in (1, 2):
        train = {"max_steps": None, "epochs": epochs}
        run_training(arguments(corpus, tmp_path / "run", train=train, resume="auto"))
        assert len(seen) == epochs * n_rows and set(seen) == set(range(n_rows))


def test_limit_lowered_to_the_current_step_still_writes_final(corpus, tmp_path):
    run_training(arguments(corpus, tmp_path / "run", train={"save_interval": 5}))
    shutil.rmtree(tmp_path / "run" / "final")
    run_training(arguments(corpus, tmp_path / "run", train={"max_steps": 10}, resume="auto"))
    assert "final" in folders(tmp_path / "run")
    assert_same_weights(tmp_path / "run" / "final", tmp_path / "run" / "step-00000010")


@pytest.mark.parametrize("options", [{"name": "SGD"}, {"weight_decay": 0.0}, {"betas": (0.5, 0.6)}])
def test_s2_resume_with_another_optimizer_is_an_error(corpus, finished, options):
    with pytest.raises(UserError, match="--optimizer"):
        again = arguments(corpus, finished, resume=True, train={"max_steps": 20})
        run_training(replace(again, optimizer=OptimizerArgs(**options)))


@pytest.mark.slow
def test_n7_grad_scaler_skips_counts_and_resumes(corpus, tmp_path, monkeypatch, capsys):
    """The 16-mixed code path with a CPU scaler; its initial scale is far too large."""

    def build(*args, **options):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        return Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))

    monkeypatch.setattr(resolve, "pick_precision", lambda *given: "16-mixed")
    monkeypatch.setattr(launch, "build_fabric", build)
    train = {"max_steps": 45, "save_interval": 35, "keep_last": 0}
    run_training(arguments(corpus, tmp_path / "run", train=train))
    assert "steps (GradScaler)" in capsys.readouterr().out
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.5
    shutil.move(tmp_path / "run" / "final", tmp_path / "uninterrupted")
    run_training(arguments(corpus, tmp_path / "run", train=train, resume="auto"))
    assert_same_weights(tmp_path / "run" / "final", tmp_path / "uninterrupted")


def test_empty_out_dir_is_an_error(corpus):
    with pytest.raises(UserError, match="--out_dir ''"):
        check_options(replace(arguments(corpus, Path("unused")), out_dir=""))


def test_two_processes_do_not_share_an_out_dir(corpus, tmp_path):
    with exclusive_lock(tmp_path / "run"), pytest.raises(UserError, match="--out_dir .*: process .* is running there"):
        run_training(arguments(corpus, tmp_path / "run", resume="auto"))


def test_used_out_dir_is_never_overwritten(corpus, finished):
    with pytest.raises(UserError, match="--out_dir"):
        run_training(arguments(corpus, finished))


def test_n7_diverged_run_stops_and_its_weights_are_not_saved(corpus, tmp_path):
    train = {"learning_rate": 1e30, "max_norm": 0, "lr_warmup_steps": 0, "save_interval": 1, "max_steps": 50}
    with pytest.raises(GuardError, match="step-00000001 was not saved: NaN, Inf or too large numbers in .*weight"):
        run_training(arguments(corpus, tmp_path / "run", train=train))
    assert not folders(tmp_path / "run")  # test_resume_checkpoint.py has a case with earlier checkpoints


def test_n7_nonfinite_validation_loss_saves_no_checkpoint(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "validate", lambda *_: {"val_loss": math.nan})
    with pytest.raises(GuardError, match="the validation loss after step 12 is nan"):
        run_training(arguments(corpus, tmp_path / "run", train={"save_interval": 0}, evaluation={"interval": 0}))
    assert folders(tmp_path / "run") == set()


@pytest.mark.parametrize("limit", [{"max_tokens": 5 * 256 + 1}, {"epochs": 0.1}, {"max_time": 0.0001}])
def test_every_limit_ends_a_run(corpus, tmp_path, limit):
    train = {"max_steps": None, "lr_schedule": "constant", "lr_warmup_steps": 0} | limit
    run_training(arguments(corpus, tmp_path / "run", train=train))
    assert "final" in folders(tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    if "max_tokens" in limit:
        assert int(rows[-1]["step"]) == 6
    if "max_time" in limit:
        assert int(rows[-1]["step"]) <= 2


@pytest.mark.slow
def test_save_every_minutes_and_log_interval(corpus, tmp_path):
    train = {"save_every_minutes": 1e-9, "save_interval": 0, "keep_last": 0, "log_interval": 4}
    run_training(
        arguments(corpus, tmp_path / "run", train=train, evaluation={"interval": 0, "final_validation": False})
    )
    assert len(folders(tmp_path / "run")) == 12  # every step except the last, and final
    assert [row["step"] for row in rows_of(tmp_path / "run")] == ["4", "8", "12"]


@pytest.mark.slow
def test_initial_checkpoint_dir_starts_from_its_weights(corpus, tmp_path):
    run_training(arguments(corpus, tmp_path / "first", train={"max_steps": 30}))
    first = str(tmp_path / "first" / "final")
    run_training(arguments(corpus, tmp_path / "second", model_name=None, initial_checkpoint_dir=first))
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_low_precision_learns(corpus, tmp_path, precision):
    run_training(arguments(corpus, tmp_path / "run", precision=precision, train={"max_steps": 20}))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.3
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {t.dtype for t in load_weights(tmp_path / "run" / "final").values()} == {dtype}


@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_out_dir_of_a_running_process_is_an_error_before_reading(corpus, tmp_path, resume):
    out = tmp_path / "run"
    with exclusive_lock(out), pytest.raises(UserError, match="is running there"):
        run_training(arguments(corpus, out, resume=resume))


@pytest.mark.slow
def test_s2_checkpoint_before_the_first_step_is_step_zero(corpus, tmp_path, monkeypatch):
    """A signal during the initial validation; torch's state functions would run an optimizer step there."""

    def validate_with_signal(run):
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    run_training(arguments(corpus, tmp_path / "uninterrupted", evaluation={"initial_validation": True}))
    with monkeypatch.context() as patch, restore_handlers_on_exit(), pytest.raises(StoppedBySignalError):
        patch.setattr(Run, "validate", validate_with_signal)
        run_training(arguments(corpus, tmp_path / "parts", evaluation={"initial_validation": True}))
    assert folders(tmp_path / "parts") == {"step-00000000"}
    run_training(arguments(corpus, tmp_path / "parts", resume="auto"))
    assert_same_weights(tmp_path / "uninterrupted" / "final", tmp_path / "parts" / "final")


def test_different_options_or_code_per_node_are_an_error(corpus, tmp_path, monkeypatch):
    def mixture(weight, **options):
        text = {"class_path": "TextFiles", "init_args": {"train_data_path": str(corpus)} | options}
        return Mixture({"a": {"weight": weight, "data": text}, "b": {"weight": 1 - weight, "data": text}})

    args = replace(arguments(corpus, tmp_path), data=mixture(0.5), callbacks="mine.C")
    fingerprint = RunFingerprint({}, "data", 8, 42, "32-true", {})
    gathered = []

    def gather(values):
        gathered.append(values)
        return gathered

    def check(message, args=args, fingerprint=fingerprint):
        del gathered[1:]
        with pytest.raises(UserError, match=f"^{message}"):
            rank_consistency.require_same_options(args, fingerprint)

    monkeypatch.setattr(rank_consistency.ranks, "all_gather_object", gather)
    rank_consistency.require_same_options(args, fingerprint)
    elsewhere = mixture(0.5, train_data_path="elsewhere")
    rank_consistency.require_same_options(
        replace(args, data=elsewhere, out_dir="out", logger_name="wandb"), fingerprint
    )
    for message, change in {
        "--eval.interval 7: on rank 1, but .* on rank 0; start": {"eval": EvalArgs(interval=7)},
        "--strategy ddp: on rank 1, but .* on rank 0; auto depends on the memory": {"strategy": "ddp"},
        "--data.sources.a.weight 0.75: on rank 1, but 0.5 on rank 0; start": {"data": mixture(0.75)},
    }.items():
        check(message, replace(args, **change))
    check(
        "--model_config.rope_base 5000.0: on rank 1, but None on rank 0; start",
        fingerprint=replace(fingerprint, model_config={"rope_base": 5000.0}),
    )
    real = rank_consistency.hash_sources
    monkeypatch.setattr(rank_consistency, "hash_sources", lambda names: "0123" if names == ["mine"] else real(names))
    check("callback mine.C .sources 0123.: on rank 1, but .* on rank 0; use the same versions")
    monkeypatch.setattr(rank_consistency, "hash_sources", real)
    monkeypatch.setattr(rank_consistency, "extension_versions", lambda: {"lion": "0.2"})
    check("extension lion 0.2: on rank 1, but None on rank 0; use the same versions")
    monkeypatch.setattr(rank_consistency, "_own_version", lambda: "0123")
    check("toolkit 0123: on rank 1, but .* on rank 0; use the same versions")


@pytest.mark.parametrize(
    ("changes", "note"), [({}, None), ({"norm_qk": True}, "note: --model_config.norm_qk true: the")]
)
def test_note_before_training_if_the_model_has_no_hf_export(corpus, tmp_path, capsys, changes, note):
    options = {"train": {"max_steps": 1}, "model_config": ModelOverrides(**changes)}
    run_training(arguments(corpus, tmp_path / "run", **options))
    notes = [line for line in "".join(capsys.readouterr()).splitlines() if "note: --model" in line]
    assert len(notes) == (note is not None) and all(note in line for line in notes)


@pytest.mark.slow
def test_default_intervals_save_and_validate_during_the_run(corpus, tmp_path):
    train = {"max_steps": 24, "keep_last": 0}
    run_training(arguments(corpus, tmp_path / "run", train=train, evaluation={"max_iters": 1}))
    assert folders(tmp_path / "run") == {*(f"step-{step:08d}" for step in (5, 10, 15, 20)), "final"}
    assert [row["step"] for row in rows_of(tmp_path / "run") if row["val_loss"]] == ["5", "10", "15", "20", "24"]


def test_short_run_saves_and_logs_nothing(corpus, tmp_path):
    args = short_run_args(arguments(corpus, tmp_path / "run"), 1, str(tmp_path / "run"))
    start(*resolve_run(args), is_short=True)
    assert not list(tmp_path.rglob("*"))


def test_time_intervals(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "build_intervals", lambda *args: Intervals(None, 1e-9, None, 1e-9))
    monkeypatch.setattr(engine, "N_VALIDATIONS", 0)  # their own time does not delay the next
    train = {"max_steps": 3, "keep_last": 0}
    run_training(arguments(corpus, tmp_path / "run", train=train, evaluation={"max_iters": 1}))
    assert folders(tmp_path / "run") == {"step-00000001", "step-00000002", "final"}
    assert [row["step"] for row in rows_of(tmp_path / "run") if row["val_loss"]] == ["1", "2", "3"]


def test_resume_of_a_finished_run_with_a_lower_limit_is_an_error(corpus, tmp_path):
    run_training(arguments(corpus, tmp_path / "run", train={"max_steps": 8}))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for resume in ("auto", str(tmp_path / "run" / "step-00000005")):
        out = tmp_path / ("run" if resume == "auto" else "other")
        with pytest.raises(UserError, match="--train.max_steps 2: .* is past this limit, after [58] steps"):
            run_training(arguments(corpus, out, train={"max_steps": 2}, resume=resume))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
