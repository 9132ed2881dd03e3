"""Leftovers of killed processes are removed by the next one; files of live processes never are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.saving import write_checkpoint

from toolkit.checkpoints.scratch import mmap_empty
from toolkit.checkpoints.store import write_file, write_folder
from toolkit.data.cache import staging_folder
from toolkit.io import tempfiles
from toolkit.io.atomic import write_atomic, write_json
from toolkit.io.tempfiles import has_ended, sweep, temporary_path

# Each writes something of another name into the folder.
WRITERS = {
    "metrics": lambda folder, name: write_atomic(folder / name, b"rows"),
    "folder": lambda folder, name: write_folder(folder / name, lambda tmp: (tmp / "file").touch(), "out_dir"),
    "file": lambda folder, name: write_file(folder / name, lambda tmp: tmp.touch(), "out_dir"),
    "reader": lambda folder, name: mmap_empty(torch.Size([100_000]), torch.float32, folder / name),
    "checkpoint": lambda folder, name: write_checkpoint(folder / f"step-{len(name)}", lambda tmp: None),
}


def write_cache(folder: Path, name: str) -> None:
    sweep(folder)
    with staging_folder(folder / name):
        pass


WRITERS["cache"] = write_cache
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.io.test_tempfiles import WRITERS, torch
for name, write in WRITERS.items():
    if not os.fork():
        die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        for module, names in ((os, ("replace", "rename")), (torch, ("from_file",))):
            for one in names:
                setattr(module, one, die)
        import shutil
        shutil.rmtree = die
        write(Path(sys.argv[1], name), "a")
    os.wait()
"""


@pytest.mark.slow
def test_next_start_removes_leftovers_of_a_killed_process(tmp_path):
    for name in WRITERS:
        (tmp_path / name).mkdir()
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, cwd=root, env=environment)
    for name, write in WRITERS.items():
        folder = tmp_path / name
        assert [path.name[:1] for path in folder.iterdir()] == ["."], f"{name}: was not killed in the middle"
        write(folder, "bb")
        assert [path for path in folder.iterdir() if path.name.startswith(".")] == [], name


def test_files_of_live_processes_and_other_programs_are_kept(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own, me = temporary_path(tmp_path / "x").name, f"-{os.getpid()}-"
    elsewhere = own.replace("-toolkit-", "-toolkit-other", 1)
    dead = {own.replace(me, f"-{ended.pid}-"), elsewhere}
    kept = {own, own.replace(me, f"-{os.getppid()}-"), f"{elsewhere}-in-use", ".tmp-of-another-program", ".x.tmp", "x"}
    for name in dead | kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        for path in (tmp_path / name / "file", tmp_path / name):
            os.utime(path, (0, time.time() - 90_000))  # more than a day
    (tmp_path / f"{elsewhere}-in-use" / "file").write_text("more")  # which does not change the folder's mtime
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


OTHER_MACHINE = """
import sys
from pathlib import Path
from toolkit.io import tempfiles
tempfiles._BOOT_ID = Path(sys.argv[1])
tempfiles.temporary_path(Path(sys.argv[2])).touch()
"""


def test_processes_of_another_machine_with_the_same_host_name_are_not_taken_for_dead(tmp_path):
    """Also the lease of a remote run names its process so."""
    (tmp_path / "boot_id").write_text("79c2d3d5-3c5c-4c3e-a4b2-000000000000\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for boot_id, expected in ((tempfiles._BOOT_ID, True), (tmp_path / "boot_id", False)):
        folder = tmp_path / f"dead-{expected}"
        folder.mkdir()
        subprocess.run([sys.executable, "-c", OTHER_MACHINE, boot_id, folder / "x"], check=True, env=environment)
        (file,) = folder.iterdir()
        assert has_ended(file.name) is expected
        sweep(folder)
        assert file.exists() is not expected


def test_symlinks_are_not_followed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    link = tmp_path / temporary_path(tmp_path / "x").name.replace("-toolkit-", "-toolkit-other", 1)
    link.symlink_to(tmp_path / "data")
    os.utime(link, (0, 0), follow_symlinks=False)
    sweep(tmp_path)
    assert not link.is_symlink() and (tmp_path / "data" / "file").exists()


def test_write_json_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(source: Path, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_json(tmp_path / "counts.json", {"rows": 1})
    assert not list(tmp_path.iterdir())
