"""Launch and failure handling across ranks, through the real command line: a failure on one rank ends all."""

import os
import random
import re
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cases import has_slow_tests
from helpers.groups import free_port, losses, read_until
from helpers.processes import (
    PRETRAIN,
    Forked,
    child_of,
    ended,
    failing,
    finish,
    flags_for,
    folders,
    group_members,
    pretrain,
    start,
)
from torch import distributed as dist

from toolkit import cli
from toolkit.distributed import private_lightning, run_group, shutdown
from toolkit.distributed.launchers import PARENT
from toolkit.distributed.run_group import RunGroup, Timeouts
from toolkit.distributed.shutdown import ShutdownCoordinator
from toolkit.distributed.world import WorldInfo
from toolkit.errors import CallbackError, PeerLostError

TWO = ("--devices", "2", "--strategy", "fsdp")  # as auto chooses, which measures the memory first
ABORTING = "; aborting (see troubleshooting: hanging). --resume auto continues from"


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def resumes(corpus: Path, out: Path) -> None:
    """Run two more steps with --resume auto on two ranks."""
    newest = max(int(name.split("-")[1]) for name in folders(out))
    process = pretrain(*TWO, *flags_for(corpus, out, max_steps=newest + 2))
    stdout, err = finish(process)
    assert process.returncode == 0 and f"step {newest}" in stdout and "resuming from" in stdout, err
    assert "final" in folders(out)


# ---- lost or unresponsive ranks


def test_killed_rank_ends_the_run_and_it_resumes(corpus, tmp_path):
    process = pretrain(*TWO, *flags_for(corpus, tmp_path, save_interval=3))
    read_until(process, "step-00000003")
    os.kill(child_of(process), signal.SIGKILL)
    ended(process, 1, f"rank 1 was killed by SIGKILL{ABORTING} {tmp_path}/step-000000", within=25)
    resumes(corpus, tmp_path)


@pytest.mark.slow
def test_killed_rank_0_ends_the_other_ranks(corpus, tmp_path):
    process = pretrain(*TWO, *flags_for(corpus, tmp_path))
    read_until(process, "step 1/")
    process.kill()
    ended(process, -signal.SIGKILL, f"lost contact with rank 0{ABORTING}", within=25)


@pytest.mark.slow
def test_rank_0_killed_while_rank_1_starts_ends_both(corpus, tmp_path):
    """Its watchdog does not run yet: it sees that its launcher is gone when it begins."""
    process = start(*PRETRAIN, *TWO, *flags_for(corpus, tmp_path))
    while len(group_members(process)) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    _, err = finish(process, 90)  # without the watchdog, 10 minutes: the limit of a start
    assert process.returncode == -signal.SIGKILL and err.startswith("toolkit: lost contact with rank 0"), err


@pytest.mark.parametrize("rank", [slow(1), slow(0)])
def test_stopped_rank_ends_the_run_after_the_timeout(corpus, tmp_path, rank):
    process = pretrain(*TWO, *flags_for(corpus, tmp_path), "--timeout", "0.05")
    read_until(process, "step 1/")
    time.sleep(1)
    os.kill(process.pid if rank == 0 else child_of(process), signal.SIGSTOP)
    if rank == 1:
        ended(process, 1, f"no answer from rank 1 for 0.05 minutes (--timeout){ABORTING}", within=40)
        return
    deadline = time.monotonic() + 50
    while len(group_members(process)) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_members(process) == [process.pid]
    os.kill(process.pid, signal.SIGCONT)
    _, err = finish(process)
    assert process.returncode == 1 and len(err.splitlines()) == 2 and "Traceback" not in err
    assert "lost contact with rank 0" in err and "rank 1 exited with code 1" in err


@pytest.mark.slow
def test_rank_unresponsive_before_the_first_step_ends_the_run(tmp_path):
    process = pretrain(*TWO, "--timeout", "0.05", *failing(tmp_path, 1, "asleep"))
    ended(process, 1, "no answer from rank 1 for 0.05 minutes (--timeout)")


@pytest.mark.slow
def test_rank_unresponsive_while_data_is_prepared_ends_the_run(tmp_path):
    process = pretrain(*TWO, "--timeout", "0.05", *failing(tmp_path, 1, "preparing"))
    read_until(process, "preparing\n")
    started = time.monotonic()
    ended(process, 1, "no answer from rank 1 for 0.05 minutes")
    assert 15 < time.monotonic() - started < 50  # a limit of 20 s, neither --timeout nor the 60 s of a start


@pytest.mark.slow
def test_timeout_applies_to_every_process_group(tmp_path):
    program = """
import sys, time, torch
from datetime import timedelta
from torch import distributed as dist
from toolkit.distributed import ranks
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = dist.new_group([0, 1])
dist.barrier(group)
dist.barrier()
ranks.set_timeout(1.0)
if rank == 0:
    for each in (group, None):
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=each)
        except RuntimeError:
            print(0.9 < time.monotonic() - started < 250)  # by default 30 minutes
    store.set("done", "")
store.wait(["done"])
dist.destroy_process_group()
"""
    script, port = tmp_path / "program.py", str(free_port())
    script.write_text(program)
    other, first = (Forked([rank, port], script=script) for rank in "10")
    assert finish(first)[0].split() == ["True", "True"]
    finish(other)


