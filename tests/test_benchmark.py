"""scripts/benchmark.py: parsing of results, comparison within a round, and error messages."""

import csv
import ctypes
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import yaml

from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config, list_names
from toolkit.models.gpt import GPT

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
import benchmark_finetune as finetune  # noqa: E402
import benchmark_plain as plain  # noqa: E402
import benchmark_processes as processes  # noqa: E402
import benchmark_products as products  # noqa: E402
import benchmark_report  # noqa: E402

WORK = products.Work("pythia-14m", 10, 2, "32-true", "none", steps=4, warmup_steps=2, threads=1)


def write_csv(path: Path, rows: list[dict]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_toolkit_results_exclude_the_warm_up(tmp_path):
    speeds, ends = [1.0, 2.0, 10.0, 20.0], [100.0, 150.0, 154.0, 156.0]
    rows = [
        {"step": i, "seconds": end, "loss": 1.0, "tokens_per_sec": speed, "peak_memory_gb": i}
        for i, (speed, end) in enumerate(zip(speeds, ends, strict=True), start=1)
    ]
    metrics = write_csv(tmp_path / "metrics.csv", rows)
    one = products.read_toolkit(metrics, "m: 1,234 parameters, on a CPU", WORK)
    # 20 tokens a step; from end to end the steps 3 and 4 took 4 and 2 seconds.
    assert one == products.Measurement(1234, 15.0, pytest.approx(20 / 3), 4.0)


def test_litgpt_results_use_iteration_times(tmp_path):
    rows = [
        {"iter": i, "iter_time": seconds, "time": end}
        for i, seconds, end in [(1, 9.0, 9.0), (2, 9.0, 19.0), (3, 2.0, 23.0), (4, 4.0, 28.0)]
    ]
    metrics = write_csv(tmp_path / "metrics.csv", rows)
    output = "Total parameters: 1,234\n| - Tok/sec       : 0.02 tok/s\n"
    one = products.read_litgpt(metrics, processes.CompletedRun(output, 1.5), WORK)
    assert one == products.Measurement(1234, pytest.approx(20 / 3), pytest.approx(20 / 4.5), 1.5)
    on_cuda = processes.CompletedRun(output + "| - Memory Used   : 7.25 GB\n", 1.5)
    assert products.read_litgpt(metrics, on_cuda, WORK).peak_memory_gb == 7.25


def test_litgpt_results_with_several_micro_batches_use_the_time_between_steps(tmp_path):
    ends = [(2, 9.0), (4, 19.0), (6, 23.0), (8, 28.0)]
    metrics = write_csv(tmp_path / "metrics.csv", [{"iter": i, "iter_time": 0.1, "time": end} for i, end in ends])
    done = processes.CompletedRun("Total parameters: 1,234", 1.5)
    one = products.read_litgpt(metrics, done, replace(WORK, micro_batch_size=1))
    assert one.tokens_per_sec == one.tokens_per_sec_end_to_end == pytest.approx(20 / 4.5)


def test_plain_loop_trains_the_same_model(tmp_path):
    """As many parameters as toolkit's, without the padded vocabulary; micro-batches add up to the batch."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 300, (12, 17)))
    work = replace(WORK, batch_size=4, steps=3)
    settings = vars(work) | {"tokens": str(tmp_path / "tokens.npy"), "seed": 1, "learning_rate": 1e-2, "max_norm": 1.0}
    settings |= {"weight_decay": 0.1, "betas": [0.9, 0.95]}
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "head_size": 8, "intermediate_size": 64, "vocab_size": 300}
    for name, groups in (("gpt2", 4), ("tiny-llama-1.1b", 2)):
        values = get_config(name).to_dict() | sizes | {"n_query_groups": groups, "padded_vocab_size": 300}
        config = ModelConfig(**values)
        settings["config"] = products.plain_config(config)
        runs = [plain.train(settings | {"micro_batch_size": micro}, "cpu") for micro in (4, 2)]
        assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-4)
        assert runs[0]["losses"][0] == pytest.approx(math.log(384), abs=0.1)
        assert runs[0]["parameters"] == sum(p.numel() for p in GPT(config).parameters())
    with pytest.raises(products.UserError, match="the plain loop implements GPT-2 and Llama only"):
        products.plain_config(get_config("pythia-14m"))


def test_trainer_results_exclude_the_warm_up():
    result = {"begins": [0, 10, 21, 26], "ends": [9, 20, 25, 28], "parameters": 7, "peak_memory_gb": 2.0}
    one = products.read_steps(result, WORK)
    assert one == products.Measurement(7, pytest.approx(20 / 3), pytest.approx(20 / 4), 2.0)


def test_litgpt_finetuning_counts_optimizer_steps(tmp_path):
    """Four iterations per step, with two log rows each; the last token of each of a step's 16 rows is not an input."""
    rows = []
    for i in range(1, 25):  # a step: 4 seconds, 40 positions and 32 tokens; from the sixth on twice the seconds
        time = 1000 + i + max(0, i - 20)
        rows.append({"iter": "", "tokens": "", "time": time, "lengths": 10 * i})
        rows.append({"iter": i, "tokens": 8 * i, "time": "", "lengths": ""})
    output = "Number of trainable parameters: 1,234\nNumber of non-trainable parameters: 5\n"
    one = finetune.read_litgpt(write_csv(tmp_path / "metrics.csv", rows), processes.CompletedRun(output, 1.5))
    # steps 5 and 6 count: 16 inputs in 4 and in 8 seconds
    assert one == finetune.Measurement(1234, 6 * 16, 3.0, 7.5, 6.0, 1.5)


def test_ratio_is_computed_within_each_round():
    def runs(*speeds):
        return [products.Measurement(1, speed, speed, 1.0) for speed in speeds]

    # The machine was ten times slower in the last two rounds: every pair says 2, the ratio of the medians says 10.
    ratio = benchmark_report.compare(runs(200, 200, 20), runs(100, 10, 10), "tokens_per_sec")
    assert ratio == {"median": 2.0, "min": 2.0, "max": 20.0, "rounds": [2.0, 20.0, 2.0]}
    (run,) = runs(1234)
    assert benchmark_report.describe_run(run) == "1,234 tokens/s, 1.00 GB"
    assert benchmark_report.describe_run(replace(run, mfu=0.5)) == "1,234 tokens/s, MFU 50.0%, 1.00 GB"


@pytest.mark.slow
def test_products_alternate_and_must_build_the_same_model(monkeypatch, capsys):
    turns = []

    def product(name, parameters):
        def run(work, config, folder, python):
            if name == "litgpt":
                assert "toolkit: 1 tokens/s, 1.00 GB" in capsys.readouterr().err  # printed when it ended
            if parameters == 0:
                raise processes.RunFailedError("litgpt was not done after 3 s")
            assert (folder / "tokens.npy").is_file() and (folder / "tokens" / "index.json").is_file()
            turns.append(name)
            return products.Measurement(parameters, 1.0, 1.0, 1.0)

        return run

    monkeypatch.setattr(benchmark, "PRODUCTS", {name: product(name, 5) for name in ["toolkit", "litgpt"]})
    config = products.get_config("pythia-14m")
    benchmark.measure(WORK, config, {"toolkit": "", "litgpt": ""}, rounds=2)
    assert turns == ["toolkit", "litgpt", "toolkit", "litgpt"]
    monkeypatch.setitem(benchmark.PRODUCTS, "litgpt", product("litgpt", 6))
    with pytest.raises(products.UserError, match="--peers litgpt: its model has 6 parameters, toolkit's 5"):
        benchmark.measure(WORK, config, {"toolkit": "", "litgpt": ""}, rounds=1)
    monkeypatch.setitem(benchmark.PRODUCTS, "litgpt", product("litgpt", 0))
    measured, failed = benchmark.measure(WORK, config, {"toolkit": "", "litgpt": ""}, rounds=2)
    assert len(measured.pop("toolkit")) == 2 and not measured and failed == {"litgpt": "litgpt was not done after 3 s"}


@pytest.mark.slow
def test_products_in_turns_run_alone(tmp_path):
    """Two processes that write their name 100 times each: in turns, the names form few groups."""
    names = tmp_path / "names"
    code = "import time, sys\nfor _ in range(100):\n    open(sys.argv[1], 'a').write(sys.argv[2]); time.sleep(0.01)"

    def run(name):
        command = [sys.executable, "-c", code, str(names), name]
        return processes.run_process(name, command, tmp_path, threads=1, extra={})

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, name) for name in "AB"]
        processes.take_turns(runs, seconds=0.5)
    assert all(run.result() for run in runs) and processes.RUNNING == []
    written = names.read_text()
    assert len(written) == 200
    assert sum(a != b for a, b in itertools.pairwise(written)) < 20, written


