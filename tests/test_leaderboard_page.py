"""The leaderboard of tutorials/experiments.md: its commands parse, and scripts/leaderboard.py compares runs."""

import importlib.util
import re
import shlex
from pathlib import Path
from statistics import mean

import pytest

from toolkit.cli.parser import parse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "tutorials" / "experiments.md").read_text()
LEADERBOARD = PAGE[PAGE.index("## The leaderboard") :]
LOG = (ROOT / "docs" / "leaderboard.md").read_text()
OPTIONS = re.findall(r"^\|.*\| `(--.*?)` \|", LEADERBOARD + LOG, re.M)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("leaderboard", ROOT / "scripts" / "leaderboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_commands_parse(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(line, comments=True) for block in re.findall(r"```bash\n(.*?)```", LEADERBOARD, re.S)
                for line in block.replace("\\\n", "").splitlines()]  # fmt: skip
    seen = set()
    for program, name, *options in commands:
        seen.add(name)
        if program == "toolkit":
            assert parse(name, options) is not None
        else:
            assert (program, name) == ("python", "scripts/leaderboard.py")
            script.parse_arguments(options)
    assert seen == {"pretrain", "evaluate", "scripts/leaderboard.py"}
    assert len(OPTIONS) >= 6
    for options in OPTIONS:
        assert parse("pretrain", [*script.BASELINE, *shlex.split(options)]) is not None


def test_page_has_the_script_s_command_and_limits(script):
    assert " ".join(["toolkit pretrain", *script.BASELINE]) in re.sub(r"\s*\\\s+", " ", PAGE)
    assert str(script.CRITICAL) in PAGE and f"last {100 * script.HELD_OUT:.0f} %" in PAGE


def test_rows_are_the_means_of_their_seeds():
    rows = re.findall(r"\| ([\d.]+) \(sd [\d.]+\) \| ([\d., ]+) \|", PAGE)
    assert rows
    for shown, each in rows:
        values = [float(value) for value in each.split(", ")]
        assert len(values) == 5 and abs(mean(values) - float(shown)) < 1e-4


def run_of(name: str, seed: int, bpb: float, speed: float = 100.0) -> dict:
    return {"name": name, "seed": seed, "bpb": bpb, "tokens": 2e6, "seconds": 170.0, "tokens_per_sec": speed}


def test_five_seeds_decide(script):
    runs = [run_of("baseline", seed, 1.5 + 0.01 * seed) for seed in range(5)]
    better = [run_of("better", seed, 1.4 + 0.01 * seed) for seed in range(5)]
    same = [run_of("same", seed, 1.49 + 0.01 * seed) for seed in range(5)]
    rows = script.table([*runs, *better, *same, run_of("one", 0, 1.3)]).splitlines()[2:]
    assert "1.5200 (sd 0.0158)" in rows[0] and rows[1].endswith("| -0.1000, 10.0 standard errors: counts |")
    assert rows[2].endswith("does not count |") and rows[3].endswith("| -0.2200 |")
    assert "disturbed" not in rows[0]
    slow = script.table([*runs[:4], run_of("baseline", 9, 1.5, speed=90)])
    assert "9: 1.5000 (disturbed)" in slow


def test_held_out_files_are_the_end_of_the_text(script, tmp_path, monkeypatch):
    sources = []
    for number in range(100):
        sources.append(tmp_path / f"{number}.py")
        sources[-1].write_text(f"{number:010}")
    monkeypatch.setattr("toolkit.data.text.python_stdlib.find_sources", lambda: sources)
    script.write_held_out(tmp_path / "held_out")
    assert len(list((tmp_path / "held_out").iterdir())) == 4
