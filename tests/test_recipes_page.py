"""tutorials/recipes.md has every file of config_hub, with its command, planned memory and measurements."""

import importlib
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import plan_table
import pytest
from test_config_hub import FILES, PRESETS

from toolkit.cli.parser import parse

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| \[`(toolkit .*?)`\]\(\.\./(.*?)\) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", re.M)
PAGE = ROOT / "tutorials" / "recipes.md"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # which the script sets
        spec = importlib.util.spec_from_file_location("write_recipes", ROOT / "scripts" / "write_recipes.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def test_every_file_has_a_row_with_its_command_and_planned_memory():
    rows = {file: (command, hardware, memory) for command, file, hardware, memory, *_ in ROW.findall(PAGE.read_text())}
    assert rows.keys() == {str(path.relative_to(ROOT)) for path in [*FILES, *PRESETS]}
    for file, (command, hardware, memory) in rows.items():
        text = (ROOT / file).read_text()
        assert re.search(rf"^#\s+{re.escape(command)}$", text, re.M), file
        if "CPU" not in hardware and file not in {str(path.relative_to(ROOT)) for path in PRESETS}:
            assert f"# Planned memory: {memory} per device" in text


def test_measured_column_is_that_of_the_measurements(script, monkeypatch):
    cells = {file: last for _, file, *_, last in ROW.findall(PAGE.read_text())}
    measured = script.measurements()
    for recipe in script.recipes():
        found = [script.describe(entry, recipe) for entry in measured if entry["file"] == recipe.file]
        assert cells[recipe.file] == ("<br>".join(found) or "prediction"), "run: python scripts/write_recipes.py"
    monkeypatch.chdir(ROOT)
    for entry in measured:
        _, name, *options = shlex.split(entry["command"])
        assert parse(name, options) is not None
        assert entry["file"] in cells and entry["hardware"] and entry["commit"]
        assert entry["log"][-1]["tokens"] == entry["figures"]["tokens"]


def test_a_run_becomes_a_measurement(script, tmp_path, monkeypatch):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "metrics.csv").write_text(
        "step,tokens,loss,seconds,val_loss,val_bpb,peak_memory_gb\n1,100,5.5,12,,,0.5\n2,200,5.0,13,,,0.6\n"
        "3,300,4.5,14,4.6,2.25,0.6\n"
    )
    monkeypatch.setattr(script, "MEASURED", tmp_path / "measured")
    recipe = script.read_recipe(ROOT / "config_hub" / "pretrain" / "default.yaml")
    path = script.add(tmp_path / "run", recipe.file, "two cores", None, "")
    entry = json.loads(path.read_text())
    assert path.name == "pretrain-default-two-cores.json" and entry["command"] == recipe.command
    text = script.describe(entry | {"path": "log.json"}, recipe)
    assert text.startswith("14 s, 100 tokens/s, 0.60 GB, 2.250 bits per byte: two cores, [")


@pytest.mark.slow
def test_page_is_what_the_plan_says(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert script.render() == PAGE.read_text(), "run: python scripts/write_recipes.py"


@pytest.mark.slow
def test_readme_has_the_plans_and_what_was_measured():
    assert plan_table.table() in (ROOT / "README.md").read_text(), "run: python scripts/plan_table.py"
    page = (ROOT / "tutorials" / "performance.md").read_text()
    measured = [figures for *_, figures in plan_table.ROWS if figures]
    assert measured and all(re.search(rf"\| {speed:,} \| .* \| {gb} GB \|", page) for gb, speed in measured)
