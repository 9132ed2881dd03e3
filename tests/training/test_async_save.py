"""`--train.async_save`: what is written while training goes on is the state of its step, and nothing of it is lost."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.groups import Case, losses, run_group
from helpers.processes import common_flags, finish, folders, pretrain
from helpers.slow_writes import writes_that_last
from helpers.small_runs import text_data, write_base, write_rows

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.run.host_copy import HostCopies, named_tensors
from toolkit.checkpoints.run.sharded import read_sharded
from toolkit.checkpoints.store import complete_checkpoints
from toolkit.checkpoints.weights import load_state, load_weights
from toolkit.config import EvalArgs, OptimizerArgs, TrainArgs
from toolkit.data import TextFiles
from toolkit.distributed import ranks
from toolkit.distributed.signals import restore_handlers_on_exit
from toolkit.errors import GuardError, PeerLostError, StoppedBySignalError, UserError
from toolkit.planning.run_args import RunArgs
from toolkit.training import engine
from toolkit.training.callbacks import Callback
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.engine import run_training
from toolkit.training.pending_save import PendingSave

ASYNC = ["--train.async_save", "true"]


def train(corpus: Path, out: Path, *callbacks: Callback, **changed) -> None:
    options = {
        "global_batch_size": 4, "micro_batch_size": 2, "max_seq_length": 32, "max_steps": 9, "save_interval": 3,
        "keep_last": 0, "async_save": True,
    }  # fmt: skip
    args = RunArgs(
        command="pretrain", model_name="pico-llama", accelerator="cpu", devices=1, out_dir=str(out),
        data=TextFiles(train_data_path=str(corpus), vocab_size=300), train=TrainArgs(**(options | changed)),
        eval=EvalArgs(interval=0, final_validation=False), optimizer=OptimizerArgs(),
    )  # fmt: skip
    run_training(args, callbacks)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, by file."""
    weights = load_state(folder / ADAPTERS) if (folder / ADAPTERS).exists() else load_weights(folder)
    found = {f"weights {name}": tensor for name, tensor in weights.items()}
    found |= dict(named_tensors(load_state(folder / "trainer" / "state.pth"), "state"))
    if (folder / "trainer" / "optimizer").is_dir():
        found |= {f"shards {name}": t for name, t in read_sharded(folder / "trainer" / "optimizer").items()}
    return found


def sizes_of(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if "pth" in p.name}


def assert_same_checkpoints(a: Path, b: Path) -> None:
    """Compare all checkpoints of two runs: files of tensors with their sizes, and every tensor."""
    assert folders(a) == folders(b) and len(folders(a)) > 2
    for name in folders(a):
        assert sizes_of(a / name) == sizes_of(b / name)
        first, second = state_of(a / name), state_of(b / name)
        assert first.keys() == second.keys() and len(first) > 10
        assert all(torch.equal(first[key], second[key]) for key in first), name


class Saved(Callback):
    """Notes each checkpoint with the step at which it was complete, and the timeout while its state is taken."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.timeouts: list[float] = []

    def state_dict(self) -> dict:
        self.timeouts.append(ranks.timeout())
        return {}

    def on_checkpoint_saved(self, trainer, folder) -> None:
        assert (folder / "COMPLETE").exists() and threading.current_thread() is threading.main_thread()
        self.steps[folder.name] = trainer.progress.step


def test_s2_checkpoint_written_during_training_has_the_state_of_its_step(corpus, tmp_path):
    train(corpus, tmp_path / "sync", before := Saved(), async_save=False)
    saved = Saved()
    with writes_that_last(2):
        train(corpus, tmp_path / "async", saved)
    assert {*before.timeouts[1:], *saved.timeouts[1:]} == {1800}, "the first is of the start"
    first, second, final = saved.steps.items()
    assert first[0] == "step-00000003" and 5 <= first[1] < 8, "after two more steps"
    assert second[0] == "step-00000006" and second[1] >= 8 and final == ("final", 9)
    assert_same_checkpoints(tmp_path / "sync", tmp_path / "async")
    assert losses(tmp_path / "sync") == losses(tmp_path / "async")


def test_save_that_is_due_waits_for_the_one_before(corpus, tmp_path):
    waits, saved = [], Saved()
    with writes_that_last(100, lambda: waits.append(dict(saved.steps))):
        train(corpus, tmp_path, saved, save_interval=2, keep_last=2, max_steps=7)
    assert list(saved.steps) == ["step-00000002", "step-00000004", "step-00000006", "final"]
    assert [len(done) for done in waits] == [0, 1, 2], "each waits once: two saves, and the end of the run"
    assert saved.steps["step-00000002"] == 4
    assert folders(tmp_path) == {"step-00000004", "step-00000006", "final"}


class Failing(Callback):
    """Ends the run after step 4, while the checkpoint of step 3 is being written."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, trainer, metrics) -> None:
        if trainer.progress.step == 4 and self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.progress.step == 4:
            raise GuardError("not finite") if self.how == "guard" else RuntimeError("broken")


