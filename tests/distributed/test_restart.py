"""A run on one process that is killed, signaled or loses its folder: what remains, and that it can restart."""

import os
import shutil
import signal
import threading
import time

import pytest
from helpers.groups import read_until
from helpers.processes import ended, failing, finish, flags_for, folders, group_members, pretrain


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
