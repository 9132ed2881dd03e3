"""A run on one process that is killed, signaled or loses its folder: what remains, and that it can restart."""

import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.compare_runs import assert_same_weights
from helpers.groups import read_until
from helpers.processes import PRETRAIN, ended, failing, finish, flags_for, folders, group_members, pretrain, start

from toolkit.distributed import restarts
from toolkit.distributed.signals import restore_handlers_on_exit


def wait_until(condition, seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_killed_run_restarts_at_once_and_its_workers_exit(corpus, tmp_path):
    """The workers are busy and do not poll whether their parent is alive."""
    process = pretrain(*failing(tmp_path, 0, "asleep"), "--data.num_workers", "2")
    assert wait_until(lambda: len(group_members(process)) == 3)
    process.kill()
    out, err = finish(pretrain(*flags_for(corpus, tmp_path, max_steps=1), "--data.num_workers", "2"))
    assert "finished after 1 step" in out, err
    assert wait_until(lambda: not group_members(process)), "workers outlived their parent"
    process.communicate()


@pytest.mark.parametrize("again", [signal.SIGUSR1, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_s3_signals_after_the_checkpoint_are_ignored(corpus, tmp_path, again):
    process = pretrain(*flags_for(corpus, tmp_path, save_interval=0))
    read_until(process, "step 1/")
    process.send_signal(signal.SIGTERM)
    read_until(process, "saved ")

    def repeat():
        while process.poll() is None:
            process.send_signal(again)
            time.sleep(0.005)

    threading.Thread(target=repeat).start()
    ended(process, 128 + signal.SIGTERM, "is saved; resume with --resume auto")


def test_out_dir_removed_during_the_run_is_an_error(corpus, tmp_path):
    out = tmp_path / "run"
    process = pretrain(*flags_for(corpus, out))
    read_until(process, "step 1/")
    while out.exists():
        shutil.rmtree(out, ignore_errors=True)
    os.kill(process.pid, signal.SIGTERM)
    ended(process, 2, f"--out_dir {out}: ", "was deleted")
    (kept,) = folders(out)  # the weights are not lost
    assert kept.startswith("step-")


@pytest.mark.parametrize(
    ("codes", "exit_code", "texts"),
    [
        ([-9, 0], 0, ["was killed by SIGKILL; restart 1 of 2"]),
        ([1, -11, 1], 1, ["failed with exit code 1; restart 1 of 2", "was killed by SIGSEGV; restart 2 of 2"]),
        ([-9, -9, -9], 137, ["restart 1 of 2", "restart 2 of 2"]),
        *(([code], code, []) for code in (0, 2, 3, 130, 143)),
    ],
)
def test_only_crashes_restart_a_command(codes, exit_code, texts, monkeypatch, capsys):
    commands = []

    def start(command, env):
        commands.append(list(command))
        return SimpleNamespace(wait=lambda: codes[len(commands) - 1], send_signal=None)

    monkeypatch.setattr(restarts.subprocess, "Popen", start)
    with restore_handlers_on_exit():
        assert restarts.supervise(["pretrain", "--max_restarts", "2", "--resume", "false"], 2) == exit_code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(texts) and all(map(str.__contains__, lines, texts)) and len(commands) == len(codes)
    once = ["-m", "toolkit", "pretrain", "--max_restarts", "2"]
    assert [c[1:] for c in commands] == [[*once, "--resume", "false"], *[[*once, "--resume", "auto"]] * len(texts)]


@pytest.mark.slow
def test_s2_command_restarts_after_a_killed_rank_and_ends_equal(corpus, tmp_path):
    """Not after SIGTERM."""

    def flags(folder):
        return [*flags_for(corpus, folder, max_steps=40, save_interval=4), "--devices", "2", "--max_restarts", "2"]

    process = start(*PRETRAIN, *flags(tmp_path / "killed"))
    read_until(process, "step-00000008")
    watched, last = group_members(process)[0], group_members(process)[-1]
    assert watched == process.pid
    os.kill(last, signal.SIGKILL)
    out, err = finish(process)
    assert process.returncode == 0, err
    assert "killed by SIGKILL" in err and "failed with exit code 1; restart 1 of 2" in err and "resum" in out, err
    process = start(*PRETRAIN, *flags(tmp_path / "undisturbed"))
    read_until(process, "step-00000008")
    process.send_signal(signal.SIGTERM)
    ended(process, 128 + signal.SIGTERM, "is saved; resume with --resume auto")
    end = pretrain(*flags(tmp_path / "undisturbed")[:-2])
    _, err = finish(end)
    assert end.returncode == 0, err
    assert_same_weights(tmp_path / "killed" / "final", tmp_path / "undisturbed" / "final")


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["1", "2"])
def test_command_that_restarts_saves_and_ends_if_its_watching_process_is_killed(corpus, tmp_path, devices):
    process = start(*PRETRAIN, *flags_for(corpus, tmp_path), "--devices", devices, "--max_restarts", "2")
    read_until(process, "step 1/")
    process.kill()
    assert wait_until(lambda: not group_members(process), 60)
    assert [name for name in folders(tmp_path) if name.startswith("step-")]
    process.communicate()