# ---- signals


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGUSR1, "rank 1"),
        slow(signal.SIGTERM, "rank 0"),
        slow(signal.SIGTERM, "rank 1"),
        slow(signal.SIGINT, "all"),
    ],
)
def test_s3_signal_on_any_rank_saves_once_and_ends_all(corpus, tmp_path, number, to):
    process = pretrain(*TWO, *flags_for(corpus, tmp_path, save_interval=0))
    read_until(process, "step 1/")
    if to == "all":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if to == "rank 0" else child_of(process), number)
    out = ended(process, 128 + number, "is saved; resume with --resume auto", within=25)
    assert len(folders(tmp_path)) == 1 and out.count("saved ") == 1
    if to == "all":
        resumes(corpus, tmp_path)


# ---- errors on one rank


def test_exception_on_one_rank_ends_all_with_one_traceback(tmp_path):
    process = pretrain(*TWO, *failing(tmp_path, 1, "row"))
    _, err = finish(process)
    assert process.returncode == 1
    assert err.count("Traceback (most recent call last)") == 1 and len(re.findall(r"^ValueError: row", err, re.M)) == 1
    assert re.search(r"^toolkit pretrain: rank 1: ValueError: row \d+ is broken$", err, re.M), err


@pytest.mark.parametrize("rank", [0, slow(1)])
def test_user_error_on_one_rank_is_one_line(tmp_path, rank):
    process = pretrain(*TWO, *failing(tmp_path, rank, "prepare"))
    ended(process, 2, "--data.how prepare: this file is broken; take another")


