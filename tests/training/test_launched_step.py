"""The host reads a step's result after it has launched the next step: on CUDA by default, here forced on a CPU."""

import ast
import copy
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers.compare_runs import assert_same_weights, curve, rows_of
from helpers.groups import Case, run_group
from helpers.small_runs import text_data
from helpers.sources import FILES

from tests.training.test_run import arguments, folders
from toolkit.config import OptimizerArgs
from toolkit.distributed.signals import restore_handlers_on_exit
from toolkit.errors import GuardError, StoppedByFileError, StoppedBySignalError
from toolkit.objectives import NextToken
from toolkit.objectives.inputs import original_module
from toolkit.training import control_files, engine, launched_step
from toolkit.training.callbacks import Callback
from toolkit.training.engine import run_training

# The default run of a GPU: loggers, a row of each step, validations and saves; and an average.
TRAIN = {"ema": 0.8, "max_steps": 12, "save_interval": 4, "keep_last": 0, "log_interval": 1}
EVALUATION = {"interval": 5}
DRAINED = {1, 4, 5, 8, 10, 12}  # the first step, saves, validations and the last step


@pytest.fixture
def late(monkeypatch):
    """Read late on a CPU; return what the host does, and a dict of functions to call after the launch of a step."""
    monkeypatch.setattr(launched_step, "LATE_ON", {"cpu"})
    monkeypatch.setattr(control_files, "LOOK_EVERY_S", 0.0)
    launch, seen = engine.launch_step, SimpleNamespace(order=[], then={})

    def recorded(*args):
        result, step = launch(*args), sum(what == "launch" for what, _ in seen.order) + 1
        seen.order.append(("launch", step))
        seen.then.get(step, lambda: None)()

        def read():
            seen.order.append(("read", step))
            return result()

        return read

    monkeypatch.setattr(engine, "launch_step", recorded)
    return seen


class AfterSteps(Callback):
    """Keeps the weights and their averages after each step."""

    def __init__(self):
        self.weights = {}

    def on_step_end(self, trainer, metrics):
        module = original_module(trainer.model)
        trained = copy.deepcopy(module.state_dict())
        with trainer.evaluation_weights():
            self.weights[trainer.progress.step] = trained, copy.deepcopy(module.state_dict())


@pytest.fixture(scope="module")
def at_once(corpus, tmp_path_factory):
    """The same run whose host waits for each step: its folder, and the weights after each step."""
    out, after = tmp_path_factory.mktemp("at-once") / "run", AfterSteps()
    run_training(arguments(corpus, out, train=TRAIN, evaluation=EVALUATION), [after])
    return SimpleNamespace(out=out, weights=after.weights)


def late_arguments(corpus, out, **train):
    return arguments(corpus, out, train=TRAIN | train, evaluation=EVALUATION)


def require_equal(run, reference, without=()):
    """Every column but times, and every checkpoint of the run, with its optimizer state and average."""
    assert str(curve(run)) == str(curve(reference))  # NaN, where no validation is due, is not equal to itself
    for name in folders(run) - set(without):
        assert_same_weights(run / name, reference / name)
        states = [torch.load(path / name / "trainer" / "state.pth", weights_only=True) for path in (run, reference)]
        torch.testing.assert_close(*(state["optimizer"]["state"] for state in states), rtol=0, atol=0)


def test_rows_and_checkpoints_are_equal_and_each_step_is_launched_before_the_one_before_is_read(
    corpus, tmp_path, at_once, late
):
    started = time.perf_counter()
    run_training(replace(late_arguments(corpus, tmp_path / "run"), logger_name="csv,tensorboard"))
    wall_seconds = time.perf_counter() - started
    assert folders(tmp_path / "run") == folders(at_once.out)
    require_equal(tmp_path / "run", at_once.out)
    expected = []
    for step in range(1, 13):
        expected += [("launch", step)] + [("read", step - 1)] * (step > 1 and step - 1 not in DRAINED)
        expected += [("read", step)] * (step in DRAINED)
    assert late.order == expected
    rows = rows_of(tmp_path / "run")
    seconds = [float(row["seconds"]) for row in rows]
    speeds = [256 / float(row["tokens_per_sec"]) for row in rows]
    assert seconds[0] > 0 and seconds[-1] < wall_seconds and list(accumulate(speeds)) == pytest.approx(seconds)
    assert sum(float(row["step_s"]) for row in rows) < wall_seconds and all(float(row["data_wait_s"]) for row in rows)


@dataclass
class NaNAt(NextToken):
    """Next-token prediction with a loss of NaN in a step."""

    step: int = 7

    def sums(self, model, batch, device):
        calls.extend([1] * model.training)
        factor = float("nan") if model.training and len(calls) == 2 * self.step else 1.0
        return {name: value * factor for name, value in super().sums(model, batch, device).items()}


calls: list[int] = []


def test_n7_fault_changes_neither_its_step_nor_the_next_and_is_named(corpus, tmp_path, at_once, late):
    class AtTheEnd(AfterSteps):
        on_step_end = Callback.on_step_end  # it would let the host wait

        def on_exception(self, trainer, error):
            super().on_step_end(trainer, {})

    calls.clear()
    args, end = late_arguments(corpus, tmp_path / "run", save_interval=3), AtTheEnd()
    with pytest.raises(GuardError, match=r"step 7 is not finite: .*loss nan on rank 0, its samples: \[\d+, .*\]") as e:
        run_training(replace(args, objective=NaNAt()), [end])
    assert e.value.exit_code == 3 and late.order[-2:] == [("launch", 8), ("read", 7)]
    assert folders(tmp_path / "run") == {"step-00000003", "step-00000006"} and len(rows_of(tmp_path / "run")) == 6
    torch.testing.assert_close(end.weights[6], at_once.weights[6], rtol=0, atol=0)


