"""Failures before the process group exists, through the real command line: every rank ends in time."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from helpers.groups import free_port, read_until
from helpers.processes import PRETRAIN, common_flags, ended, failing, finish, flags_for, pretrain, start

from toolkit.cli import main
from toolkit.distributed import rendezvous

WRONG_FLAG = ["--train.micro_batchsize", "4"]
LINE = "--train.micro_batchsize: no such option; did you mean --train.micro_batch_size?"


def two_nodes(first: list[str], second: list[str], shared: list[str]):
    """Start two nodes of one process each, with different flags."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = ["--devices", "1", "--num_nodes", "2", *shared]
    return [
        pretrain(*shared, *flags, NODE_RANK=rank, **where) for rank, flags in zip("01", (first, second), strict=True)
    ]


def torchrun(program: str, *flags: str):
    port = f"--master_port={free_port()}"
    return start("-m", "torch.distributed.run", "--nproc_per_node", "2", port, program, *flags)


# ---- user errors before the rendezvous


def test_timeout_of_a_yaml_file_bounds_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "user_timeout", "")
    (tmp_path / "run.yaml").write_text("timeout: 0.05")
    assert main(["pretrain", "--config", str(tmp_path / "run.yaml"), *WRONG_FLAG]) == 2
    assert LINE in capsys.readouterr().err and rendezvous._timeout() == 3


def test_user_error_on_one_node_ends_the_others_with_its_message(corpus, tmp_path):
    nodes = two_nodes([], WRONG_FLAG, flags_for(corpus, tmp_path))
    for node in nodes:
        ended(node, 2, f"toolkit pretrain: node 1: {LINE}", within=120)


def test_user_error_on_one_node_alone_stays_no_longer_than_the_timeout(corpus, tmp_path):
    started = time.monotonic()
    flags = ["--devices", "1", "--num_nodes", "2", "--timeout", "0.05", *flags_for(corpus, tmp_path), *WRONG_FLAG]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended(pretrain(*flags, NODE_RANK="1", **where), 2, f"toolkit pretrain: node 1: {LINE}", within=120)
    assert time.monotonic() - started < 50


