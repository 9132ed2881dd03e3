"""--profile: traces of the scheduled steps, the shares of their time, and the slowest rank in metrics.csv."""

import csv
import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import has_slow_tests, slow_except
from helpers.compare_runs import rows_of
from helpers.groups import Case, losses, run_group

from tests.training.test_run import arguments
from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.commands import TRAINING
from toolkit.config import ProfilerArgs
from toolkit.errors import UserError
from toolkit.training import garbage, throughput
from toolkit.training.callbacks.profile import Profile, format_shares
from toolkit.training.engine import run_training
from toolkit.training.time_breakdown import Shares, compute_shares

SHORT = ["--profiler.wait", "1", "--profiler.warmup", "1", "--profiler.active", "2"]


# ---- shares of hand-written traces


def event(name, start, end, cat="cpu_op"):
    return {"ph": "X", "name": name, "cat": cat, "ts": 1000.0 + start, "dur": float(end - start)}


def step(number, start, end):
    return event(f"ProfilerStep#{number}", start, end, "user_annotation")


def rounded(shares: Shares) -> list[float]:
    names = ("compute", "communication", "data_wait", "host", "hidden_communication", "begin_step")
    return [round(getattr(shares, name), 6) for name in names]


def test_shares_of_a_gpu_trace():
    events = [
        step(5, 0, 100), step(6, 100, 200), step(7, 200, 10_000),  # the third is not complete
        {"ph": "M", "name": "process_name"},
        event("toolkit::data_wait", 0, 20, "user_annotation"),
        event("aten::mm", 20, 90),  # launched from the host: not what the GPU does
        event("gemm", 10, 40, "kernel"), event("elementwise", 30, 50, "kernel"),  # two streams
        event("Memcpy HtoD", 50, 60, "gpu_memcpy"),
        event("ncclDevKernel_AllGather_RING_LL", 55, 80, "kernel"),
        event("gloo:all_reduce", 100, 110, "user_annotation"),
        event("ProfilerStep#5", 0, 100, "gpu_user_annotation"),
        event("gemm", 190, 300, "kernel"), event("toolkit::begin_step", 105, 145, "user_annotation"),
    ]  # fmt: skip
    shares = compute_shares(events, 2)
    # of 200 us: compute 10-60 and 190-200, communication 60-80 and 100-110, data 0-10
    assert rounded(shares) == [0.3, 0.15, 0.05, 0.5, 0.025, 0.2]
    assert shares.step_s == pytest.approx(100e-6)


def test_shares_of_a_cpu_trace():
    events = [
        step(2, 0, 120),
        event("toolkit::data_wait", 0, 10, "user_annotation"),
        event("aten::linear", 20, 60), event("aten::mm", 25, 55),
        event("autograd::engine::evaluate_function: MmBackward0", 55, 95),  # contains FSDP's hooks
        event("c10d::allgather_", 60, 70), event("aten::copy_", 62, 64),
        event("gloo:all_gather", 50, 90, "user_annotation"),
        event("toolkit::validate", 95, 110, "user_annotation"), event("aten::mm", 96, 105),
        event("toolkit::begin_step", 15, 25, "user_annotation"),
        event("toolkit::begin_step", 96, 98, "user_annotation"),
        event("toolkit::save", 110, 115, "user_annotation"),
    ]  # fmt: skip
    shares = compute_shares(events, 1)
    assert rounded(shares) == [0.4, 0.3, 0.1, 0.2, 0.1, 0.1]
    assert shares.step_s == pytest.approx(100e-6)
    with pytest.raises(ValueError, match="1 steps instead of 2"):
        compute_shares(events, 2)


def test_table_of_many_ranks_shows_those_that_wait_least():
    shares = {rank: Shares(0.5, 0.01 * ((rank * 7) % 100), 0, 0.5, 0, 0, 0.25, 1.0) for rank in range(100)}
    head, *rows, note = format_shares(shares)
    assert [int(row.split()[0]) for row in rows] == sorted(sorted(shares, key=lambda r: r * 7 % 100)[:8])
    assert "8 of 100 ranks" in note and head.startswith("rank  compute")
    assert head.endswith("garbage collection  s/step") and all(row.endswith("25.0%       1") for row in rows)


# ---- options


