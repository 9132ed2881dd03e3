"""The command of each file on two fake nodes, as its system starts it: killed once, resumed elsewhere, bit-equal (S2).

A node is a home, a cache and the environment variables that the system sets; out_dir is on an S3 server, whose keys
arrive as the file's secrets.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.compare_runs import assert_same_weights
from helpers.groups import free_port
from helpers.processes import clean, common_flags
from helpers.s3 import BUCKET, serve
from helpers.small_runs import text_data

from extensions.launch.tests.test_launch import OPTIONS, command_of
from toolkit.cli import main

pytestmark = pytest.mark.slow
FORMATS = ("slurm", "kubeflow", "jobset", "skypilot", "docker")
KILLED_RANK = 1
# Starts its command on every node, as srun does, and ends with the exit code of the first that fails.
SRUN = """\
#!/bin/bash
for rank in 0 1; do
    export SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0
    HOME=$NODES/$rank XDG_CACHE_HOME=$NODES/$rank/cache "$@" &
    echo $! > "$NODES/pid$rank"
done
wait -n && wait -n
code=$?
wait
exit $code
"""


@pytest.fixture(scope="module")
def server():
    with serve() as server:
        yield server


def run_words(corpus: Path, name: str) -> list[str]:
    """Return a training command of two nodes with one process each."""
    train = {"max_steps": 150, "save_interval": 50, "keep_last": 2, "log_interval": 10}
    flags = [*text_data(corpus), *common_flags(Path("out"), **train)]
    flags[flags.index("--out_dir") + 1] = f"s3://{BUCKET}/{name}"
    del flags[(at := flags.index("--resume")) : at + 2]  # the file adds it
    return ["pretrain", "pico-llama", "--accelerator", "cpu", "--devices", "1", "--num_nodes", "2", *flags]


class Nodes:
    """Two fake nodes. ``environ`` is what both have in addition to their own variables; ``secrets``: only by name."""

    def __init__(self, folder: Path, secrets: dict[str, str]) -> None:
        self.folder, self.secrets, self.port = folder, secrets, str(free_port())
        self.processes: list[subprocess.Popen] = []
        folder.mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "srun").write_text(SRUN)
        (folder / "bin" / "srun").chmod(0o755)

    def start(self, rank: int, words: list[str], environ: dict[str, str]) -> None:
        node = self.folder / str(rank)
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        home = {"HOME": str(node), "XDG_CACHE_HOME": str(node / "cache"), "PATH": path}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.processes.append(subprocess.Popen(words, env=clean(home | environ), start_new_session=True, **pipes))

    def slurm(self, text: str) -> None:
        job = {"SLURM_JOB_ID": str(random.randrange(10_000)), "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
        job |= {"SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_JOB_NAME": "pretrain"}
        (self.folder / "job.sbatch").write_text(text)
        environ = job | self.secrets | {"NODES": str(self.folder), "SLURM_CPUS_PER_TASK": "1"}
        self.start(0, ["bash", str(self.folder / "job.sbatch")], environ)

    def kubeflow(self, text: str) -> None:
        runtime, job = yaml.safe_load_all(text)
        pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        keys = [entry["valueFrom"]["secretKeyRef"]["key"] for entry in pod["containers"][0]["env"]]
        trainer = job["spec"]["trainer"]
        for rank in range(trainer["numNodes"]):
            environ = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
            environ |= {"PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port}
            environ |= {"JOB_COMPLETION_INDEX": str(rank)} | {key: self.secrets[key] for key in keys}
            self.start(rank, trainer["command"], environ)

    def jobset(self, text: str) -> None:
        job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
        container = job["template"]["spec"]["containers"][0]
        environ = {entry["name"]: entry.get("value") or self.secrets[entry["name"]] for entry in container["env"]}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}  # there is no name server
        for rank in range(job["completions"]):
            self.start(rank, container["command"], environ | {"JOB_COMPLETION_INDEX": str(rank)})

    def skypilot(self, text: str) -> None:
        task = yaml.safe_load(text)
        for rank in range(task["num_nodes"]):
            environ = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": str(rank)}
            environ |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "MASTER_PORT": self.port}
            environ |= {key: self.secrets[key] for key in task["secrets"]}
            self.start(rank, ["bash", "-c", f"exec {task['run']}"], environ)

    def docker(self, text: str) -> None:
        words = shlex.split(text)
        passed = [name for flag, name in zip(words, words[1:], strict=False) if flag == "--env"]
        for rank in range(2):
            address = {"NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            shell = address | self.secrets
            self.start(rank, command_of("docker", text), {name: shell[name] for name in passed})

    def kill(self, format: str) -> None:
        pid = int((self.folder / f"pid{KILLED_RANK}").read_text()) if format == "slurm" else None
        os.kill(pid or self.processes[KILLED_RANK].pid, signal.SIGKILL)

    def end(self) -> tuple[list[int], str]:
        """Return the exit codes and the output."""
        output = "".join(process.communicate(timeout=600)[0] for process in self.processes)
        return [process.returncode for process in self.processes], output


def execute(format: str, corpus: Path, server, name: str, folder: Path, *, is_killed: bool) -> None:
    """Write the file, execute its command, kill a process after a checkpoint, and execute it again on other nodes."""
    options = [word for word in OPTIONS[format] if word not in ("--secrets", "HF_TOKEN", "--gpu", "H100")]
    folder.mkdir(exist_ok=True)
    file = folder / format
    words = ["launch", format, *options, "--secrets", ",".join(server.environ), "--out", str(file)]
    assert main([*words, "--", *run_words(corpus, name)]) == 0
    assert not any(value in file.read_text() for key, value in server.environ.items() if "KEY" in key)
    if is_killed:
        nodes = Nodes(folder / "first", server.environ)
        getattr(nodes, format)(file.read_text())
        while not server.checkpoints(name) and all(process.poll() is None for process in nodes.processes):
            time.sleep(0.05)
        assert server.checkpoints(name), nodes.end()
        nodes.kill(format)
        codes, output = nodes.end()
        assert 0 not in codes, f"not killed in time: {output}"
        assert "final" not in server.checkpoints(name)
    nodes = Nodes(folder / "second", server.environ)
    getattr(nodes, format)(file.read_text())
    codes, output = nodes.end()
    assert not any(codes), output
    assert ("resuming from " in output) == is_killed


def download(server, run: str, folder: Path) -> Path:
    for name in server.objects(f"{run}/final/"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(server.read(f"{run}/final/{name}"))
    return folder


@pytest.fixture(scope="module")
def undisturbed(server, corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    execute("docker", corpus, server, "undisturbed", folder / "run", is_killed=False)
    return download(server, "undisturbed", folder / "final")


@pytest.mark.parametrize("format", FORMATS)
def test_s2_file_executed_killed_and_resumed_is_bit_equal(format, server, corpus, undisturbed, tmp_path):
    execute(format, corpus, server, format, tmp_path / "run", is_killed=True)
    assert_same_weights(download(server, format, tmp_path / "final"), undisturbed)
