"""Checkpoints on remote storage: S1 at every request, what a clean machine downloads, leases, messages."""

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from helpers.saving import write_checkpoint

from toolkit.checkpoints.manifest import DamagedCheckpointError, read_manifest, write_manifest
from toolkit.checkpoints.remote import checkpoints, lease
from toolkit.checkpoints.remote import uploader as uploader_module
from toolkit.checkpoints.remote.download import fetch_files, remote_manifest
from toolkit.checkpoints.remote.lease import LEASE, Lease
from toolkit.checkpoints.remote.remote_run import RemoteRun
from toolkit.checkpoints.store import STOP, file_names, newest
from toolkit.errors import UserError
from toolkit.io.checksums import checksum_files, find_damage
from toolkit.io.storage import Storage, StorageError
from toolkit.io.tempfiles import temporary_prefix


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, "STALE_S", 0.2)
    monkeypatch.setattr(lease, "REFRESH_S", 0.02)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def make(folder: Path, step: int, weights: str = "w") -> Path:
    """A complete checkpoint with three files."""

    def write(tmp: Path) -> None:
        (tmp / "lit_model.pth").write_text(f"{weights} of step {step}" * 9)
        (tmp / "trainer").mkdir()
        (tmp / "trainer" / "meta.json").write_text(json.dumps({"step": step}))
        (tmp / "trainer" / "state.pth").write_text(f"state {step}")

    write_checkpoint(folder, write)
    return folder


def complete(store: Storage) -> list[tuple[str, int]]:
    """Names and steps of the complete checkpoints, newest first; each is intact."""
    found = list(checkpoints.newest_first(store))
    for checkpoint in found:
        assert not fetch_files(store, checkpoint.folder, remote_manifest(store, checkpoint.folder), None), checkpoint
    return [(checkpoint.name, checkpoint.step) for checkpoint in found]


class Killed(BaseException):
    """The process ends here, whatever handlers there are."""


def kill_at(store: Storage, number: int) -> None:
    """Make the request of that number, of those that change something, the last."""
    count = iter(range(1000))

    def wrap(method):
        def call(*args, **kwargs):
            if next(count) == number:
                raise Killed
            return method(*args, **kwargs)

        return call

    inner = store.fs
    changing = {name: wrap(getattr(inner, name)) for name in ("pipe_file", "put_file", "cp_file", "rm_file", "rm")}
    reading = {name: getattr(inner, name) for name in ("cat_file", "ls", "find", "info", "makedirs")}
    store.fs = SimpleNamespace(**changing, **reading)


def test_s1_kill_at_every_request_leaves_the_older_or_the_newer_checkpoint(tmp_path):
    """New and replaced checkpoints, and deletions; the next process converges to what an undisturbed one leaves."""
    old, final = make(tmp_path / "old" / "final", 10), make(tmp_path / "new" / "final", 20)
    steps = [make(tmp_path / "new" / f"step-{step:08d}", step) for step in (16, 18)]

    def work(store: Storage) -> None:
        checkpoints.finish_replacements(store)
        for folder in (*steps, final):
            checkpoints.upload(store, folder, folder.name)
            checkpoints.prune(store, keep_last=1)

    newest_seen = []
    for number in range(100):
        url = f"memory://run-{number}"
        checkpoints.upload(Storage(url, "--out_dir"), old, "final")
        store = Storage(url, "--out_dir")
        kill_at(store, number)
        try:
            work(store)
            break
        except Killed:
            found = complete(Storage(url, "--out_dir"))
            newest_seen.append(found[0])
            work(Storage(url, "--out_dir"))
            assert complete(Storage(url, "--out_dir")) == [("final", 20), ("step-00000018", 18)]
    assert newest_seen == sorted(newest_seen, key=lambda found: found[1])
    assert {step for _, step in newest_seen} == {10, 16, 18, 20}
    assert set(Storage(url, "--out_dir").entries()) == {"final", "step-00000018"}


def test_short_upload_is_an_error(tmp_path):
    store, file = Storage("memory://run", "--out_dir"), tmp_path / "file"
    file.write_text("content")

    def put(path, name):
        fsspec.filesystem("memory").pipe_file(name, file.read_bytes()[:3])

    store.fs = SimpleNamespace(put_file=put, info=store.fs.info, makedirs=store.fs.makedirs)
    with pytest.raises(StorageError, match="only 3 of 7 bytes of name were stored"):
        store.upload(file, "name")


# ---- resuming on a clean machine