def test_user_error_before_launch_starts_no_process(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(private_lightning._Launcher, "launch", lambda *_: pytest.fail("processes were started"))
    flags = flags_for(corpus, tmp_path / "run", global_batch_size=7)
    assert cli.main([*PRETRAIN[2:], "--devices", "2", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--train.global_batch_size 7" in line and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_s1_full_disk_ends_all_ranks_with_one_line(corpus, small_disk, state_dict_type):
    out = small_disk("3m") / "run"
    flags = flags_for(corpus, out, save_interval=3, keep_last=0)
    process = pretrain(*TWO, "--fsdp.state_dict_type", state_dict_type, *flags)
    ended(process, 2, "disk" if state_dict_type == "full" else "")
    kept = folders(out)
    assert kept and "final" not in kept
    assert not [path for path in out.iterdir() if path.name.startswith(".tmp-")]


# ---- launchers


@pytest.fixture(scope="module")
def two_devices(corpus, tmp_path_factory, request) -> list[float]:
    """Return the losses of ``--devices 2``, of the real command with the slow tests."""
    folder = tmp_path_factory.mktemp("devices")
    flags = ["--devices", "2", *flags_for(corpus, folder, max_steps=4)]
    process = start(*PRETRAIN, *flags) if has_slow_tests(request) else pretrain(*flags)
    out, err = finish(process)
    assert (process.returncode, err) == (0, "")
    lines = [line for line in out.splitlines() if "faster on this CPU" not in line]  # a hint on CPUs with AMX
    ends = [line[:8] for line in lines[-5:]]
    assert len(lines) == len(set(lines)) and ends == ["finished", "report: ", *["  toolki"] * 3]
    return losses(folder)


def finish_all(processes: list[subprocess.Popen], out: Path, expected: list[float]) -> None:
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert losses(out) == pytest.approx(expected, rel=1e-5)
    assert [stdout.count("finished after") for stdout, _ in outputs] == [1] + [0] * (len(outputs) - 1)
    assert all(stdout == "" for stdout, _ in outputs[1:]) and all(err == "" for _, err in outputs)


@pytest.mark.slow
def test_torchrun_matches_devices_flag(corpus, tmp_path, two_devices):
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={free_port()}"]
    process = start(*torchrun, *PRETRAIN, *flags_for(corpus, tmp_path, max_steps=4))
    finish_all([process], tmp_path, two_devices)


@pytest.mark.slow
def test_torchrun_restart_ignores_errors_of_the_failed_attempt(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "1"]
    flags = [*failing(tmp_path, 1, "once"), "--train.max_steps", "2"]
    process = start(*torchrun, f"--master_port={free_port()}", *PRETRAIN, *flags)
    out, err = finish(process, 120)
    assert process.returncode == 0, err
    assert err.count("is broken") and "finished after 2 steps" in out


def test_two_nodes_match_two_devices(corpus, tmp_path, two_devices):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ["--num_nodes", "2", "--devices", "1", *TWO[2:], *flags_for(corpus, tmp_path, max_steps=4)]
    finish_all([pretrain(*flags, NODE_RANK=rank, **where) for rank in "01"], tmp_path, two_devices)


@pytest.mark.parametrize("per_node", [{}, slow({"SLURM_NTASKS_PER_NODE": "2"})])
def test_slurm_tasks_match_devices_flag(corpus, tmp_path, two_devices, per_node):
    # the port is 15000 + the last four digits of the job
    job = {
        "SLURM_JOB_ID": str(random.randrange(10_000)),
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
    } | per_node
    flags = flags_for(corpus, tmp_path, max_steps=4)
    tasks = [pretrain(*TWO, *flags, **job, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]
    finish_all(tasks, tmp_path, two_devices)


@pytest.mark.slow
@pytest.mark.parametrize("node_rank", ["1", "0"])
def test_rendezvous_timeout_names_the_address_and_the_missing_rank(corpus, tmp_path, node_rank):
    port = str(free_port())
    where = {"NODE_RANK": node_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    flags = ["--devices", "1", "--num_nodes", "2", "--timeout", "0.05", *flags_for(corpus, tmp_path)]
    missing = "rank 1 did not connect" if node_rank == "0" else "no answer from rank 0"
    ended(pretrain(*flags, **where), 2, f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: {missing} within 0.05 minutes")


# ---- S5 content-keyed-cache: preparation order


def groups_of_two(nodes: int = 1, minutes: float | str = "auto") -> list[RunGroup]:
    """Return the groups of two ranks connected to a real store, in one process."""
    port, groups = free_port(), []
    for rank in (0, 1):
        place = (2, 1, 0, rank) if nodes == 1 else (1, 2, rank, 0)
        group = RunGroup(SimpleNamespace(), WorldInfo(*place, "manual", False), Timeouts.from_minutes(minutes))
        store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=10), wait_for_workers=False)
        group._store = group.shutdown.store = store
        groups.append(group)
    return groups


@pytest.mark.parametrize("nodes", [1, 2])
def test_s5_rank_0_prepares_first_while_others_wait_with_a_heartbeat(monkeypatch, capsys, nodes):
    monkeypatch.setattr(run_group, "_HEARTBEAT", 0.2)
    first, second = groups_of_two(nodes)
    order: list[str] = []

    def slow() -> None:
        time.sleep(0.7)
        order.append("rank 0")

    waiting = threading.Thread(target=lambda: second.prepare_in_turns(lambda: order.append("rank 1")))
    waiting.start()
    first.prepare_in_turns(slow)
    waiting.join(5)
    assert order == ["rank 0", "rank 1"]
    assert capsys.readouterr().out.count("waiting for the data to be prepared") in (2, 3)


def test_s5_failed_preparation_ends_the_wait():
    first, second = groups_of_two()
    first.shutdown._publish("ended")
    with pytest.raises(PeerLostError):
        second.prepare_in_turns(lambda: pytest.fail("was called"))


def test_watchdog_detects_through_the_store_that_another_node_ended():
    first, second = groups_of_two(nodes=2)
    assert not second.shutdown._run_has_ended()
    first.shutdown._publish("ended")
    second.shutdown._listen()
    assert second.shutdown._run_has_ended()


def test_unresponsive_store_does_not_block_the_watchdog(monkeypatch):
    """A stopped rank 0: store queries block forever."""
    coordinator = ShutdownCoordinator(WorldInfo(1, 2, 1, 0, "manual", False))
    asked, left = threading.Event(), threading.Event()
    coordinator.store = SimpleNamespace(check=lambda keys: asked.set() or threading.Event().wait(30))
    monkeypatch.setattr(shutdown, "KILL_AFTER_S", 0.1)
    monkeypatch.setattr(shutdown.os, "_exit", lambda code: left.set())
    coordinator.watch()
    assert asked.wait(5)
    coordinator._started.set()
    assert left.wait(5)
    coordinator.done()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_rank_ends_if_its_launcher_was_killed_before_the_watchdog_began(monkeypatch, local_rank):
    """A variable that rank 0 inherited from an ended process says nothing: nobody launched it."""
    launcher = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    launcher.stdout.read()  # exited, and not yet waited for
    monkeypatch.setenv(PARENT, str(launcher.pid))
    coordinator = ShutdownCoordinator(WorldInfo(2, 1, 0, local_rank, "manual", False))
    left = threading.Event()
    monkeypatch.setattr(shutdown, "KILL_AFTER_S", 0.1)
    monkeypatch.setattr(shutdown.os, "_exit", lambda code: left.set())
    coordinator.watch()
    assert left.wait(5 if local_rank else 1) == bool(local_rank)
    coordinator.done()
    launcher.wait()


def test_lost_rank_in_a_callbacks_collective_is_a_lost_rank():
    lost, own = RuntimeError("[/gloo/pair.cc:553] Connection closed by peer"), RuntimeError("broken")
    for cause in (lost, own):
        error = CallbackError("callback ReplicaCheck failed")
        error.__cause__ = cause
        assert shutdown._is_peer_loss(error) == (cause is lost)
    assert shutdown._is_peer_loss(RuntimeError("Application timeout caused pair closure"))  # after a cut connection


def test_roll_call_names_missing_ranks():
    first, _ = groups_of_two(minutes=0.001)
    with pytest.raises(TimeoutError, match="^rank 1$"):
        first._wait_for_ranks("here", "")
