"""S1, and what --resume finds."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.saving import write_checkpoint

from toolkit.checkpoints import store
from toolkit.checkpoints.lock import exclusive_lock
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import is_complete, newest, newest_first, prune, require_new_folder, write_folder
from toolkit.checkpoints.weights import save_state
from toolkit.errors import UserError
from toolkit.io import atomic


def make(folder: Path, step: int | None = None, content: str = "w") -> Path:
    """A complete checkpoint with one small file instead of weights."""

    def write(tmp: Path) -> None:
        (tmp / "lit_model.pth").write_text(content)
        if step is not None:
            (tmp / "trainer").mkdir()
            (tmp / "trainer" / "meta.json").write_text(json.dumps({"step": step}))

    write_checkpoint(folder, write)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# Writes step-1, step-2, ... and final, each with a payload that shows completeness; prints each finished step.
WRITER = """
import sys, json
from pathlib import Path
from toolkit.checkpoints.store import begin_checkpoint, commit_checkpoint, prune
out = Path(sys.argv[1])
def write(step):
    def fill(tmp):
        (tmp / "lit_model.pth").write_text(f"{step} " * 20000)
        (tmp / "trainer").mkdir()
        (tmp / "trainer" / "meta.json").write_text(json.dumps({"step": step}))
    return fill
def write_checkpoint(folder, write):
    tmp = begin_checkpoint(folder)
    write(tmp)
    commit_checkpoint(tmp, folder, {})
step = int(sys.argv[2])
while True:
    step += 1
    write_checkpoint(out / f"step-{step:08d}", write(step))
    prune(out, 2)
    write_checkpoint(out / "final", write(step))
    print(step, flush=True)