def test_peers_get_the_malloc_settings_of_toolkit(monkeypatch):
    from toolkit.distributed.cpu_memory import disable_malloc_trim

    asked = {}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=asked.__setitem__))
    monkeypatch.setattr(sys, "platform", "linux")
    disable_malloc_trim("cpu")
    numbers = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}  # malloc.h
    assert {numbers[name]: int(value) for name, value in processes.MALLOC.items()} == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--peers litgpt", "--peers litgpt: no environment specified"),
        ("--peers transformers --transformers_python no/such/python", "--transformers_python no/such/python"),
        ("--peers torchtitan", "--peers torchtitan: must be one of litgpt"),
        ("--model pythia14m", "did you mean 'pythia-14m'"),
        ("--model gpt2 --peers litgpt", "LitGPT does not support learned positions"),
        ("--seq_length 4096", "takes at most 2048 tokens"),
        ("--steps 10 --warmup_steps 10", "--warmup_steps 10: must be"),
        ("--warmup_steps 0", "--warmup_steps 0: must be"),
        ("--model pythia-14m --peers plain", "the plain loop implements GPT-2 and Llama only"),
        ("--precision 16-mixed --peers plain --model gpt2", "not supported by the plain loop"),
        ("--precision 16-mixed --peers litgpt", "not supported by `litgpt pretrain`"),
        ("--micro_batch_size 3", "--micro_batch_size 3: must divide --batch_size 4"),
        ("--micro_batch_size -1", "--micro_batch_size -1: must divide"),
        ("--activation_checkpointing full --peers plain --model gpt2", "not supported with --peers plain"),
        ("--activation_checkpointing full --peers transformers,litgpt", "not supported with --peers litgpt; remove"),
        ("--peers toolkit-fp8", "--precision 32-true: not supported with --peers toolkit-fp8; use bf16-mixed"),
        ("--batch_size 0", "--batch_size 0: must be at least 1"),
        ("--seq_length 0", "--seq_length 0: must be at least 1"),
        ("--rounds 0", "--rounds 0: must be at least 1"),
        ("--threads 0", "--threads 0: must be at least 1"),
        ("--rows gpt2", "--rows: has no effect without --matrix"),
        ("--batchsize 4", "--batchsize"),
        ('--model_config {"n_layers":2}', "--model_config n_layers: is not a field of the architecture; did you mean"),
    ],
)
def test_user_error_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert benchmark.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


