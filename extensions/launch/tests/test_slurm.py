"""The batch script of `toolkit launch slurm`: what it requests, starts, and does with each exit code."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from toolkit.cli import main


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("slurm") / "job.sbatch"
    run = ["pretrain", "pico-llama", "--devices", "8", "--num_nodes", "2", "--out_dir", "/shared/run"]
    options = ["--shared_dir", "/shared", "--time", "2-00:00:00", "--secrets", "HF_TOKEN", "--out", str(file)]
    assert main(["launch", "slurm", *options, "--", *run, "--train.max_steps", "3"]) == 0
    return file


def test_script_to_copy_is_what_launch_writes(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    recipe = Path("config_hub/pretrain/llama-2-7b-multi-node.yaml")
    command = re.search(r"^# `toolkit (launch slurm .*)`$", recipe.read_text(), re.M)[1]
    assert main(shlex.split(command)) == 0
    written = capsys.readouterr().out
    assert written == recipe.with_suffix(".sbatch").read_text(), f"toolkit {command} > {recipe.with_suffix('.sbatch')}"
    assert "\nsrun toolkit pretrain" in written


def run_sbatch(script: Path, tmp_path: Path, code: int, *arguments: str, **variables: str):
    """Run the script with an srun that exits with ``code``; return its exit code and the commands it called."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name, ends in (("srun", code), ("scontrol", 0)):
        text = f'#!/bin/bash\necho "{name} $SRUN_CPUS_PER_TASK $OMP_NUM_THREADS $*" >> "{log}"\nexit {ends}\n'
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "6"}
    done = subprocess.run(
        ["bash", script, *arguments], env=environment | {"HF_TOKEN": "x"} | variables, capture_output=True, text=True
    )
    return done.returncode, log.read_text().splitlines() if log.exists() else [], done.stderr


def test_script_launches_the_run_and_forwards_arguments(script, tmp_path):
    code, calls, _ = run_sbatch(script, tmp_path, 0, "--train.max_steps", "10", "--log.run", "two words")
    assert code == 0 and len(calls) == 1
    assert calls[0].startswith("srun 6 6 toolkit pretrain pico-llama --devices 8 --num_nodes 2 ")
    assert calls[0].endswith("--resume auto --train.max_steps 10 --log.run two words")


def test_s3_script_requeues_after_the_time_limit_signal(script, tmp_path):
    code, calls, _ = run_sbatch(script, tmp_path, 138)
    assert code == 0
    assert calls[1:] == ["scontrol 6 6 requeue 77"]


@pytest.mark.parametrize("end", [1, 2, 3, 130, 137, 143])
def test_script_forwards_other_exit_codes(script, tmp_path, end):
    code, calls, _ = run_sbatch(script, tmp_path, end)
    assert code == end and len(calls) == 1


def test_script_limits_restarts(script, tmp_path):
    code, calls, _ = run_sbatch(script, tmp_path, 138, SLURM_RESTART_COUNT="50")
    assert code == 138 and len(calls) == 1


def test_missing_secret_ends_the_job_before_the_run(script, tmp_path):
    code, calls, error = run_sbatch(script, tmp_path, 0, HF_TOKEN="")
    assert code != 0 and not calls and "HF_TOKEN: must be set" in error


def test_script_requests_what_the_command_says(script):
    lines = script.read_text().splitlines()
    requested = dict(line.split(" --")[1].split("=") for line in lines if line.startswith("#SBATCH") and "=" in line)
    assert (requested["nodes"], requested["ntasks-per-node"], requested["gpus-per-node"]) == ("2", "8", "8")
    assert (requested["signal"], requested["time"], requested["job-name"]) == ("USR1@300", "2-00:00:00", "pretrain")
