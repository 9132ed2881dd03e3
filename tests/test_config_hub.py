"""The configurations in config_hub: each parses, has a plan, and states its command and planned memory."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except

from toolkit.cli import main

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "config_hub").rglob("*.yaml") if path.parent.name != "data")
PRESETS = sorted((ROOT / "config_hub" / "data").glob("*.yaml"))


FAST = [path for path in FILES if path.name == "default.yaml" or path.parent.name == "smollm2-135m"]


@pytest.mark.parametrize("path", slow_except(FAST, FILES), ids=lambda path: str(path.relative_to(ROOT / "config_hub")))
def test_states_its_command_and_planned_memory(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, value in (("is_available", False), ("device_count", 0)):  # the plan is the same on every machine
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    text = path.read_text()
    command = re.search(r"^#\s+toolkit (\w+ .*)$", text, re.M)[1]
    stated = re.search(r"^# Planned memory: ([\d.]+) GB per device", text, re.M)[1]
    card = re.search(r"GPUs? with (\d+) GB", text)
    options = ["--device_memory_gb", card[1]] if card else []
    assert main(["plan", *shlex.split(command), "--format", "json", *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert f"{planned['memory_gb']['total']:.2f}" == stated
    assert planned["fits"] is (True if card else None)


def test_every_model_has_finetuning_configs():
    kinds = {path.parent.name: set() for path in FILES if path.parent.parent.name == "finetune"}
    for path in FILES:
        if path.parent.name in kinds:
            kinds[path.parent.name].add(path.stem)
    assert kinds.keys() == {"smollm2-135m", "llama-3.2-1b", "llama-2-7b", "qwen2.5-7b"}
    assert all(("full" in found) == ("7b" not in model) for model, found in kinds.items())


def test_there_are_presets_of_data():
    assert {path.stem for path in PRESETS} == {
        "c4",
        "fineweb-edu",
        "openwebtext",
        "redpajama",
        "the-stack",
        "tinystories",
    }


@pytest.mark.parametrize("path", slow_except(PRESETS[:1], PRESETS), ids=lambda path: path.stem)
def test_preset_of_data_states_a_command_that_can_be_planned(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = re.search(r"^#\s+toolkit (\w+ .*)$", path.read_text(), re.M)[1]
    assert f"config_hub/data/{path.name}" in command
    assert main(["plan", *shlex.split(command), "--format", "json"]) == 0, capsys.readouterr().err