@pytest.mark.parametrize("command", slow_except(["pretrain"], TRAINING))
def test_bare_flag_in_every_training_command(command):
    for words in (["--profile"], ["--profile", "true"], ["--profile=true"]):
        arguments = parse(command, [*(["x"] if command != "pretrain" else []), *words, *SHORT])
        assert arguments["options"].shared.profile is True and arguments["options"].shared.profiler.active == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profiler.wait", "2"], "--profiler.wait 2: has no effect without --profile"),
        (["--profile", "false", "--profiler.with_stack", "true"], "--profiler.with_stack true: has no effect"),
        (["--profile", "--profiler.active", "0"], "--profiler.active 0: must be greater than zero"),
        (["--profile", "--train.max_steps", "5"], "profiling begins after step 5, but the run has only 5"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, capsys, flags, message):
    assert main(["pretrain", "pico-llama", "--out_dir", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and not (tmp_path / "out").exists()


def test_run_limited_by_epochs_that_ends_before_is_refused(corpus, tmp_path):
    options = {"profile": True, "profiler": ProfilerArgs(wait=10**6)}
    with pytest.raises(UserError, match="--profiler.wait 1000000: .*profiling begins after step 1000001"):
        run_training(arguments(corpus, tmp_path / "out", train={"max_steps": None, "epochs": 1}, **options))
    assert not (tmp_path / "out").exists()


# ---- a process


def read_trace(path) -> list[dict]:
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def read_csv(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_profiled_run_is_bit_equal_and_a_resumed_one_profiles_its_own_steps(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(garbage, "STEPS_BETWEEN_COLLECTIONS", 1)
    options = {"profile": True, "profiler": ProfilerArgs(wait=1, warmup=1, active=2, record_shapes=True)}
    flat = {"lr_schedule": "constant", "lr_warmup_steps": 0}
    run_training(arguments(corpus, tmp_path / "plain", train=flat | {"max_steps": 8}))
    run_training(arguments(corpus, tmp_path / "run", train=flat | {"max_steps": 4}, **options))
    output = capsys.readouterr().out
    assert f"Profile of steps 3 to 4 in {tmp_path / 'run' / 'profile' / 'step-00000003'}" in output
    assert "aten::mm" in output and "--profile: the run ended" not in output
    run_training(arguments(corpus, tmp_path / "run", train=flat | {"max_steps": 7}, resume="auto", **options))
    output = capsys.readouterr().out
    assert (
        "the run ended at step 7, before the profiled range (steps 7 to 8) was complete; the trace has 1 of them"
        in output
    )
    assert "Profile of steps 7 to 7" in output
    run_training(arguments(corpus, tmp_path / "run", train=flat | {"max_steps": 8}, resume="auto", **options))
    assert "the run ended at step 8, before the profiled range (steps 10 to 11) was complete; there is no trace" in (
        capsys.readouterr().out
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")

    profile = tmp_path / "run" / "profile"
    assert sorted(path.name for path in profile.iterdir()) == ["step-00000003", "step-00000007"]
    for folder, n_steps in (("step-00000003", 2), ("step-00000007", 1)):
        names = [event["name"] for event in read_trace(profile / folder / "rank-0000.json.gz")]
        assert names.count("toolkit::forward") == names.count("toolkit::backward") == 2 * n_steps  # micro-batches
        assert names.count("toolkit::data_wait") == sum(name.startswith("Optimizer.step#") for name in names) == n_steps
    table = (profile / "step-00000003" / "rank-0000.txt").read_text()
    assert "aten::mm" in table and "Input Shapes" in table
    (shares,) = read_csv(profile / "step-00000003" / "shares.csv")
    values = {name: float(value) for name, value in shares.items()}
    assert values["communication"] == 0 < values["compute"] < 1 and values["step_s"] > 0
    assert sum(values[name] for name in ("compute", "data_wait", "host")) == pytest.approx(1)
    assert 0 < values["garbage_collection"] < 1


def test_disk_that_cannot_be_written_does_not_end_the_run(corpus, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file in the place of the folder")
    options = {"profile": True, "profiler": ProfilerArgs(wait=1, warmup=1, active=1)}
    run_training(arguments(corpus, tmp_path / "run", train={"max_steps": 4}, **options))
    assert "--profile: rank 0 has no trace: NotADirectoryError" in capsys.readouterr().out
    assert (tmp_path / "run" / "final" / "COMPLETE").exists()


def test_out_of_memory_on_cuda_leaves_a_snapshot(tmp_path, monkeypatch, capsys):
    """The calls of torch's private functions; the file itself needs CUDA."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    messages: list[str] = []
    trainer = SimpleNamespace(
        out_dir=tmp_path, progress=SimpleNamespace(step=0), display=SimpleNamespace(message=messages.append),
        fabric=SimpleNamespace(device=torch.device("cuda")),
    )  # fmt: skip
    callback = Profile(ProfilerArgs())
    callback.on_train_start(trainer)
    callback.on_exception(trainer, torch.OutOfMemoryError("CUDA out of memory"))
    path = tmp_path / "profile" / "step-00000006" / "memory-rank-0000.pickle"
    assert calls == [{"max_entries": 100_000, "stacks": "python"}, str(path), {"enabled": None}]
    assert str(path) in capsys.readouterr().out and "there is no trace" in messages[0]


# ---- two ranks


@pytest.fixture(scope="module")
def group(tmp_path_factory, corpus, request):
    folder = tmp_path_factory.mktemp("profile")
    shared = [
        "pico-llama", "--accelerator", "cpu", "--data", "TextFiles", "--data.train_data_path", str(corpus),
        "--data.vocab_size", "300", "--train.global_batch_size", "4", "--train.micro_batch_size", "1",
        "--train.max_seq_length", "32", "--train.save_interval", "0", "--eval.final_validation", "false",
    ]  # fmt: skip
    cases = [
        Case("fsdp", ["--strategy", "fsdp", "--train.max_steps", "4", "--profile", "true", *SHORT]),
        Case("slow", ["--train.max_steps", "4", "--train.log_interval", "2"], fault="slow data on rank 1"),
    ]
    results = run_group(folder, 2, cases if has_slow_tests(request) else cases[1:], shared)
    assert [seen["exit"] for seen in results["slow"]] == [0, 0]
    return folder


@pytest.mark.slow
def test_fsdp_gathers_and_prefetches_are_named_in_the_trace_of_each_rank(group):
    folder = group / "fsdp" / "profile" / "step-00000003"
    for rank in (0, 1):
        events = read_trace(folder / f"rank-{rank:04d}.json.gz")
        gathers = [e for e in events if e["name"].startswith(("c10d::allgather_", "c10d::_allgather_base_"))]
        assert gathers and any(e["name"].startswith("gloo:all_gather") for e in events)
        for name in ("FSDP::all_gather (transformer.h.0)", "FSDP::backward_prefetch for transformer.h.0"):
            ranges = [e for e in events if e["name"] == name]
            inside = [
                gather for gather in gathers for e in ranges
                if e["tid"] == gather["tid"] and e["ts"] <= gather["ts"] <= e["ts"] + e["dur"]
            ]  # fmt: skip
            assert inside, name
    rows = read_csv(folder / "shares.csv")
    assert [row["rank"] for row in rows] == ["0", "1"]
    for row in rows:
        assert 0 < float(row["communication"]) < 1 and 0 < float(row["compute"]) < 1
        assert sum(float(row[n]) for n in ("compute", "communication", "data_wait", "host")) == pytest.approx(1)


@pytest.mark.slow
def test_metrics_name_the_rank_that_the_others_wait_for(group):
    """Rank 1's clock runs 100 s ahead while it loads a batch; see rank_worker.py."""
    rows = read_csv(group / "slow" / "logs" / "metrics.csv")
    assert [row["slowest_rank"] for row in rows] == ["1", "1"]
    for row in rows:
        assert 100 <= float(row["data_wait_s"]) <= float(row["step_s"]) < 200
        assert float(row["tokens_per_sec"]) > 0


def test_times_are_means_since_the_last_row(corpus, tmp_path):
    times = throughput.StepTimes()
    times.add([[2_000_000, 500_000], [1_000_000, 900_000]], 3.0)
    times.add([[1_000_000, 0], [4_000_000, 300_000]], 3.0)
    means = {"data_wait_s": pytest.approx(0.6), "step_s": pytest.approx(6.0), "update_s": 3.0}
    assert times.read() == means | {"slowest_rank": 1}
    times.add([[2, 1]], 1.0)
    assert times.read()["slowest_rank"] == 0
    run_training(arguments(corpus, tmp_path / "run", train={"max_steps": 3, "log_interval": 2}))
    for row in rows_of(tmp_path / "run"):
        assert 0 <= float(row["data_wait_s"]) < float(row["step_s"]) and row["slowest_rank"] == "0"
        assert 0 < float(row["update_s"]) <= float(row["step_s"]) - float(row["data_wait_s"])