def test_what_is_being_written_is_complete_when_the_run_is_cut_short(corpus, tmp_path):
    cases = {
        "guard": (GuardError, set()),
        "error": (Exception, set()),
        "signal": (StoppedBySignalError, {"step-00000004"}),
    }
    for how, (error, more) in cases.items():
        with writes_that_last(100), restore_handlers_on_exit(), pytest.raises(error):
            train(corpus, tmp_path / how, Failing(how))
        assert folders(tmp_path / how) == {"step-00000003"} | more, how
        load_weights(tmp_path / how / "step-00000003")


def test_save_that_fails_after_an_error_is_tried_once(corpus, tmp_path, monkeypatch, capsys):
    def diverge(*args):
        def read():
            if len(steps) == 4:
                raise GuardError("the gradient")
            return result()

        steps.append(args)
        result = step(*args)
        return read

    def lose_peer(checkpointer, pending):
        wait(checkpointer, pending)
        raise PeerLostError("rank 1 is lost")

    steps, step, wait = [], engine.launch_step, Checkpointer._wait
    monkeypatch.setattr(engine, "launch_step", diverge)
    monkeypatch.setattr(Checkpointer, "_wait", lose_peer)
    with writes_that_last(100), pytest.raises(GuardError, match="step 4 is not finite: the gradient"):
        train(corpus, tmp_path)
    assert capsys.readouterr().out.count("note: the save in progress failed as well: rank 1 is lost") == 1


def test_s1_failed_write_ends_the_run_and_keeps_the_previous_checkpoint(corpus, tmp_path, monkeypatch):
    def full(self):
        write(self)
        if self.folder.name == "step-00000006":
            self._error = OSError(28, "No space left on device")

    write = PendingSave.write
    monkeypatch.setattr(PendingSave, "write", full)
    saved = Saved()
    with writes_that_last(1), pytest.raises(UserError, match="No space left on device: .* step-00000003 .* is kept"):
        train(corpus, tmp_path, saved, max_steps=100)
    assert list(saved.steps) == ["step-00000003"] and folders(tmp_path) == {"step-00000003"}
    assert not list(tmp_path.glob(".tmp-*"))


def test_tensors_in_lists_of_the_optimizer_state_are_copied():
    module = torch.nn.Linear(2, 2)
    optimizer, copies = torch.optim.SGD(module.parameters()), HostCopies()
    optimizer.state[module.weight] = {"preconditioners": [torch.ones(2), {"left": torch.ones(3)}]}
    copies.begin(module, optimizer)
    first, inner = copies.copy(optimizer.state[module.weight], "optimizer")["preconditioners"]
    optimizer.state[module.weight]["preconditioners"][0].zero_()
    optimizer.state[module.weight]["preconditioners"][1]["left"].zero_()
    assert first.tolist() == [1, 1] and inner["left"].tolist() == [1, 1, 1]


def test_async_save_without_anything_to_save_is_an_error():
    with pytest.raises(UserError, match="--train.async_save true: has no effect"):
        TrainArgs(async_save=True, save_interval=0)
    TrainArgs(async_save=True, save_interval=0, save_every_minutes=1)


FSDP = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD"]
LAYOUTS = {
    "full": FSDP,
    "sharded": [*FSDP, "--fsdp.state_dict_type", "sharded"],
    "ddp": ["--strategy", "ddp"],
    "grad-op": ["--strategy", "fsdp", "--fsdp.sharding_strategy", "SHARD_GRAD_OP"],
    "mixed": [*FSDP, "--precision", "bf16-mixed"],
    "offloaded": [*FSDP, "--fsdp.cpu_offload", "true", "--fsdp.state_dict_type", "sharded"],
}


