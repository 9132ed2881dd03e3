"""Slow: the commands of the README raise the reward."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.compare_runs import curve

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.slow
def test_the_commands_of_the_readme_raise_the_reward(tmp_path):
    section = re.search(r"^## A reward.*?(?=^## )", README, re.M | re.S)[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    commands = "\n".join(["set -e", *blocks])
    result = subprocess.run(
        ["bash", "-c", commands], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = curve(tmp_path / "out/grpo")
    assert rows[-1]["val_reward"] >= rows[0]["val_reward"] + 0.3