def test_missing_packages_of_a_peer_are_named(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "versions", lambda *_: {})
    for arguments, message in (
        ("--peers toolkit-fp8 --precision bf16-mixed", "--peers toolkit-fp8: needs torchao; run: pip install"),
        ("--peers transformers", f"--transformers_python {sys.executable}: transformers is not installed"),
    ):
        assert benchmark.main(arguments.split()) == 2
        assert message in capsys.readouterr().err


def test_a_peer_without_a_working_python_is_refused(monkeypatch, capsys):
    for error in (OSError(), ValueError(), subprocess.CalledProcessError(1, "python")):
        monkeypatch.setattr(benchmark, "versions", mock.Mock(side_effect=[{}, error]))
        assert benchmark.main(["--peers", "transformers", "--transformers_python", "my-python"]) == 2
        assert "--transformers_python my-python: is not a working Python" in capsys.readouterr().err


def test_a_failed_run_is_exit_code_1(monkeypatch, capsys):
    def fail(*_):
        raise processes.RunFailedError("toolkit failed with exit code 1")

    monkeypatch.setattr(benchmark, "measure_case", fail)
    monkeypatch.setattr(benchmark, "versions", lambda *_: {})
    assert benchmark.main([]) == 1
    assert capsys.readouterr().err == "benchmark: toolkit failed with exit code 1\n"


def test_as_shipped_products_get_only_the_work(monkeypatch, tmp_path):
    """The same model, tokens and steps; no setting that a README does not name."""
    commands = {}

    def run_process(product, command, folder, threads, extra, **_):
        commands[product] = " ".join(command)
        if product == "transformers":
            commands[product] += Path(command[2]).read_text()
        assert (processes.MALLOC.items() <= extra.items()) is not (work.as_shipped or "toolkit" in product)
        raise processes.RunFailedError

    monkeypatch.setattr(products, "run_process", run_process)
    config = get_config("pythia-14m")
    for as_shipped in (False, True):
        work = replace(WORK, as_shipped=as_shipped, model_config={"n_layer": 2})
        for product, run in products.PRODUCTS.items():
            if product == "plain":
                continue  # the loop has no pythia
            with pytest.raises(processes.RunFailedError):
                run(work, config, tmp_path, "python")
        for product in ("toolkit", "litgpt"):
            for option in ("--precision", "--optimizer", "--train.max_norm"):
                assert (option in commands[product]) is not as_shipped, (product, option)
        assert "--model_config.n_layer=2" in commands["toolkit"]
        assert ["fp8" in commands[product] for product in ("toolkit", "toolkit-fp8")] == [False, True]
        assert f'"as_shipped": {str(as_shipped).lower()}' in commands["transformers"]