def prepare(out_dir: Path, resume: bool | str = "auto", **options) -> tuple[RemoteRun, list[str]]:
    run, lines = RemoteRun("memory://bucket/run", out_dir), []
    run.prepare(resume, lines.append, **options)
    return run, lines


def upload_run(folder: Path, *names: str) -> Storage:
    store = Storage("memory://bucket/run", "--out_dir")
    for name in names:
        step = 30 if name in ("final", "best") else int(name[5:])
        checkpoints.upload(store, make(folder / name, step), name)
    store.write("logs/metrics.csv", b"step\n")
    return store


def test_newest_intact_checkpoint_is_downloaded_once(tmp_path):
    store = upload_run(tmp_path / "first", "step-00000010", "step-00000020", "best", "final")
    out = tmp_path / "clean"
    _, lines = prepare(out, keep_best=True)
    assert len(lines) == 2 and newest(out).name == "final" and (out / "best").is_dir()
    assert (out / "logs" / "metrics.csv").read_text() == "step\n"
    assert prepare(out, keep_best=True)[1] == []  # it is there already
    (out / "final" / "lit_model.pth").write_text("damaged")
    assert len(prepare(out)[1]) == 1 and not find_damage(out / "final", read_manifest(out / "final"))

    store.write("final/lit_model.pth", b"W" + store.read("final/lit_model.pth")[1:])
    store.write("best/trainer/state.pth", b"")
    store.delete("step-00000020/COMPLETE")
    run, lines = prepare(tmp_path / "other")
    assert newest(tmp_path / "other").name == "step-00000010"
    assert "final: damaged: lit_model.pth (checksum mismatch" in lines[1] and len(lines) == 5
    run.start_uploads(keep_last=3, report=print).close()
    assert complete(store) == [("step-00000010", 10)]  # the others are no longer taken for checkpoints
    with pytest.raises(DamagedCheckpointError, match="step-00000010: damaged: lit_model.pth"):
        store.write("step-00000010/lit_model.pth", b"short")
        prepare(tmp_path / "third", resume=True)
    assert newest(tmp_path / "third") is None


def test_remains_of_uploads_are_deleted_when_the_run_is_over(tmp_path):
    store = upload_run(tmp_path / "first", "step-00000010")
    for keep_last in (2, 0):
        store.write("step-00000020/lit_model.pth", b"part")
        for is_over in (False, True):
            checkpoints.prune(store, keep_last, is_over=is_over)
            assert ("step-00000020" in store.entries()) != is_over
        assert "step-00000010" in store.entries()


def test_download_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    upload_run(tmp_path / "first", "step-00000010")
    read, asked = Storage.read, []

    def interrupted(self, name, start=None, stop=None):
        if start is not None:
            asked.append(name)
            if len(asked) == 3:
                raise KeyboardInterrupt
        return read(self, name, start, stop)

    monkeypatch.setattr("toolkit.checkpoints.remote.download._THREADS", 1)
    monkeypatch.setattr(Storage, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "clean")
    assert newest(tmp_path / "clean") is None
    asked.append("")
    prepare(tmp_path / "clean")
    assert len(asked) == 3 + 1 + 1 and newest(tmp_path / "clean").name == "step-00000010"


def test_local_checkpoints_that_were_not_uploaded_are_kept_and_uploaded(tmp_path):
    store, out = upload_run(tmp_path / "first", "step-00000010"), tmp_path / "out"
    for step in (15, 20):
        make(out / f"step-{step:08d}", step)
    make(out / "best", 15)
    run, lines = prepare(out)
    assert lines == [] and newest(out).name == "step-00000020"
    (out / "logs" / "metrics.csv").write_text("step\n20\n")
    (out / STOP).touch()
    uploader = run.start_uploads(keep_last=1, report=print)
    assert uploader.wait(10) and store.read("logs/metrics.csv") == b"step\n20\n"  # with the checkpoint
    assert uploader.upload_outputs() is None
    uploader.close()
    assert STOP not in store.files("")  # another machine would carry it out again
    assert complete(store) == [("step-00000020", 20), ("best", 15)]
    store.write("step-00000030/lit_model.pth", b"")  # incomplete
    assert prepare(out)[1] == []


def test_node_takes_the_checkpoint_of_rank_0_and_not_an_older_one_of_its_name(tmp_path):
    store, shared = upload_run(tmp_path / "first", "final"), tmp_path / "shared"
    newer = make(shared / "final", 40)  # its upload has failed
    make(shared / "best", 35)
    manifest = (newer / "COMPLETE").read_bytes()
    RemoteRun("memory://bucket/run", shared).fetch("final", manifest, print)
    assert (newer / "COMPLETE").read_bytes() == manifest and (shared / "best").is_dir()
    other = RemoteRun("memory://bucket/run", tmp_path / "other")
    with pytest.raises(UserError, match="final was not uploaded and is only in the staging folder of the first node"):
        other.fetch("final", manifest, print)
    other.fetch("final", store.read("final/COMPLETE"), print)
    assert newest(tmp_path / "other").name == "final"


