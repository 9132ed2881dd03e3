"""The wheel, installed in an environment without the source tree, trains."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers.small_runs import text_data

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_is_complete_and_trains(tmp_path, corpus):
    source, wheels, environment = tmp_path / "source", tmp_path / "wheels", tmp_path / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "toolkit", source / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, source)
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("fabric_toolkit_lm-")

    venv.create(environment)
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    for path in Path(sysconfig.get_path("purelib")).iterdir():  # all that is installed here but toolkit, undownloaded
        if not re.match("__editable__|toolkit|fabric_toolkit", path.name):
            (packages / path.name).symlink_to(path)
    python = environment / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)

    code = "import toolkit, importlib.metadata as m; print(toolkit.__file__, *m.metadata('fabric-toolkit-lm').values())"
    words = run(python, "-c", code)
    assert words.startswith(str(packages)) and "Apache-2.0" in words and "LICENSE" in words
    installed = {path.relative_to(packages) for path in (packages / "toolkit").rglob("*")}
    assert {path.relative_to(source) for path in (source / "toolkit").rglob("*")} <= installed

    flags = [*text_data(corpus), "--out_dir", tmp_path / "out", "--train.max_steps", "2"]
    run(environment / "bin" / "toolkit", "pretrain", "pico-llama", "--accelerator", "cpu", *flags)
    assert (tmp_path / "out" / "final" / "COMPLETE").exists()


def run(*command: str | Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