def check_layouts(folder: Path, names: list[str], shared: list[str], command: str = "pretrain") -> None:
    steps = ["--train.save_interval", "2", "--train.keep_last", "0", "--train.max_steps", "5"]
    cases = []
    for name in names:
        fault = "offload on a CPU" if name == "offloaded" else None
        cases += [Case(f"{name}-sync", [*LAYOUTS[name], *steps], fault=fault, command=command)]
        cases += [Case(f"{name}-async", [*LAYOUTS[name], *steps, *ASYNC], fault="slow writes", command=command)]
    run_group(folder, 2, cases, shared)
    for name in names:
        assert_same_checkpoints(folder / f"{name}-sync", folder / f"{name}-async")


@pytest.fixture
def shared_flags(corpus) -> list[str]:
    return [
        "pico-llama", "--accelerator", "cpu", *text_data(corpus), "--train.global_batch_size", "4",
        "--train.micro_batch_size", "2", "--train.max_seq_length", "32", "--eval.interval", "0",
    ]  # fmt: skip


@pytest.mark.slow
def test_s2_ranks_write_the_shards_of_the_step_during_training(tmp_path, shared_flags):
    check_layouts(tmp_path, ["sharded"], shared_flags)


@pytest.mark.slow
def test_s2_every_layout_writes_the_state_of_the_step_during_training(corpus, tmp_path, shared_flags):
    check_layouts(tmp_path, ["full", "ddp", "grad-op", "mixed"], shared_flags)
    (tmp_path / "base").mkdir()
    base, rows = write_base(tmp_path / "base", corpus), write_rows(tmp_path)
    flags = [
        str(base),
        "--data",
        "JSON",
        "--data.json_path",
        str(rows),
        "--accelerator",
        "cpu",
        "--data.prompt_style",
        "plain",
    ]
    flags += ["--train.global_batch_size", "4", "--train.micro_batch_size", "2", "--eval.interval", "0"]
    check_layouts(tmp_path / "lora", ["ddp"], flags, "finetune_lora")


# ---- kills


def kill_flags(out: Path, corpus: Path, ranks: int, kind: str, more: list[str]) -> list[str]:
    flags = [
        *text_data(corpus),
        *common_flags(out, max_steps=40 if ranks == 2 else 120, save_interval=2, keep_last=2),
        *more,
    ]
    strategy = ["--devices", "2", "--strategy", "fsdp", "--fsdp.state_dict_type", kind] if ranks == 2 else []
    return [*flags, *strategy]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kind"), [(1, "full"), (2, "full"), (2, "sharded")])
def test_s1_s2_run_killed_at_random_instants_of_the_write_is_bit_equal(corpus, tmp_path, ranks, kind):
    """SIGKILL of all processes while the temporary folder of a checkpoint is there."""
    whole = pretrain(*kill_flags(tmp_path / "whole", corpus, ranks, kind, []))
    _, errors = finish(whole)
    assert whole.returncode == 0, errors
    out, chance, n_kills, n_mid_write = tmp_path / "killed", random.Random(ranks), 0, 0
    while True:
        process, seen, at = pretrain(*kill_flags(out, corpus, ranks, kind, ASYNC)), set(), chance.randint(1, 4)
        while process.poll() is None and len(seen) < at:  # the at-th checkpoint that it writes
            seen |= {path.name for path in unfinished(out)}
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.01))
        if process.poll() is None:
            n_mid_write += bool(unfinished(out))
            with suppress(ProcessLookupError):  # it has ended in the meantime
                os.killpg(process.pid, signal.SIGKILL)
            n_kills += 1
        _, errors = finish(process)
        for _, folder in complete_checkpoints(out):
            state_of(folder)
        if process.returncode != -signal.SIGKILL:
            break
    assert process.returncode == 0, errors
    print(f"{ranks} rank(s), {kind}: {n_kills} kills, {n_mid_write} with an unfinished checkpoint")
    assert n_kills
    assert losses(out) == losses(tmp_path / "whole")
    first, second = state_of(out / "final"), state_of(tmp_path / "whole" / "final")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def unfinished(out: Path) -> list[Path]:
    return list(out.glob(".tmp-*step-*"))
