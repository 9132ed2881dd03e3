"""The nodes of a run load the same checkpoint, or the run does not start: two nodes, through the command line."""

import shutil
from pathlib import Path

import pytest
from helpers.groups import free_port
from helpers.processes import Forked, finish
from helpers.sealing import seal

from toolkit import cli
from toolkit.checkpoints.weights import load_weights, save_weights


def words(corpus: Path, command: str, *more: object) -> list[str]:
    data = ["--data", "TextFiles", "--data.train_data_path", str(corpus), "--accelerator", "cpu", "--devices", "1"]
    train = {"global_batch_size": 4, "micro_batch_size": 2, "max_seq_length": 32, "save_interval": 1}
    train |= {"max_steps": 2}
    flags = [part for name, value in train.items() for part in (f"--train.{name}", str(value))]
    return [command, *map(str, more), *data, *flags, "--eval.interval", "0", "--eval.final_validation", "false"]


@pytest.fixture(scope="module")
def nodes(corpus, tmp_path_factory) -> list[Path]:
    """Two nodes' disks with a run of the same name; one number differs in the second node's weights."""
    disks = [tmp_path_factory.mktemp("node") for _ in range(2)]
    assert (
        cli.main(words(corpus, "pretrain", "pico-llama", "--data.vocab_size", 300, "--out_dir", disks[0] / "run")) == 0
    )
    shutil.rmtree(disks[0] / "run" / "final")
    shutil.copytree(disks[0] / "run", disks[1] / "run")
    file = disks[1] / "run" / "step-00000001" / "lit_model.pth"
    weights = {name: tensor.clone() for name, tensor in load_weights(file.parent).items()}
    weights["transformer.h.0.norm_1.weight"][3] += 1
    save_weights(weights, file)
    seal(file.parent)  # intact, but another checkpoint
    return disks


CASES = {
    "checkpoint_dir": lambda disk: ["finetune_full", disk / "run/step-00000001", "--out_dir", disk.parent / "full"],
    "--initial_checkpoint_dir": lambda disk: [
        "pretrain", "--initial_checkpoint_dir", disk / "run/step-00000001", "--out_dir", disk.parent / "pretrain",
    ],
    "--resume": lambda disk: [
        "pretrain", "pico-llama", "--data.vocab_size", 300, "--resume", "auto", "--out_dir", "run",
    ],
}  # fmt: skip


SLOW = [pytest.param(flag, marks=pytest.mark.slow) for flag in ("--initial_checkpoint_dir", "--resume")]


@pytest.mark.parametrize("flag", ["checkpoint_dir", *SLOW])
def test_n4_nodes_that_would_load_different_weights_are_refused(corpus, nodes, flag, monkeypatch):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank, disk in enumerate(nodes):
        monkeypatch.chdir(disk)
        flags = [*words(corpus, *CASES[flag](disk)), "--num_nodes", "2"]
        processes.append(Forked(flags, NODE_RANK=str(rank), **where))
    errors = [finish(process, 300)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    (line,) = errors[0].splitlines()
    assert f": {flag}: {nodes[1]}" in line and "on rank 1" in line and f"{nodes[0]}" in line, line
