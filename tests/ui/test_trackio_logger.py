"""`--logger_name trackio`: a resume continues the run with each step once, and nothing leaves the machine.

trackio needs an older Pillow than matplotlib; the slow test runs in an environment of its own that has it and toolkit.
"""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import huggingface_hub
import pytest
from helpers.hub_stub import Hub

from toolkit.config import LogArgs
from toolkit.errors import UserError
from toolkit.ui.loggers import MetricsCSV, log_metrics, make_loggers


class FakeTrackio(types.ModuleType):
    """What is used of trackio, with runs in memory. Like there, a new run does not replace one of the same name."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = types.SimpleNamespace()
        self.TRACKIO_DIR = os.environ.get("TRACKIO_DIR", "elsewhere")
        self.stored: list[types.SimpleNamespace] = []

    def Api(self):
        return self

    def runs(self, project):
        if not (runs := [run for run in self.stored if run.project == project]):
            raise ValueError(f"Project '{project}' does not exist")
        return runs

    def finish(self):
        print("* Run finished")

    def init(self, **options):
        print("* Trackio project initialized")
        with pytest.raises(OSError, match="not asked"):
            huggingface_hub.whoami()
        run = types.SimpleNamespace(**options, points=[])
        run.log = lambda metrics, step: run.points.append((step, metrics))
        run.delete = lambda: self.stored.remove(run)
        self.stored.append(run)
        return run


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "run" / "logs" / "trackio"))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def train(out_dir: Path, steps: range, resume_step: int | None, log_args: LogArgs) -> None:
    csv = MetricsCSV(out_dir / "logs" / "metrics.csv", resume_step)
    loggers = make_loggers("trackio", out_dir, log_args, {"seed": 1}, resume_step)
    for step in steps:
        row = {"loss": 1 / step, "val_loss": None if step % 2 else 0.5}
        csv.write({"step": step, "tokens": 9 * step, **row})
        log_metrics(loggers, row, step)
    csv.close()
    if steps:
        loggers[0].finalize("success")


def test_resume_writes_each_step_once(trackio, tmp_path, capsys):
    train(tmp_path / "run", range(0), None, LogArgs(project="p", run="kept"))
    train(tmp_path / "run", range(1, 6), None, LogArgs(project="p", group="g"))
    train(tmp_path / "run", range(4, 7), 3, LogArgs(project="p", group="g"))
    kept, run = trackio.stored
    assert (kept.name, run.name, run.project, run.group, run.config) == ("kept", "run", "p", "g", {"seed": 1})
    assert not run.auto_log_cpu and not run.auto_log_gpu
    assert run.points == [(s, {"loss": 1 / s} | ({} if s % 2 else {"val_loss": 0.5})) for s in range(1, 7)]
    assert capsys.readouterr().out == "" and huggingface_hub.whoami.__module__.startswith("huggingface_hub")


def test_other_destinations_are_refused(trackio, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"trackio: did not start \(trackio already writes to .*one process|own"):
        make_loggers("trackio", tmp_path / "second", LogArgs(), {})
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    with pytest.raises(UserError, match=r"did not start \(TRACKIO_SPACE_ID is set, .* `trackio sync`\)"):
        make_loggers("trackio", tmp_path / "run", LogArgs(), {})
    assert not trackio.stored


READ = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("toolkit")
points = [(log["step"], log["loss"]) for log in SQLiteStorage.get_logs("toolkit", run.name, run_id=run.id)]
print(json.dumps([run.name, run.config["train"]["max_steps"], points]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs trackio")
def test_real_trackio_has_each_step_once_after_a_kill(tmp_path):
    with Hub() as hub:  # would see a request for the account of the token
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x", "TRACKIO_DIR": str(tmp_path / "unused")}
        command = [
            sys.executable,
            "-m",
            "toolkit",
            "pretrain",
            "pico-llama",
            "--accelerator",
            "cpu",
            "--out_dir",
            "run",
        ]
        command += ["--train.max_steps", "12", "--train.save_interval", "4", "--train.global_batch_size", "4"]
        command += ["--logger_name", "trackio", "--resume", "auto"]
        killed = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        csv = tmp_path / "run" / "logs" / "metrics.csv"
        while not (csv.exists() and len(csv.read_text().splitlines()) > 7):
            assert killed.poll() is None
        killed.kill()
        killed.wait()
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Trackio" not in done.stdout and not (tmp_path / "unused").exists()
        environment["TRACKIO_DIR"] = str(tmp_path / "run" / "logs" / "trackio")
        read = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True)
        assert not hub.tokens
    name, max_steps, points = json.loads(read.stdout)
    rows = [line.split(",") for line in csv.read_text().splitlines()[1:]]
    assert (name, max_steps) == ("run", 12)
    assert points == [[int(row[0]), float(row[2])] for row in rows] and len(points) == 12