def test_used_folder_without_resume_is_refused(tmp_path):
    upload_run(tmp_path / "first")
    with pytest.raises(UserError, match=r"bucket/run: already used \(logs/metrics.csv exists\); --resume auto"):
        prepare(tmp_path / "clean", resume=False)
    Storage("memory://bucket/run", "").delete("logs/metrics.csv")
    prepare(tmp_path / "clean", resume=False)
    make(tmp_path / "clean" / "step-00000010", 10)
    with pytest.raises(UserError, match="step-00000010 was not uploaded; --resume auto"):
        prepare(tmp_path / "clean", resume=False)


def test_uploads_go_on_while_the_run_replaces_and_deletes(tmp_path, monkeypatch):
    """What is uploaded is the checkpoint as it was saved; a failure is one line, and the next is uploaded."""
    out, may_go_on = tmp_path / "out", threading.Event()
    run, _ = prepare(out)
    uploader = run.start_uploads(keep_last=2, report=print)
    upload = Storage.upload

    def wait_and_upload(self, file, name):
        may_go_on.wait()
        if name.startswith("step-00000020"):
            raise StorageError("the storage is full")
        upload(self, file, name)

    monkeypatch.setattr(Storage, "upload", wait_and_upload)
    uploader.submit(make(out / "best", 10, "first"))
    uploader.submit(make(out / "step-00000020", 20))
    uploader.submit(make(out / "step-00000030", 30))
    assert not uploader.wait(0, at_most=2)
    make(out / "best", 30, "second")
    shutil.rmtree(out / "step-00000030")
    may_go_on.set()
    assert uploader.wait(10)
    assert complete(run.storage) == [("step-00000030", 30), ("best", 10)]
    (line,) = uploader.take_messages()
    assert "warning: step-00000020 could not be uploaded to memory://bucket/run: the storage is full; it is in" in line
    assert list((out / ".uploads").iterdir()) == []
    uploader.close()


def make_parts(machines: list[Path], name: str, step: int, text: str = "shard") -> list[Path]:
    """Each machine's part of a checkpoint, as a save without a shared disk leaves it."""
    whole = make(machines[0].parent / text / name, step)
    for rank in (0, 1):
        (whole / f"__{rank}_0.distcp").write_text(f"{text} {rank} of step {step}")
    manifest = checksum_files(whole, [file for file in file_names(whole) if file != "COMPLETE"])
    write_manifest(whole, manifest)
    parts = [machine / ".parts" / name for machine in machines]
    for part in parts:
        part.mkdir(parents=True)
    shutil.copy2(whole / "COMPLETE", parts[1])
    (whole / "__1_0.distcp").rename(parts[1] / "__1_0.distcp")
    shutil.copytree(whole, parts[0], dirs_exist_ok=True)
    return parts


@pytest.fixture
def two_machines(tmp_path, monkeypatch):
    """The run, and the uploaders of two machines without a shared disk."""
    monkeypatch.setattr(uploader_module, "_POLL_S", 0.01)
    run, _ = prepare(tmp_path / "0")
    first = run.start_uploads(keep_last=2, report=print)
    other = RemoteRun(run.url, tmp_path / "1").start_part_uploads()
    yield run.storage, first, other
    first.close()
    other.close()


def test_s1_parts_of_two_machines_become_one_checkpoint_after_the_last(tmp_path, two_machines):
    """A part that a killed run has left, of the same size, is not taken for the new one; best is replaced."""
    store, first, other = two_machines
    store.write("step-00000010/__1_0.distcp", b"SHARD 1 of step 10")
    for name, step, text in (("step-00000010", 10, "shard"), ("best", 10, "shard"), ("best", 20, "later")):
        parts = make_parts([tmp_path / "0", tmp_path / "1"], name, step, text)
        first.submit(parts[0])
        assert not first.wait(0.2) and (name, step) not in complete(store)
        other.submit(parts[1])
        assert first.wait(10) and other.wait(10) and first.take_messages() == other.take_messages() == []
        assert (name, step) in complete(store) and len(store.files(name)) == 6
        assert not any(part.exists() for part in parts)
    assert complete(store) == [("best", 20), ("step-00000010", 10)]


