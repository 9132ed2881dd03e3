"""Runs with --out_dir on remote storage: resumed on a clean machine, errors in one line, local disk."""

import csv
import errno
import io
import os
import shutil
import signal
from pathlib import Path

import fsspec
import pytest
from helpers.compare_runs import assert_same_weights, rows_of
from helpers.groups import free_port, read_until
from helpers.processes import Forked, finish, flags_for, pretrain
from helpers.slow_writes import writes_that_last
from helpers.small_runs import write_base, write_rows

import toolkit
from tests.training.test_run import arguments
from toolkit import Callback
from toolkit.checkpoints.remote.uploader import Uploader
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import newest, write_model_folder
from toolkit.cli import main
from toolkit.distributed import ranks
from toolkit.errors import CallbackError, GuardError, UserError
from toolkit.io import storage
from toolkit.training.callbacks.upload import Upload
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.engine import Engine, run_training

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


class FailAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.progress.step == self.step:
            raise RuntimeError


def remote_names() -> set[str]:
    files = fsspec.filesystem("memory").find("/bucket/run")
    return {path.split("/")[3] for path in files if path.endswith("COMPLETE")}


def remote_losses() -> list[str]:
    content = fsspec.filesystem("memory").cat("/bucket/run/logs/metrics.csv").decode()
    return [row["loss"] for row in csv.DictReader(io.StringIO(content))]


def test_s2_run_resumed_on_a_clean_machine_is_bit_equal(corpus, tmp_path, capsys, refusal):
    train = {"max_steps": 12, "save_interval": 2, "keep_last": 2, "log_interval": 1}
    options = {"train": train, "evaluation": {"interval": 0, "final_validation": False}}
    run_training(arguments(corpus, tmp_path / "local", **options))
    args = arguments(corpus, URL, resume="auto", **options)
    with pytest.raises(CallbackError):
        run_training(args, [FailAt(7)])
    assert remote_names() == {"step-00000004", "step-00000006"}
    assert {path.name for path in args.run_dir.glob("step-*")} == {"step-00000006"}
    shutil.rmtree(args.run_dir)
    run_training(args)
    assert f"downloading {URL}/step-00000006" in capsys.readouterr().out
    assert_same_weights(tmp_path / "local" / "final", args.run_dir / "final")
    assert remote_losses() == [row["loss"] for row in rows_of(tmp_path / "local")]
    assert remote_names() == {"step-00000008", "step-00000010", "final"}
    assert {path.name for path in args.run_dir.iterdir()} - {"loss.png", "report.html"} == {
        ".lock", ".uploads", "final", "logs", "step-00000010"
    }  # fmt: skip

    shutil.rmtree(args.run_dir)
    assert toolkit.load(f"{URL}/final").config.n_layer > 0
    assert not (tmp_path / "cache" / "toolkit" / "models" / "final" / "trainer").exists()
    assert main(["verify", URL]) == 0
    assert capsys.readouterr().out.count(": intact, ") == 3
    fsspec.filesystem("memory").pipe("/bucket/run/step-00000008/lit_model.pth", b"")
    assert "1 of 3 not verified: step-00000008" in refusal("verify", URL)
    with pytest.raises(UserError, match=rf"{URL}: already used \(final exists\); --resume auto continues it"):
        run_training(arguments(corpus, URL))
    local_copy = resolve_resume(f"{URL}/step-00000010", tmp_path / "other")  # of another run
    assert read_meta(local_copy)["step"] == 10


def test_checkpoint_that_rank_0_completes_alone_is_uploaded(corpus, monkeypatch):
    """As where another rank has failed while the checkpoint was being written."""

    def finish_after_another_rank(self, **options):
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "world_size", lambda: 2)
            finish_save(self, **options)

    finish_save = Engine._finish_save
    monkeypatch.setattr(Engine, "_finish_save", finish_after_another_rank)
    train = {"max_steps": 9, "save_interval": 3, "async_save": True}
    args = arguments(corpus, URL, train=train, evaluation={"interval": 0, "final_validation": False})
    with writes_that_last(100), pytest.raises(CallbackError):
        run_training(args, [FailAt(4)])
    assert remote_names() == {"step-00000003"}


def test_failed_upload_ends_the_run_with_exit_3_and_the_next_launch_finishes_it(corpus, monkeypatch, capsys):
    args = arguments(corpus, URL, train={"max_steps": 4, "save_interval": 2}, resume="auto")
    with monkeypatch.context() as patch:
        patch.setattr(storage.Storage, "upload", fail_with(storage.StorageError("the storage is full")))
        with pytest.raises(
            GuardError, match="final could not be uploaded: the storage is full; it is complete in"
        ) as e:
            run_training(args)
    assert e.value.exit_code == 3 and remote_names() == set()
    shown = capsys.readouterr().out
    assert shown.count("warning: step-00000002 could not be uploaded") == 1
    run_training(args)
    assert "nothing to do" in capsys.readouterr().out and remote_names() == {"final"}


