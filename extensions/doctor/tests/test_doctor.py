"""`toolkit doctor` with real processes: complete output, wrong values and gradients, processes that do not answer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.groups import Case, free_port, read_until, run_group
from helpers.processes import Forked, child_of, clean, finish, start

from toolkit import cli

CPU = ["--accelerator", "cpu"]
PARAMETER = "transformer.h.1.mlp.fc_1.weight"


def doctor(*flags: str, **environ: str) -> Forked:
    return Forked(["doctor", *CPU, *flags], **environ)


def warnings_of(out: str) -> list[str]:
    """Return the warnings, except that about the shared memory of this machine."""
    lines = out.partition("Warnings\n")[2].splitlines()
    return [line for line in lines if not line.startswith("  /dev/shm")]


def test_one_process_prints_the_environment(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert cli.main(["doctor", *CPU, "--topology", "--out_dir", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    titles = [line for line in shown.splitlines() if not line.startswith(" ")]
    assert titles == ["Launcher", "Versions", "Machine", "Devices", "Variables", "Disks", "Topology", "Warnings"]
    for text in ("toolkit ", "torch ", "lightning ", "litdata ", "jsonargparse ", "cgroup limit", "NCCL_DEBUG",
                 "Kubeflow\n", "rank 0 of 1; node 0 of 1", "PET_NNODES",
                 f"{tmp_path}/runs: ", "/dev/shm: ", "nvidia-smi is missing"):  # fmt: skip
        assert text in shown, text
    assert "hf_secret" not in shown and "\x1b" not in shown


def test_environment_is_printed_where_torch_does_not_import(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    environ = clean({})
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-m", "toolkit", "doctor"], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert "does not import: OSError: libcudart.so.12" in done.stdout and "Versions\n" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--comm"], "--comm true: needs several processes; use --devices 2 or a launcher"),
        (["--timeout", "1"], "--timeout 1.0: needs several processes"),
        (["--devices", "2", "--strategy", "ddp"], "--strategy ddp: has no effect without --check_grads"),
        (["--devices", "2", "--timeout", "0"], "--timeout 0.0: must be greater than zero"),
    ],
)
def test_options_without_effect_are_refused(flags, message, capsys):
    assert cli.main(["doctor", *CPU, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"toolkit doctor: {message}")


@pytest.mark.slow
def test_processes_that_it_starts():
    # the real command: a process forked from a rank would have its process group
    process = start("-m", "toolkit", "doctor", *CPU, "--devices", "2", "--comm", "--check_grads")
    out, err = finish(process)
    assert (process.returncode, err) == (0, "")
    assert len(re.findall(r"^  rank [01] +pid \d+ on \S+, cpu$", out, re.M)) == 2
    for operation in ("all-reduce", "all-gather", "reduce-scatter"):
        rows = re.findall(rf"^  {operation} +\d+ .iB +[\d.,]+ ms +\S+ GB/s +\S+ GB/s$", out, re.M)
        assert len(rows) == 4, operation
    assert out.count("link of the ring") == 2 and "all values are correct" in out
    assert "Gradients of one step of pico-llama: fsdp FULL_SHARD" in out
    (count,) = re.findall(
        r"^  (\d+) parameters; largest relative difference of a norm from one process: .*e-", out, re.M
    )
    assert int(count) > 10 and warnings_of(out) in ([], ["  none"])
    assert out.count("Versions\n") == out.count("Warnings\n") == 1


@pytest.mark.parametrize(
    ("flags", "fault", "message"),
    [
        (["--comm"], "wrong values from rank 1", "all-reduce of 4 KiB: wrong values on rank 0, 1"),
        pytest.param(
            ["--check_grads", "--strategy", "ddp"], "gradient on rank 1",
            f"step 1: the gradient of {PARAMETER} differs between ranks 0 and 1, which hold the same part of it: .*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--check_grads", "--strategy", "fsdp"], "gradient on rank 1",
            f"step 1: differs from one process in .*a parameter's gradient by .* differs most in {PARAMETER}",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_wrong_values_are_named(tmp_path, flags, fault, message):
    found = run_group(tmp_path, 2, [Case("fault", [*CPU, *flags], fault=fault, command="doctor")], [])
    assert [rank["exit"] for rank in found["fault"]] == [3, 3]
    last = (tmp_path / "group-of-2-0" / "0.out").read_text().splitlines()[-1]
    assert re.fullmatch(f"toolkit doctor: {message}", last), last


@pytest.mark.slow
def test_process_that_hangs_is_named_within_the_timeout():
    script = Path(__file__).parent / "hanging_doctor.py"
    process = Forked(["doctor", *CPU, "--devices", "2", "--comm", "--timeout", "0.05"], script=script)
    read_until(process, "Communication")
    child = child_of(process)
    _, err = finish(process)
    why = "no answer from rank 1 for 0.05 minutes (--timeout); aborting"
    named = f"{why}; rank 1 is pid {child} on "
    assert process.returncode == 1 and err.startswith(f"toolkit doctor: {named}") and err.count("\n") == 1


@pytest.mark.parametrize("node_rank", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_node_that_is_missing_is_named_within_the_timeout(node_rank):
    port, other = str(free_port()), "10"[int(node_rank)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": node_rank}
    process = doctor("--devices", "1", "--num_nodes", "2", "--timeout", "0.02", **where)
    _, err = finish(process)
    (line,) = err.splitlines()
    assert process.returncode == 1 and "within 0.02 minutes" in line
    assert f"MASTER_PORT {port}" in line and line.endswith(f"; rank {other} is process 0 of node {other}")


@pytest.mark.slow
def test_two_nodes_report_clocks_and_differences():
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ["--devices", "1", "--num_nodes", "2", "--comm"]
    other = doctor(*flags, NODE_RANK="1", NCCL_DEBUG="INFO", **where)
    process = doctor(*flags, NODE_RANK="0", **where)
    out, err = finish(process)
    assert finish(other) == ("", "")
    assert (process.returncode, other.returncode, err) == (0, 0, "")
    assert re.search(r"^  clock of rank 1  [+-]\d+\.\d ms from rank 0's$", out, re.M)
    assert warnings_of(out) == ["  NCCL_DEBUG: not set on rank 0, INFO on rank 1"]


@pytest.mark.slow
def test_torchrun_and_slurm_start_it():
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={free_port()}"]
    process = start(*torchrun, "-m", "toolkit", "doctor", *CPU, "--comm", "--check_grads")
    out, err = finish(process)
    assert process.returncode == 0, err
    assert "TORCHELASTIC_RUN_ID" in out and "all values are correct" in out and "from one process" in out
    job = {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    tasks = [doctor("--comm", **job, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]
    (out, err), (other, _) = [finish(task) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], err
    assert "SLURM_JOB_ID" in out and "all values are correct" in out and other == ""
