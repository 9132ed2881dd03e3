"""Elastic restart: torchrun agents as nodes. One is killed with its rank; the others continue."""

import os
import signal
from pathlib import Path
from subprocess import Popen

import pytest
from helpers.groups import free_port, losses, read_until
from helpers.processes import PRETRAIN, finish, flags_for, folders, pretrain, start

SHARDED = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD", "--fsdp.state_dict_type", "sharded"]


def flags(corpus: Path, out: Path) -> list[str]:
    return [*SHARDED, *flags_for(corpus, out, global_batch_size=12, max_steps=60, save_interval=10)]


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> list[float]:
    """Return the losses of the same run on two devices, without a restart."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = pretrain("--devices", "2", *flags(corpus, folder))
    _, err = finish(process)
    assert process.returncode == 0, err
    return losses(folder)


def agent(port: int, n_nodes: int, is_host: bool, *flags: str) -> Popen:
    """Start a node: a torchrun agent with one rank. The host keeps the state of the agents' rendezvous."""
    options = f"--nnodes 1:{n_nodes} --max_restarts 3 --rdzv_backend c10d --rdzv_id elastic --local_addr 127.0.0.1 "
    options += f"--rdzv_endpoint 127.0.0.1:{port} "
    options += f"--rdzv_conf is_host={is_host},last_call_timeout=20,keep_alive_interval=1"
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return start("-m", "torch.distributed.run", *options.split(), *PRETRAIN, *flags, **environment)


def kill_node(process: Popen) -> None:
    """Kill an agent and its rank, which has its own session."""
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


# With three nodes, the two that remain count their restarts differently.
@pytest.mark.slow
@pytest.mark.parametrize(("n_nodes", "killed"), [(2, 0), (3, 2)])
def test_n3_a_run_continues_on_the_nodes_that_remain(corpus, tmp_path, undisturbed, n_nodes, killed):
    port, host = free_port(), (killed + 1) % n_nodes
    agents = [agent(port, n_nodes, i == host, *flags(corpus, tmp_path)) for i in range(n_nodes)]
    read_until(agents[0], "step-00000020")  # torchrun numbers the nodes by address, then by pid
    kill_node(agents[killed])
    remaining = [process for i, process in enumerate(agents) if i != killed]
    ended = [finish(process) for process in remaining]
    assert [process.returncode for process in remaining] == [0] * len(remaining), ended
    devices, accumulated = n_nodes - 1, 6 // (n_nodes - 1)
    text = f"x {devices} device{'s' if devices > 1 else ''} x {accumulated} accumulated"
    assert text in ended[0][0] and "final" in folders(tmp_path)
    assert losses(tmp_path) == pytest.approx(undisturbed, rel=1e-5)