def test_failed_peer_is_reported_with_the_end_of_its_output(tmp_path):
    with pytest.raises(processes.RunFailedError, match="exit code 3.*\nlast words"):
        command = [sys.executable, "-c", "import sys; print('last words'); sys.exit(3)"]
        processes.run_process("litgpt", command, tmp_path, 1, {})
    with pytest.raises(products.UserError, match="^--devices 9: too many$"):
        command = [sys.executable, "-c", "import sys; print('--devices 9: too many'); sys.exit(2)"]
        processes.run_process("toolkit", command, tmp_path, 1, {})


def children(folder: Path) -> list[str]:
    """Return the command lines of the running processes that name ``folder``."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            lines.append(file.read_text())
    return [line for line in lines if str(folder) in line]


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_killed_benchmark_ends_its_children(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\nimport benchmark_processes as p\nfrom pathlib import Path\n"
        "p.exit_on_signals()\nfolder = Path(sys.argv[1])\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)', str(folder / 'child')]\n"
        "p.run_process('toolkit', command, folder, 1, {})"
    )
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.DEVNULL)
        wait_until(lambda: children(tmp_path / "child"))
        parent.send_signal(number)
        assert parent.wait() == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not children(tmp_path / "child"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_benchmark_prints_each_run_and_leaves_no_process_when_killed(tmp_path):
    command = "--model pico-llama --seq_length 16 --batch_size 2 --steps 4 --warmup_steps 2 --rounds 100 --threads 1"
    command += " --peers plain --accelerator cpu --max_seconds 600"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "benchmark.py"), *command.split()],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    for line, product in zip(process.stderr, ("toolkit", "plain"), strict=False):
        assert re.fullmatch(rf"round 1/100 {product}: [\d,]+ tokens/s, [\d.]+ GB, \d+ s\n", line), line
        if product == "plain":
            break
    wait_until(lambda: children(tmp_path))  # of the second round
    process.kill()
    process.wait()
    wait_until(lambda: not children(tmp_path))


def test_run_ends_when_it_is_done_or_out_of_time(tmp_path):
    """With its children."""
    sleep = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{sleep}', sys.argv[1]])"
    command = [sys.executable, "-c", f"{code}; print('last words', flush=True); {sleep}", str(tmp_path)]
    log = tmp_path / "litgpt.log"
    done = processes.run_process("litgpt", command, tmp_path, 1, {}, is_done=lambda: b"\n" in log.read_bytes())
    assert done.output == "last words\n"
    wait_until(lambda: not children(tmp_path))
    with pytest.raises(processes.RunFailedError, match="litgpt was not done after 0 s"):
        processes.run_process("litgpt", command, tmp_path, 1, {}, max_seconds=0.1)
    with pytest.raises(processes.RunFailedError, match="was not done after 0 s"):
        processes.run_script(command, max_seconds=0.1, stdout=subprocess.DEVNULL)
    wait_until(lambda: not children(tmp_path))


def test_litgpt_gets_only_known_fields():
    """LitGPT's files in extensions/interop/tests/litgpt have all fields."""
    (one, *_) = sorted(Path(__file__).parents[1].glob("extensions/interop/tests/litgpt/*/model_config.yaml"))
    known = yaml.safe_load(one.read_text()).keys()
    assert known & {field.name for field in fields(ModelConfig)} == products.LITGPT_FIELDS
    refused = set()
    for name in list_names():
        try:
            assert products.litgpt_config(get_config(name).with_vocab_size(64)).keys() <= known, name
        except products.UserError as error:
            assert "LitGPT does not support " in str(error)
            refused.add(get_config(name).family)
    assert "gpt_oss" in refused and not refused & {"llama", "gpt_neox", "qwen3", "gemma2", "olmo2", "mixtral"}


@pytest.mark.parametrize(
    "peer", [pytest.param(peer, marks=pytest.mark.slow) for peer in ("", "transformers", "litgpt")]
)
def test_benchmark_runs_the_real_product(peer):
    if peer:
        pytest.importorskip({"transformers": "accelerate"}.get(peer, peer))
    model = "pythia-14m" if peer == "litgpt" else "pico-llama"  # LitGPT takes the names that it has
    command = f"--model {model} --seq_length 16 --batch_size 2 --steps 4 --warmup_steps 2 --rounds 1 --threads 1"
    command += f" --peers={peer} --format json --litgpt_python {sys.executable}"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "benchmark.py"), *command.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for figures in result["products"].values():
        assert figures["parameters"] > 8192 * 64
        assert figures["tokens_per_sec"]["median"] > 0
        assert 0.05 < figures["peak_memory_gb"]["median"] < 20
    assert set(result["products"]) - {"toolkit"} == set(result["ratios"]) == {peer} - {""}
    assert "MALLOC_TOP_PAD_" in " ".join(result["notes"])
    assert benchmark_report.format_table(result).count("| toolkit") == 2  # the column and the row