@pytest.mark.parametrize("how", ["signal", "STOP", "SAVE_NOW", "max_time"])
def test_requests_between_a_launch_and_its_reading_act_on_a_step_that_is_read(
    corpus, tmp_path, at_once, late, monkeypatch, how
):
    """They come when step 7 (SAVE_NOW: 6) is launched and the step before is not yet read."""
    out, skipped = tmp_path / "run", SimpleNamespace(seconds=0.0)
    acts = {"signal": lambda: os.kill(os.getpid(), signal.SIGTERM)}
    if how == "max_time":  # a step takes 10 to 20 s, and 575 of 600 s are over when step 7 is launched
        ticks = iter(range(0, 10**9, 10))
        monkeypatch.setattr(launched_step, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + skipped.seconds)
        monkeypatch.setattr(engine, "time", clock)
        acts["max_time"] = lambda: vars(skipped).update(seconds=575.0)
    late.then[6 if how == "SAVE_NOW" else 7] = acts.get(how, lambda: (out / how).touch())
    error = {"signal": StoppedBySignalError, "STOP": StoppedByFileError}.get(how)
    args = late_arguments(corpus, out, max_time=10.0)
    ends = nullcontext() if error is None else pytest.raises(error, match="stopped after step 7.*step-00000007")
    with restore_handlers_on_exit(), ends:
        run_training(args)
    last = 12 if error is None else 7
    assert late.order[-1] == ("read", last) and [row["step"] for row in curve(out)] == list(range(1, last + 1))
    assert how == "max_time" or ("step-00000007" in folders(out) and not (out / how).exists())
    n_late = sum(a[0] == b[0] == "launch" for a, b in pairwise(late.order))
    assert n_late == (4 if how == "SAVE_NOW" else 2)
    if error is not None:
        run_training(replace(args, resume="auto"))
    require_equal(out, at_once.out, {"step-00000007"})


def test_callbacks_of_users_and_updates_that_the_host_decides_wait_for_each_step(corpus, tmp_path, late):
    class Watches(Callback):
        def on_log(self, trainer, metrics):
            pass

    class Silent(Callback):
        def on_validation_end(self, trainer, metrics):
            pass

    few = {"max_steps": 4, "ema": None, "save_interval": 0}
    cases = {
        "callback": ({}, {}, [Watches()]),
        "spikes": ({"skip_spikes": 6.0}, {}, []),
        "in_backward": ({"max_norm": 0.0, "micro_batch_size": 8}, {"optimizer": OptimizerArgs(in_backward=True)}, []),
        "Muon": ({}, {"optimizer": OptimizerArgs(name="Muon")}, []),
        "bf16-master": ({}, {"precision": "bf16-master"}, []),
        "late": ({}, {}, [Silent()]),
    }
    for name, (train, options, callbacks) in cases.items():
        late.order.clear()
        run_training(replace(late_arguments(corpus, tmp_path / name, **few, **train), **options), callbacks)
        n_ahead = sum(a[0] == b[0] == "launch" for a, b in pairwise(late.order))
        assert n_ahead == (1 if name == "late" else 0), name


def test_every_built_in_callback_is_late_or_has_a_reason():
    """One that is not marked would let the host wait in all runs."""
    reasons = {
        "Callback": "the base class",
        "SkipSpikes": "the host decides each step",
        "Profile": "ends the profiler's step",
        "GradientRecorder": "compares gradients",
        "LayoutCheck": "compares gradients",
    }
    found = {
        node.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        for hook in node.body
        if isinstance(hook, ast.FunctionDef) and hook.name in ("on_step_end", "on_log")
        if "late" not in map(ast.unparse, hook.decorator_list)
    }
    assert found == reasons.keys()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_run_reads_late_by_default(corpus, tmp_path, late, monkeypatch):
    monkeypatch.setattr(launched_step, "LATE_ON", {"cuda"})
    args = replace(late_arguments(corpus, tmp_path / "run"), accelerator="cuda", devices=1)
    run_training(args)
    assert late.order[3:7] == [("launch", 3), ("read", 2), ("launch", 4), ("read", 3)]
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 12 and all(float(row["tokens_per_sec"]) > 0 for row in rows)


@pytest.mark.slow
def test_n3_ranks_read_late_alike(corpus, tmp_path):
    flags = ["pico-llama", "--accelerator", "cpu", *text_data(corpus), "--train.max_seq_length", "32"]
    options = {"train." + key: value for key, value in TRAIN.items()} | {"eval.interval": 5}
    options |= {"train.global_batch_size": 8, "train.micro_batch_size": 2}
    flags += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    layouts = {
        "ddp": ["--strategy", "ddp"],
        "fsdp": ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD"],
        "async": ["--strategy", "fsdp", "--train.async_save", "true"],
        "pipeline": ["--pipeline_parallel_size", "2", "--model_config.n_layer", "2"],
    }
    cases = [Case(f"{n}{how}", more, fault=how or None) for n, more in layouts.items() for how in ("", "late")]
    cases.append(Case("nan", layouts["fsdp"], fault="late, nan on rank 1"))
    results = run_group(tmp_path, 2, cases, flags)
    for name in layouts:
        assert [seen["exit"] for seen in results[f"{name}late"]] == [0, 0], name
        assert [results[f"{name}{how}"][1]["unread"] for how in ("", "late")] == [1, 2]
        require_equal(tmp_path / f"{name}late", tmp_path / name)
    assert [seen["exit"] for seen in results["nan"]] == [3, 3] and results["nan"][0]["unread"] == 2
    assert len(rows_of(tmp_path / "nan")) == 2 and not folders(tmp_path / "nan")
