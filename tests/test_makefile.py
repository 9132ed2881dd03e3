"""The Makefile's installation, and what continuous integration runs."""

import os
import pty
import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def test_installation_shows_its_progress_on_a_terminal(tmp_path):
    for is_terminal in (False, True):
        environment = tmp_path / f"venv-{is_terminal}"
        program(environment / "bin" / "uv", f'echo "$@" >> {tmp_path}/{is_terminal}')
        parent, child = pty.openpty()
        command = ["make", "-C", str(ROOT), f"VENV={environment}", str(environment / ".test")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=child if is_terminal else subprocess.PIPE)
        os.close(parent), os.close(child)
        calls = (tmp_path / str(is_terminal)).read_text().splitlines()
        assert len(calls) == 2 and ["--quiet" in call for call in calls] == [not is_terminal] * 2


def test_integration_does_what_the_readme_says_in_its_order(tmp_path):
    told = re.findall(r"\bmake (pretrain|test)\b", (ROOT / "README.md").read_text())
    program(tmp_path / "bin" / "make", f'printf "%s," "$@" >> {tmp_path}/calls; echo >> {tmp_path}/calls')
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    subprocess.run([ROOT / ".ci" / "run"], check=True, env=os.environ | {"PATH": path})
    calls = [line.split(",")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[0] for call in calls] == ["lint", *dict.fromkeys(told)]
    run = subprocess.run(["make", "-n", "-C", ROOT, *calls[1]], capture_output=True, text=True, check=True).stdout
    assert "--config config_hub/pretrain/default.yaml --resume auto --train.max_tokens 50000" in run


def test_integration_builds_the_documentation_and_a_wheel_that_trains(tmp_path):
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["package"]["steps"]
    (command,) = [step["run"].split() for step in steps if "run" in step]
    listing = [*command, "-n", "-C", ROOT, f"VENV={tmp_path}"]
    lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    assert "mkdocs build --quiet --strict" in lines and "pytest -m slow tests/test_packaging.py" in lines