def test_sigterm_before_the_rendezvous_ends_the_other_nodes(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow_import.py").write_text("import time; print('importing', flush=True); time.sleep(600)\n")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ["--devices", "1", "--num_nodes", "2", *flags_for(corpus, tmp_path / "run")]
    other = pretrain(*flags, "--extensions", "slow_import", NODE_RANK="1", **where)
    first = pretrain(*flags, NODE_RANK="0", **where)
    read_until(other, "importing")
    other.send_signal(signal.SIGTERM)
    for node in (other, first):
        ended(node, 143, "toolkit pretrain: node 1: stopped by SIGTERM before training began", within=120)


@pytest.mark.slow
def test_user_error_on_rank_0_ends_the_others(corpus, tmp_path):
    """With a launcher's variables; rank 0 hosts the store and keeps it until all ranks have read it."""
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    flags = ["--devices", "1", "--num_nodes", "2", *flags_for(corpus, tmp_path)]
    second = pretrain(*flags, NODE_RANK="1", **launcher)
    ended(pretrain(*flags, *WRONG_FLAG, NODE_RANK="0", LOCAL_WORLD_SIZE="1", **launcher), 2, LINE, within=120)
    assert finish(second) == ("", "") and second.returncode == 2


def test_user_error_on_one_rank_of_mpirun_ends_the_others(corpus, tmp_path):
    """With ranks from a launcher that does not tell how many of them are on this node."""
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    flags = ["--devices", "2", *flags_for(corpus, tmp_path)]
    first = pretrain(*flags, RANK="0", LOCAL_RANK="0", **launcher)
    second = pretrain(*flags, *WRONG_FLAG, RANK="1", LOCAL_RANK="1", **launcher)
    ended(first, 2, f"toolkit pretrain: rank 1: {LINE}", within=120)
    finish(second)


@pytest.mark.slow
def test_user_error_on_one_torchrun_rank_is_reported(corpus, tmp_path):
    program = tmp_path / "wrong_flag.py"
    program.write_text(
        "import os, sys\nfrom toolkit import cli\n"
        f"sys.exit(cli.main(sys.argv[1:] + {WRONG_FLAG} * (os.environ['RANK'] == '1')))\n"
    )
    process = torchrun(str(program), *PRETRAIN[2:], *flags_for(corpus, tmp_path / "run"))
    _, err = finish(process, 120)
    assert process.returncode and f"toolkit pretrain: rank 1: {LINE}\n" in err


@pytest.mark.slow
def test_user_error_on_all_ranks_is_reported_once(corpus, tmp_path):
    process = torchrun(*PRETRAIN, *flags_for(corpus, tmp_path / "run"), *WRONG_FLAG)
    _, err = finish(process, 120)
    assert process.returncode and err.count(LINE) == 1


# ---- nodes that are not set up alike


@pytest.mark.slow
def test_mixture_with_other_weights_on_one_node_is_an_error(corpus, tmp_path):
    source = {"class_path": "TextFiles", "init_args": {"train_data_path": str(corpus), "vocab_size": 300}}
    options = []
    for weight in (0.5, 0.75):
        sources = {"a": {"weight": weight, "data": source}, "b": {"weight": 1 - weight, "data": source}}
        options.append(["--data", "Mixture", "--data.sources", json.dumps(sources)])
    nodes = two_nodes(*options, common_flags(tmp_path / "out", max_steps=2))
    errors = [finish(node, 120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], errors
    assert "--data.sources.a.weight 0.75: on rank 1, but 0.5 on rank 0; start every process" in errors[0]


EXTENSION = """
import torch
from toolkit.extension import Extension
EXTENSION = Extension(optimizers={{"Descent": "descent.Descent"}})
class Descent(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            torch._foreach_mul_([p.grad for p in group["params"]], {factor})
        super().step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_installed", [(True, True), (True, False)])
def test_other_code_of_an_extension_on_one_node_is_an_error(corpus, tmp_path, is_installed):
    flags = ["--devices", "1", "--num_nodes", "2", *flags_for(corpus, tmp_path / "out", max_steps=2)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = []
    for rank, is_used in enumerate(is_installed):
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        (folder / "descent.py").write_text(EXTENSION.format(factor=1 + rank))
        path = os.pathsep.join([str(folder), *sys.path])
        more = ["--extensions", "descent"] if is_used else []
        more += ["--optimizer.name", "Descent"] if all(is_installed) else []
        nodes.append(start(*PRETRAIN, *flags, *more, **where, NODE_RANK=str(rank), PYTHONPATH=path))
    errors = [finish(node, 120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], errors
    assert re.search(r"extension descent .*: on rank 1, but .* on rank 0; use the same versions and", errors[0]), errors


# ---- lost ranks and unresponsive stores


@pytest.mark.slow
@pytest.mark.parametrize(
    ("busy", "killed"),
    [(1, 1), pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(1, 0, marks=pytest.mark.slow)],
)
def test_node_killed_during_data_preparation_ends_the_others(tmp_path, busy, killed):
    nodes = two_nodes([], [], failing(tmp_path, busy, "preparing"))
    read_until(nodes[busy], "preparing")
    nodes[killed].kill()
    _, err = finish(nodes[1 - killed], 120)
    how = "lost contact with rank 0" if killed == 0 else "rank 1 exited or its node is unreachable"
    assert nodes[1 - killed].returncode == 1 and len(err.splitlines()) == 1 and how in err, err
    nodes[killed].communicate()


@contextmanager
def silent_server():
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept():
            while True:
                try:
                    connections.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.slow
def test_unresponsive_port_does_not_block_a_node_beyond_the_timeout(corpus, tmp_path):
    with silent_server() as port:
        where = {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        flags = ["--devices", "1", "--num_nodes", "2", "--timeout", "0.05", *flags_for(corpus, tmp_path)]
        missing = "no answer from rank 0 within 0.05 minutes"
        ended(pretrain(*flags, **where), 2, f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: {missing}", within=120)


@pytest.mark.slow
def test_unresponsive_store_ends_the_wait_after_the_timeout(tmp_path):
    """Rank 0 is stopped while it prepares data."""
    nodes = two_nodes([], [], ["--timeout", "0.05", *failing(tmp_path, 0, "preparing")])
    read_until(nodes[0], "preparing")
    nodes[0].send_signal(signal.SIGSTOP)
    try:
        ended(nodes[1], 1, "lost contact with rank 0", within=120)
    finally:
        os.killpg(nodes[0].pid, signal.SIGKILL)
        nodes[0].communicate()