def test_part_that_fails_on_one_machine_is_canceled_on_the_other(tmp_path, two_machines, monkeypatch):
    """Rank 0's machine waits for the part, the other one for rank 0's request; the next checkpoint is uploaded.

    Also one of the name that failed: only what fails ends on the other machine.
    """
    store, first, other = two_machines
    failures = ["step-00000010/__1_0", "step-00000020/.parts"]

    def failing(method, start):
        def call(self, value, *more):
            if start in failures and start in f"{value} {more}":
                failures.remove(start)
                raise StorageError("the storage is full")
            method(self, value, *more)

        return call

    monkeypatch.setattr(Storage, "upload", failing(Storage.upload, failures[0]))
    monkeypatch.setattr(Storage, "write", failing(Storage.write, failures[1]))
    for step, failed, waiting in ((10, other, first), (20, first, other), (10, None, None), (30, None, None)):
        text = "shard" if failed else "again"
        parts = make_parts([tmp_path / "0", tmp_path / "1"], f"step-{step:08d}", step, text)
        first.submit(parts[0])
        other.submit(parts[1])
        if failed:
            assert failed.wait(10) and not waiting.wait(0.1)
            (line,), ended = failed.take_messages(), failed.take_ended_parts()
            assert line.endswith("the storage is full") and not waiting.take_ended_parts()
            waiting.cancel_parts(ended)
            assert waiting.wait(10) and len(messages := waiting.take_messages()) == (waiting is first)
            assert all("__1_0.distcp was not uploaded by the machine that wrote it" in line for line in messages)
    assert first.wait(10) and other.wait(10)
    assert complete(store) == [("step-00000030", 30), ("step-00000010", 10)] and not other.take_ended_parts()
    assert not first.failed.keys() - {"step-00000020"} and not other._parts


def test_staging_folder_that_cannot_be_written_is_one_line_and_the_lease_is_released(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    make(tmp_path / "out" / "step-00000010", 10)
    run, _ = prepare(tmp_path / "out")
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copy2", fail)
    with pytest.raises(UserError, match=r"--staging_dir .*out: No space left on device; give a writable folder"):
        run.start_uploads(keep_last=1, report=print)
    assert run.storage.read(LEASE) is None and not run.lease._thread.is_alive()
    assert run.storage.fs.retries == 3  # of ten: the run ends soon


# ---- leases


def test_checkpoint_is_not_completed_if_another_run_takes_over_during_its_upload(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "REFRESH_S", 60.0)  # the refresh does not notice it
    run, _ = prepare(tmp_path / "out")
    uploader, upload, names = run.start_uploads(keep_last=1, report=print), Storage.upload, []

    def upload_and_take_over(self, file, name):
        names.append(name)
        upload(self, file, name)
        self.write(LEASE, json.dumps({"id": "other", "pid": 1, "host": "node"}).encode())

    monkeypatch.setattr(Storage, "upload", upload_and_take_over)
    uploader.submit(make(tmp_path / "out" / "step-00000010", 10))
    assert uploader.wait(10) and complete(run.storage) == []
    assert "another run has taken over: process 1 on node" in uploader.failed["step-00000010"]
    assert uploader.lease.taken_by is not None  # what ends the run
    assert names
    names.clear()
    uploader.submit(make(tmp_path / "out" / "step-00000020", 20))
    assert uploader.wait(10) and not names, "the next one is not begun"
    uploader.close()


def test_second_run_is_refused_while_the_first_is_alive(tmp_path):
    first, second = Lease(Storage("memory://run", "--out_dir")), Lease(Storage("memory://run", "--out_dir"))
    first.acquire(print)
    with pytest.raises(UserError, match=r"memory://run: another run is alive there \(process \d+ on .+\); wait for it"):
        second.require_free(print)
    taken = json.dumps({"id": "other", "pid": 1, "host": "node", "process": "elsewhere"}).encode()
    first.storage.write(LEASE, taken)
    first._thread.join()
    assert first.taken_by.startswith("process 1 on node")
    first.release()
    assert second.storage.read(LEASE) == taken
    lines = []
    second.acquire(lines.append)  # nobody refreshes it
    assert len(lines) == 1 and "was in use by process 1 on node" in lines[0]
    second.release()
    assert second.storage.read(LEASE) is None


def test_lease_of_a_dead_process_of_this_machine_is_taken_at_once():
    store, dead = Storage("memory://run", "--out_dir"), temporary_prefix().replace(str(os.getpid()), "4194305")
    store.write(LEASE, json.dumps({"id": "other", "process": dead}).encode())
    Lease(store).require_free(pytest.fail)
