"""The helpers for scripts: each with two ranks, under each launcher, and alone."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.groups import free_port, start_ranks
from torch import distributed as dist

import toolkit
from toolkit.distributed import script
from toolkit.errors import UserError

RESULTS = """
import json
import torch
import toolkit

toolkit.setup_distributed()
rank, size = toolkit.get_rank(), toolkit.get_world_size()


@toolkit.main_process_only
def once(value):
    return value


def reduced(op):
    return toolkit.all_reduce(torch.tensor([1.0 + rank, 4.0 - rank]), op).tolist()


toolkit.barrier()
seen = {
    "ranks": [rank, toolkit.get_local_rank(), size, toolkit.is_main_process()],
    "reduced": {op: reduced(op) for op in ("sum", "mean", "min", "max", "product", torch.distributed.ReduceOp.SUM)},
    "gathered": torch.stack(toolkit.all_gather(torch.tensor([[rank, 7]]).mT)).flatten().tolist(),
    "sent": [toolkit.broadcast(torch.tensor([rank]), src).item() for src in range(size)],
    "once": once(5),
}
toolkit.setup_distributed()  # nothing to do
toolkit.cleanup_distributed()
seen["after"] = [torch.distributed.is_initialized(), toolkit.all_reduce(torch.tensor(rank)).item()]
seen["reduced"] = list(seen["reduced"].values())
"""
ALONE = {
    "ranks": [0, 0, 1, True],
    "reduced": [[1.0, 4.0]] * 6,
    "gathered": [0, 7],
    "sent": [0],
    "once": 5,
    "after": [False, 0],
}


def of_two(rank: int) -> dict:
    return {
        "ranks": [rank, rank, 2, rank == 0],
        "reduced": [[3.0, 7.0], [1.5, 3.5], [1.0, 3.0], [2.0, 4.0], [2.0, 12.0], [3.0, 7.0]],
        "gathered": [0, 7, 1, 7],
        "sent": [0, 1],
        "once": 5 if rank == 0 else None,
        "after": [False, rank],
    }


def results() -> dict:
    space: dict = {}
    exec(RESULTS, space)
    return space["seen"]


def rank_main(rank: int, port: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    assert results() == of_two(rank)


def test_helpers_on_two_ranks_and_alone():
    start_ranks(rank_main, (free_port(),), 2)
    assert results() == ALONE and not dist.is_initialized()
    with pytest.raises(UserError, match=r"op avg: must be one of .*"):
        toolkit.all_reduce(torch.ones(1), "avg")


def test_a_second_group_does_not_read_addresses_of_the_first(monkeypatch):
    """torchrun's store outlives a group: a rank could connect to the closed port of the other's first group."""
    stores, shared = [], dist.HashStore()
    monkeypatch.setattr(script, "open_store", lambda *args, **options: shared)
    monkeypatch.setattr(script, "create_process_group", lambda store, *args: stores.append(store))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2"),
                        ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):  # fmt: skip
        monkeypatch.setenv(name, value)
    toolkit.setup_distributed()
    toolkit.setup_distributed()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(script, "_setups", iter([0]))  # another attempt's process
    toolkit.setup_distributed()
    stores[0].set("address", "closed")
    assert [store.check(["address"]) for store in stores] == [True, False, False]


TRAIN = """
toolkit.setup_distributed()
rows = torch.arange(2000).unfold(0, 9, 9) % 50
model = toolkit.ModelConfig(vocab_size=50, block_size=8, n_layer=1, n_embd=16, n_head=2)
options = {"max_steps": 2, "global_batch_size": 8, "micro_batch_size": 2}
toolkit.train(model, rows, train=options, accelerator="cpu", devices=DEVICES, out_dir="out")
connected = toolkit.all_reduce(torch.tensor(toolkit.get_rank() + 1)).item()
toolkit.rank_print(json.dumps([seen, toolkit.get_rank(), toolkit.get_world_size(), connected]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun", "toolkit"])
def test_helpers_under_every_launcher_and_around_a_run(launcher, tmp_path):
    """toolkit's own launcher connects the processes in train(); before, each is on its own."""
    file = tmp_path / "script.py"
    is_builtin = launcher == "toolkit"
    text = (RESULTS.replace("toolkit.setup_distributed()\n", "") if is_builtin else RESULTS) + TRAIN
    file.write_text(text.replace("DEVICES", "2" if is_builtin else "'auto'"))
    commands = [[sys.executable, file.name]]
    environments = [os.environ]
    if launcher == "torchrun":
        commands = [[sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", file.name]]
    if launcher == "srun":
        slurm = {
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
        }
        slurm |= {"SLURM_JOB_NAME": "train", "MASTER_PORT": str(free_port())}
        ids = ("SLURM_PROCID", "SLURM_LOCALID")
        commands, environments = commands * 2, [os.environ | slurm | dict.fromkeys(ids, str(rank)) for rank in range(2)]
    running = [
        subprocess.Popen(command, cwd=tmp_path, env=e, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, e in zip(commands, environments, strict=True)
    ]
    output = "".join(process.communicate(timeout=240)[0] for process in running)
    assert not any(process.returncode for process in running), output
    lines = dict(re.findall(r"^\[rank (\d)\] (\[\{.*)$", output, re.MULTILINE))
    for rank in range(2):
        seen, *after = json.loads(lines[str(rank)])
        assert after == [rank, 2, 3]
        assert is_builtin or seen == of_two(rank)
    assert (tmp_path / "out/final/COMPLETE").exists()
