"""scripts/benchmark.py --card: which rows run, within which time, and what is printed and saved."""

import importlib
import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
import benchmark_card as card  # noqa: E402
from benchmark_processes import RunFailedError  # noqa: E402

from toolkit.errors import UserError  # noqa: E402
from toolkit.models import cross_entropy  # noqa: E402
from toolkit.optim.update import FusedUpdate  # noqa: E402
from toolkit.training import launched_step  # noqa: E402


def test_titles_are_unique_and_each_row_fits_the_time():
    one, two = card.all_rows(1), card.all_rows(2)
    titles = [row.title for row in two]
    assert len(set(titles)) == len(titles) and not any("," in title for title in titles)
    assert set(titles) - {row.title for row in one} == {"2-GPU ddp", "2-GPU fsdp", "2-GPU doctor --prove"}
    assert titles[1].startswith("2-GPU") and all(row.seconds < 400 for row in two)
    for texts, chosen in (("gpt2", ["gpt2"]), ("8B, 1.1B LitGPT,", ["1.1B LitGPT", "8B LoRA", "8B all weights"])):
        assert [row.title for row in card.choose_rows(one, texts)] == chosen
    assert card.choose_rows(one, "") == one
    with pytest.raises(UserError, match="^--rows gpt3: in no title of gpt2, "):
        card.choose_rows(one, "1.1B gen,gpt3")


def test_the_switches_turn_off_what_runs_by_default(monkeypatch):
    for module, name, _ in card.SWITCHES.values():  # to have them restored
        module = importlib.import_module(module)
        monkeypatch.setattr(module, name, getattr(module, name))
    triton, compiled = (lambda *args: cross_entropy.pointwise_cross_entropy(*args) for _ in range(2))
    monkeypatch.setattr(cross_entropy, "compiled_kernel", lambda: compiled)
    stand_in = SimpleNamespace(triton_cross_entropy=triton)
    monkeypatch.setitem(sys.modules, "toolkit.models.cross_entropy_triton", stand_in)
    place = SimpleNamespace(device=torch.device("cuda"))
    usual = SimpleNamespace(makes_batches=False)
    run = SimpleNamespace(fabric=place, limits=SimpleNamespace(total_seconds=None), callbacks=[], objective=usual)

    def defaults() -> tuple:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel = cross_entropy._checked_kernel.__wrapped__(torch.device("cpu"), 64, None, None, torch.bfloat16, 0)
        return kernel, launched_step.reads_late(run, object.__new__(FusedUpdate))

    assert defaults() == (triton, True)
    exec(card.switch_off(*card.SWITCHES["without Triton's loss"]), {})
    monkeypatch.setitem(sys.modules, "toolkit.models.cross_entropy_triton", None)  # importing it would fail
    assert defaults() == (compiled, True)
    exec(card.switch_off(*card.SWITCHES["without late reading"]), {})
    assert defaults() == (compiled, False)


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
        "gpt2 long: not run: takes an estimated 100 s, and 50 s are left",
        "gpt2 broken: not run: toolkit failed with exit code 1 out of memory",
        "gpt2 fast: 1,100 tokens/s (1.100 x gpt2), MFU 40.0%, 20.0 ms per step, 1.0 GB",
        "gpt2 other: not run: its model has 6 parameters, that of gpt2 5",
    ]
    assert [title for title, result in results.items() if "is_failed" in result] == ["gpt2 broken", "gpt2 other"]


@pytest.fixture
def two_rows(monkeypatch):
    """Two rows of 10 and 300 s; return a function that runs the command, and a list with the tokens/s of all rows."""
    figures, rate = {"tokens_per_sec": 1000.0, "parameters": 5}, [1000.0]
    rows = [card.Row(title, 10, lambda _: figures | {"tokens_per_sec": rate[0]}) for title in ("gpt2", "gpt2 long")]
    rows[1] = card.replace(rows[1], seconds=300)
    host = {"gpu": "H100", "cpu": "", "cpus": 1, "commit": ""}
    monkeypatch.setattr(card, "all_rows", lambda n_gpus: rows)
    monkeypatch.setattr(card, "versions", lambda *_: {"torch": "2"})
    monkeypatch.setattr(card, "machine", lambda: host | {"load": time.monotonic()})

    def call(*words: str) -> int:
        return card.main(["--card", "--tiny", *words])

    return call, rate


def test_the_last_line_keeps_the_options_and_the_results(two_rows, tmp_path, capsys, monkeypatch):
    call, rate = two_rows
    path = tmp_path / "my card.json"
    assert call("--json", str(path), "--max_seconds", "100", "--litgpt_python", "py") == 0
    *_, last = capsys.readouterr().err.splitlines()
    words = ["--rows", "gpt2 long", "--max_seconds", "100.0", "--litgpt_python", "py", "--json", str(path)]
    assert shlex.split(last) == ["the", "others:", "python", "scripts/benchmark.py", "--card", *words]
    rate[0] = 1200.0
    assert call(*words[:2], "--json", str(path)) == 0
    assert "gpt2 long: 1,200 tokens/s (1.200 x gpt2)" in capsys.readouterr().err
    assert call("--json", str(path), "--max_seconds", "1") == 0  # nothing runs
    assert "the others" not in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert {title: row["tokens_per_sec"] for title, row in rows.items()} == {"gpt2": 1000.0, "gpt2 long": 1200.0}
    monkeypatch.setattr(card, "hash_sources", lambda modules: "other")
    text = path.read_text()
    assert call("--json", str(path)) == 2 and path.read_text() == text
    assert f"--json {path}: not of this machine, these versions and this source" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_rows(two_rows, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("notes")
    for name, reason in (
        ("", "Is a directory"),
        ("notes.txt/card.json", "File exists"),
        ("notes.txt", "not of this machine, these versions and this source"),
    ):
        path = tmp_path / name
        assert two_rows[0]("--json", str(path)) == 2
        assert capsys.readouterr().err == f"benchmark: --json {path}: {reason}; specify another file\n"
    assert (tmp_path / "notes.txt").read_text() == "notes"


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
