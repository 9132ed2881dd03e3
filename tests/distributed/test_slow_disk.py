"""A save may take longer than ``--timeout``: the ranks wait for it, and still detect one that is lost."""

import os
import re
import signal

import pytest
from helpers.cases import slow_except
from helpers.groups import Case, read_until, run_group
from helpers.processes import child_of, finish, flags_for, folders, pretrain

FSDP = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD"]
LAYOUTS = {
    "ddp": (0, ["--strategy", "ddp"]),
    "async": (0, ["--strategy", "ddp", "--train.async_save", "true"]),
    "full": (0, FSDP),
    "sharded": (0, [*FSDP, "--fsdp.state_dict_type", "sharded"]),
    "rank-1": (1, [*FSDP, "--fsdp.state_dict_type", "sharded"]),
}


@pytest.mark.parametrize("name", slow_except(["ddp"], LAYOUTS))
def test_ranks_wait_for_a_slow_disk(tmp_path, shared_flags, name):
    rank, layout = LAYOUTS[name]
    nodes = 2 if name == "ddp" else 1
    case = Case(name, [*layout, "--train.max_steps", "2"], nodes, fault=f"slow disk on rank {rank}")
    run_group(tmp_path, 2, [case], shared_flags)
    output = "".join(path.read_text() for path in tmp_path.glob("group-*/*.out"))
    assert folders(tmp_path / name) == {"final"}, output
    line = rf"waiting for rank {rank} to save final \(since \d+:\d+:\d+, \d s\)"
    logs = [path.read_text() for path in tmp_path.glob("group-*/*.out")]
    assert sum(re.search(line, log) is not None for log in logs) == nodes, output


@pytest.mark.slow
def test_ranks_wait_for_a_disk_that_is_slow_at_the_start(corpus, tmp_path):
    flags = [*flags_for(corpus, tmp_path, max_steps=2), "--timeout", "0.05"]
    process = pretrain("--devices", "2", *flags, "--callbacks", "helpers.faulty_callbacks.SlowStart", SLOW_DISK="5")
    out, err = finish(process)
    assert process.returncode == 0 and f"waiting for rank 0 to open {tmp_path}" in out and folders(tmp_path), out + err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "text"), [
    (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
    (signal.SIGSTOP, "no answer from rank 1 for 0.05 minutes"),
])  # fmt: skip
def test_rank_lost_during_a_slow_save_ends_the_run(corpus, tmp_path, number, text):
    flags = [*flags_for(corpus, tmp_path, max_steps=2), "--timeout", "0.05"]
    process = pretrain("--devices", "2", *flags, "--callbacks", "helpers.faulty_callbacks.SlowDisk", SLOW_DISK="9")
    read_until(process, "waiting for rank 0 to save")
    os.kill(child_of(process), number)
    _, err = finish(process)
    assert process.returncode == 1 and text in err, err
    assert not folders(tmp_path) and not list(tmp_path.glob(".tmp-*"))