"""


@pytest.mark.parametrize("rounds", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_s1_a_kill_at_any_instant_leaves_the_last_checkpoint_loadable(tmp_path, rounds):
    out, last = tmp_path / "run", 0
    for i in range(rounds):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, out, str(last)], stdout=subprocess.PIPE, text=True)
        last = int(writer.stdout.readline())  # imports are done and one round of checkpoints is written
        time.sleep(0.036 / rounds * i)
        os.kill(writer.pid, signal.SIGKILL)
        last = max([last, *map(int, writer.stdout.read().split())])
        writer.wait()
        writer.stdout.close()
        found = resolve_resume("auto", out)
        step = store.step_of(found)
        assert step in (last, last + 1), f"round {i}: {found} after step {last}"
        assert (found / "lit_model.pth").read_text() == f"{step} " * 20000
        for folder in newest_first(out):
            assert (folder / "lit_model.pth").read_text() == f"{store.step_of(folder)} " * 20000
        last = store.step_of(found)
    make(out / "step-99999999")
    assert not [name for name in names(out) if name.startswith(".")], "the next save removes leftovers"


@pytest.mark.parametrize(("killed_before_rename", "survivor"), [(1, "old"), (2, "old"), (3, "new")])
def test_s1_replacement_always_leaves_a_checkpoint(tmp_path, killed_before_rename, survivor):
    make(tmp_path / "final", content="old")
    child = os.fork()
    if child == 0:  # renames: old folder to .old-, new folder in place, old folder to .tmp-
        rename, calls = os.rename, []

        def dying_rename(a, b):
            calls.append(b)
            if len(calls) == killed_before_rename:
                os._exit(9)
            rename(a, b)

        os.rename = dying_rename
        make(tmp_path / "final", content="new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    found = resolve_resume("auto", tmp_path)
    assert (found / "lit_model.pth").read_text() == survivor
    with pytest.raises(UserError, match="already used"):
        resolve_resume(False, tmp_path)
    make(tmp_path / "step-1")
    assert names(tmp_path) == ["final", "step-1"], "put back, or deleted, at the next save"
    assert (tmp_path / "final" / "lit_model.pth").read_text() == survivor


def test_s1_failed_replacement_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    make(tmp_path / "final", content="old")
    rename = os.rename

    def full_disk_for_new_names(a, b):
        if b == tmp_path / "final" and ".tmp-" in str(a):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(a, b)

    monkeypatch.setattr(os, "rename", full_disk_for_new_names)
    with pytest.raises(UserError, match="No space left on device"):
        make(tmp_path / "final", content="new")
    disk = SimpleNamespace(f_bavail=10, f_frsize=4096, f_files=100, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    with pytest.raises(UserError, match=r"with no inodes free: delete files, whatever their size; final \("):
        make(tmp_path / "final", content="new")
    assert names(tmp_path) == ["final"]
    assert (tmp_path / "final" / "lit_model.pth").read_text() == "old"


def test_s1_failing_disk_is_one_line_and_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    make(tmp_path / "final", content="old")

    def failing(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(UserError, match="--out_dir .*: Input/output error while writing final; check the disk"):
        make(tmp_path / "final", content="new")
    assert names(tmp_path) == ["final"]
    assert (tmp_path / "final" / "lit_model.pth").read_text() == "old"


def test_s1_manifest_is_synced_last(tmp_path, monkeypatch):
    synced, order = store.sync, []

    def spy(path):
        order.append((path.name, (path / "COMPLETE").exists() or (path.parent / "COMPLETE").exists()))
        synced(path)

    for module in (store, atomic):
        monkeypatch.setattr(module, "sync", spy)
    make(tmp_path / "step-1", step=1)
    before = [name for name, marked in order if not marked]
    assert {"lit_model.pth", "meta.json", "trainer"} <= set(before)
    assert "COMPLETE" in [name for name, marked in order if marked]
    assert order[-1][0] == tmp_path.name, "the folder that got the new name is synced last"


def test_s1_write_error_leaves_no_files(tmp_path):
    make(tmp_path / "step-1")

    def fill(tmp):
        (tmp / "lit_model.pth").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "step-2", fill)
    assert names(tmp_path) == ["step-1"]


def check_full_disk(out: Path, size: int) -> None:
    """Write checkpoints that fit until one does not; three ways of writing."""
    state = {"a": torch.zeros(size // 4)}

    def by_torch_to_a_path(tmp):
        torch.save(state, tmp / "lit_model.pth")

    def by_us(tmp):
        save_state(state, tmp / "lit_model.pth")

    def plain(tmp):
        (tmp / "lit_model.pth").write_bytes(bytes(size))

    make(out / "step-1", content="kept" * 100)
    for fill in (by_torch_to_a_path, by_us, plain):
        with pytest.raises(UserError) as error:
            write_checkpoint(out / "step-2", fill)
        message = str(error.value)
        assert "\n" not in message
        assert re.search(
            r"--out_dir .*(No space left|File too large).* bytes free; step-1 \(\d+ bytes\) is kept", message
        )
        assert names(out) == ["step-1"]
        assert resolve_resume("auto", out) == out / "step-1"


def test_s1_full_disk_is_one_line_and_keeps_the_previous_checkpoint(small_disk):
    check_full_disk(small_disk("1m") / "run", size=2_000_000)


def test_s1_limit_on_file_sizes_is_one_line_and_keeps_the_previous_checkpoint(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        check_full_disk(tmp_path / "run", size=2_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_other_write_errors_are_not_reported_as_full_disk(tmp_path):
    def fill(tmp):
        raise UserError("the user's own") from RuntimeError("PytorchStreamWriter")

    with pytest.raises(UserError, match="^the user's own$"):
        write_folder(tmp_path / "x", fill, flag="out_dir")


def test_uncreatable_out_dir_is_a_one_line_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out_dir .*file/run: Not a directory; choose another"):
        make(tmp_path / "file" / "run" / "step-1")


def test_require_new_folder(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    require_new_folder(tmp_path / "empty")
    for out_dir, message in ((tmp_path / "file", "is a file"), (tmp_path, "already exists and is not empty")):
        with pytest.raises(UserError, match=f"^out_dir {out_dir}: {message}; give a new folder$"):
            require_new_folder(out_dir)


@pytest.mark.parametrize("name", ["/proc/x", "/proc/x/y", "/dev/null/x", "n" * 250, "n" * 300, "n" * 300 + "/x"])
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_uncreatable_folder_names_the_reason(tmp_path, name):
    folder = tmp_path / name
    with pytest.raises(UserError, match="^out_dir .*; choose another folder"):
        require_new_folder(folder)
        write_folder(folder, lambda tmp: None, flag="out_dir")
    assert not list(tmp_path.iterdir())


def test_s1_prune_keeps_the_last_and_touches_nothing_else(tmp_path, monkeypatch):
    for step in (5, 10, 100, 20):
        make(tmp_path / f"step-{step:06d}")
    make(tmp_path / "final")
    (tmp_path / "step-000001").mkdir()  # incomplete: not deleted
    prune(tmp_path, 0)
    assert len(names(tmp_path)) == 6
    removed = []
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda p, **k: (removed.append(Path(p).name), rmtree(p, **k)))
    prune(tmp_path, 2)
    assert names(tmp_path) == ["final", "step-000001", "step-000020", "step-000100"]
    assert all(name.startswith(".tmp-") for name in removed), "out of sight before it is deleted"
    assert [re.search(r"step-(\d+)", name)[1] for name in removed] == ["000005", "000010"], "the oldest goes first"


def test_newest_sorts_by_step_then_name(tmp_path):
    assert newest(tmp_path / "nothing") is None
    make(tmp_path / "final", step=30)
    make(tmp_path / "step-20", step=20)
    assert newest(tmp_path).name == "final"
    make(tmp_path / "step-000030", step=30)
    assert newest(tmp_path).name == "final"
    make(tmp_path / "step-40")
    assert newest(tmp_path).name == "step-40"


@pytest.fixture
def run_dir(tmp_path) -> Path:
    out = tmp_path / "run"
    make(out / "step-10", step=10)
    make(out / "step-20", step=20)
    (out / "step-30").mkdir()
    (out / "step-30" / "lit_model.pth").write_text("LitGPT's, or cut short")
    (out / "logs").mkdir()
    (out / "logs" / "metrics.csv").write_text("step\n")
    return out


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        ("auto", "step-20"),
        (True, "step-20"),
        ("{out}", "step-20"),
        ("{out}/step-20", "step-20"),
        ("{out}/step-20/lit_model.pth", "step-20"),
    ],
)
def test_resume_finds(run_dir, resume, expected):
    resume = resume.format(out=run_dir) if isinstance(resume, str) else resume
    assert resolve_resume(resume, run_dir) == run_dir / expected


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (
            False,
            r"--out_dir .*run: already used \(step-\d+ exists\); --resume auto continues it, another --out_dir",
        ),
        ("{out}/step-30", "--resume .*step-30: has no file COMPLETE.*--initial_checkpoint_dir"),
        ("{out}/step-30/lit_model.pth", "has no file COMPLETE"),
        ("{out}/step-10", "--resume .*step-10: .*step-20 is newer; .* another --out_dir"),
        ("{out}/step-99", "--resume .*step-99: no such folder or file"),
        ("{out}/logs", "--resume .*logs: holds no complete checkpoint"),
        ("{out}/logs/metrics.csv", "not a checkpoint; give a checkpoint folder or the lit_model.pth"),
    ],
)
def test_resume_refuses(run_dir, resume, message):
    resume = resume.format(out=run_dir) if isinstance(resume, str) else resume
    with pytest.raises(UserError, match=message) as error:
        resolve_resume(resume, run_dir)
    assert "\n" not in str(error.value)


def test_resume_with_a_new_out_dir(run_dir, tmp_path):
    fresh = tmp_path / "fresh"
    assert resolve_resume(False, fresh) is None
    assert resolve_resume("auto", fresh) is None
    with pytest.raises(UserError, match=r"--resume true: no complete checkpoint in --out_dir .*; --resume auto"):
        resolve_resume(True, fresh)
    assert resolve_resume(str(run_dir), fresh) == run_dir / "step-20"
    assert resolve_resume(str(run_dir / "step-10"), fresh) == run_dir / "step-10"
    (fresh / "logs").mkdir(parents=True)
    (fresh / "logs" / "metrics.csv").write_text("step\n")  # killed before its first checkpoint
    assert resolve_resume("auto", fresh) is None
    with pytest.raises(UserError, match=r"already used \(logs/metrics.csv exists\)"):
        resolve_resume(False, fresh)
    with pytest.raises(UserError, match="belongs to another run; give another --out_dir"):
        resolve_resume(str(run_dir), fresh)


def test_resume_auto_does_not_overwrite_a_folder_that_it_cannot_resume(tmp_path):
    (tmp_path / "final").mkdir()
    with pytest.raises(UserError, match="final has no file COMPLETE.*give another --out_dir"):
        resolve_resume("auto", tmp_path)


def test_out_dir_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="--out_dir .*: is a file; give a folder"):
        resolve_resume("auto", tmp_path / "out")


def test_unfinished_folders_are_not_listed(tmp_path):
    make(tmp_path / "step-1")
    os.rename(make(tmp_path / "step-2"), tmp_path / ".tmp-step-2-123")
    assert newest_first(tmp_path) == [tmp_path / "step-1"]
    assert is_complete(tmp_path / "step-1")
    make(tmp_path / "step-3")
    assert names(tmp_path) == ["step-1", "step-3"]


def test_a_forked_process_does_not_hold_the_lock_of_its_parent(tmp_path):
    with exclusive_lock(tmp_path):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:  # as a data worker, which may outlive the run
            os.write(writing, b"here")
            signal.pause()
        assert os.read(reading, 4) == b"here"
    try:
        with exclusive_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_folder_taken_over_by_another_run_is_not_written(tmp_path):
    out = tmp_path / "run"
    with exclusive_lock(out):
        shutil.rmtree(out)
        out.mkdir()
        (out / ".lock").write_text("1\n")
        with pytest.raises(UserError, match=f"--out_dir {out}: was deleted, and another run has started there"):
            make(out / "step-1")
    assert names(out) == [".lock"]
