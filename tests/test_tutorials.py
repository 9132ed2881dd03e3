"""Every command of tutorials/distributed.md, run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "tutorials" / "distributed.md").read_text(), re.S)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with scripts/, and stand-ins for SLURM's commands: srun checks what it would start."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    commands = {"sbatch": 'exec bash "$@"', "srun": 'exec "$@" --print_config'}
    (folder / "bin").mkdir()
    for name, line in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def test_there_are_commands():
    text = "".join(BLOCKS)
    assert len(BLOCKS) >= 6 and "torchrun" in text and "NODE_RANK" in text and "sbatch" in text


# one block of each kind always; the others with the slow tests
QUICK = ("sbatch", "torchrun")
CASES = [
    pytest.param(
        block,
        id=re.sub(r"\W+", "-", block)[:60],
        marks=[] if block.startswith(QUICK) else [pytest.mark.slow],
    )
    for block in BLOCKS
]


@pytest.mark.parametrize("block", CASES)
def test_commands_of_the_tutorial(block, workplace):
    path = os.pathsep.join([str(workplace / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", block], cwd=workplace, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    for out_dir in re.findall(r"--out_dir (\S+)", block):
        assert (workplace / out_dir / "final" / "COMPLETE").exists()