def fail_with(error):
    def fail(*args, **options):
        raise error

    return fail


def test_full_disk_of_the_staging_folder_is_one_line(corpus, monkeypatch):
    args = arguments(corpus, URL, train={"max_steps": 2, "save_interval": 2})
    monkeypatch.setattr(Uploader, "submit", fail_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UserError, match="No space left on device; free some space"):
        run_training(args)


def test_storage_that_cannot_be_used_is_refused_before_the_data_is_read(corpus, monkeypatch):
    args = arguments("no such folder", URL)
    memory = type(fsspec.filesystem("memory"))
    for name, error, expected in (
        (
            "pipe_file",
            PermissionError("secret"),
            f"--out_dir {URL}: access denied \\(PermissionError\\); check the key",
        ),
        ("rm_file", PermissionError("secret"), "access denied"),
        ("ls", PermissionError("secret"), "access denied"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(memory, name, fail_with(error))
            with pytest.raises(UserError, match=expected) as caught:
                run_training(args)
            assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_run_ends_at_the_next_checkpoint_if_another_has_taken_over(corpus, tmp_path):
    class TakeOver(Callback):
        def on_step_end(self, trainer, metrics) -> None:
            (upload,) = (callback for callback in trainer.callbacks if isinstance(callback, Upload))
            upload.uploader.lease.taken_by = "process 1 on node"

    args = arguments(corpus, URL, train={"max_steps": 8, "save_interval": 2})
    with pytest.raises(
        GuardError, match=f"{URL}: another run has started in it \\(process 1 on node\\); stopped after step 2"
    ):
        run_training(args, [TakeOver()])
    assert remote_names() == set() and newest(args.run_dir).name == "step-00000002"


@pytest.mark.slow
def test_adapters_on_a_remote_base_resume_on_a_clean_machine(corpus, tmp_path):
    """Of two ranks, which share one copy of the base; with a best checkpoint."""
    base, rows = tmp_path / "bucket" / "base", write_rows(tmp_path)
    write_model_folder(base, lambda folder: write_base(folder, corpus))
    words = ["finetune_lora", f"file://{base}", "--data", "JSON", "--data.json_path", str(rows), "--devices", "2"]
    words += ["--data.val_split_fraction", "0.2", "--train.max_seq_length", "128", "--accelerator", "cpu"]
    words += ["--train.max_steps", "12", "--train.save_interval", "4", "--data.prompt_style", "alpaca"]
    words += ["--eval.interval", "2", "--train.keep_best", "true"]
    words += ["--eval.max_new_tokens", "0", "--train.global_batch_size", "4", "--out_dir"]
    local = Forked([*words, str(tmp_path / "local")])
    _, err = finish(local)
    assert local.returncode == 0, err
    url = f"file://{tmp_path}/bucket/run"
    first = Forked([*words, url, "--staging_dir", str(tmp_path / "first")])
    read_until(first, "step-00000008")
    os.killpg(first.pid, signal.SIGKILL)
    finish(first)
    second = Forked([*words, url, "--staging_dir", str(tmp_path / "second"), "--resume", "auto"])
    out, err = finish(second)
    assert second.returncode == 0 and "downloading" in out, err
    for name in ("best", "final"):
        assert_same_weights(tmp_path / "local" / name, tmp_path / "bucket" / "run" / name)
    assert main(["generate", f"{url}/final", "--prompt", "token"]) == 0


@pytest.mark.slow
def test_s2_every_node_downloads_to_its_own_staging_folder(corpus, tmp_path):
    """Two nodes without a shared disk but for the data; killed, and resumed on clean machines."""

    def start(out_dir: Path | str, name: str = "") -> list:
        where, processes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, []
        for node in "01":
            words = [*flags_for(corpus, out_dir, max_steps=12, save_interval=2), "--devices", "1", "--num_nodes", "2"]
            words += ["--staging_dir", str(tmp_path / f"{name}-{node}")] if name else []
            processes.append(pretrain(*words, **where, NODE_RANK=node))
        return processes

    for process in start(tmp_path / "local"):
        finish(process)
    url = f"file://{tmp_path}/bucket/run"
    first = start(url, "first")
    read_until(first[0], "step-00000006")
    for process in first:
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
    second = start(url, "second")
    outputs = [finish(process) for process in second]
    assert [process.returncode for process in second] == [0, 0], outputs
    assert "downloading" in outputs[0][0] and "[rank 1] downloading" in outputs[1][0]
    assert_same_weights(tmp_path / "local" / "final", tmp_path / "bucket" / "run" / "final")
