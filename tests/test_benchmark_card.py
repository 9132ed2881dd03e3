"""scripts/benchmark.py --card: which rows run, within which time, and what is printed and saved."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
import benchmark_card as card  # noqa: E402
from benchmark_processes import RunFailedError  # noqa: E402


def test_each_row_has_its_switch_and_fits_the_time():
    one, two = card.all_rows(1), card.all_rows(2)
    titles = [row.title for row in two]
    assert len(set(titles)) == len(titles) and not any("," in title for title in titles)
    assert set(titles) - {row.title for row in one} == {"2-GPU ddp", "2-GPU fsdp", "2-GPU doctor --prove"}
    assert titles[1].startswith("2-GPU") and all(row.seconds < 400 for row in two)
    for module, name, _ in card.SWITCHES.values():
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for texts, chosen in (("gpt2", ["gpt2"]), ("8B,1.1B LitGPT", ["1.1B LitGPT", "8B LoRA", "8B all weights"])):
        assert [row.title for row in card.choose_rows(one, texts)] == chosen
    assert card.choose_rows(one, "") == one


def test_rows_run_while_time_is_left_and_are_saved_one_by_one(tmp_path, capsys):
    def fail(_):
        raise RunFailedError("toolkit failed with exit code 1\nTraceback\nout of memory")

    figures = {"tokens_per_sec": 1000.0, "parameters": 5, "mfu": 0.4, "step_ms": 20.0, "peak_memory_gb": 1.0}
    rows = [
        card.Row("gpt2", 10, lambda _: figures),
        card.Row("gpt2 long", 100, lambda _: pytest.fail("started")),
        card.Row("gpt2 broken", 10, fail),
        card.Row("gpt2 fast", 10, lambda _: figures | {"tokens_per_sec": 1100.0}),
        card.Row("gpt2 other", 10, lambda _: figures | {"parameters": 6}),
    ]
    saved: list[int] = []
    place = card.Card(SimpleNamespace(), tmp_path, time.monotonic() + 50)
    results = card.run_rows(place, rows, lambda results: saved.append(len(results)))
    assert saved == [1, 2, 3, 4, 5]
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "gpt2: 1,000 tokens/s, MFU 40.0%, 20.0 ms per step, 1.0 GB",
        "gpt2 long: not run: takes about 100 s, and 50 s are left",
        "gpt2 broken: not run: toolkit failed with exit code 1 out of memory",
        "gpt2 fast: 1,100 tokens/s (1.100 x gpt2), MFU 40.0%, 20.0 ms per step, 1.0 GB",
        "gpt2 other: not run: its model has 6 parameters, that of gpt2 5",
    ]
    assert [title for title, result in results.items() if "is_failed" in result] == ["gpt2 broken", "gpt2 other"]


def test_a_machine_without_a_gpu_is_told_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(card, "in_own_process", lambda function: 0)
    assert card.main(["--card"]) == 2
    assert capsys.readouterr().err == "benchmark: --card: no CUDA device is here; run it on a machine with a GPU\n"


@pytest.mark.slow
def test_rows_run_for_real_in_tiny_sizes(tmp_path):
    rows = "gpt2,gpt2 without late reading,gpt2 plain loop,default run"
    words = ["--card", "--tiny", "--rows", rows, "--json", str(tmp_path / "card.json")]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "benchmark.py"), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "card.json").read_text())
    assert results["machine"]["source"] and results["versions"]["torch"]
    assert list(results["rows"]) == [row.title for row in card.choose_rows(card.all_rows(1), rows)]
    assert all(figures["tokens_per_sec"] > 0 for figures in results["rows"].values())


def test_the_card_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--help"])
    assert "--card" in capsys.readouterr().out
