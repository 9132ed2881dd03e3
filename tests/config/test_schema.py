"""The JSON Schema of the YAML files: two validators and toolkit accept and refuse the same files."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import fastjsonschema
import jsonschema
import pytest
import yaml

from toolkit.cli import main
from toolkit.commands import TRAINING, all_commands

ROOT = Path(__file__).parents[2]
SCHEMAS = {name: json.loads((ROOT / "config_hub" / "schema" / f"{name}.json").read_text()) for name in TRAINING}


@cache
def fast_validator(command: str) -> Callable[[object], object]:
    return fastjsonschema.compile(SCHEMAS[command])


def is_valid(command: str, values: object) -> tuple[bool, bool]:
    """Whether each validator accepts the values."""
    slow = jsonschema.Draft7Validator(SCHEMAS[command]).is_valid(values)
    try:
        fast_validator(command)(values)
    except fastjsonschema.JsonSchemaException:
        return slow, False
    return slow, True


@pytest.mark.parametrize("command", TRAINING)
def test_the_files_of_config_hub_are_current(command, capsys):
    assert main(["schema", command]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown) == SCHEMAS[command], "run: python scripts/write_schemas.py"
    assert SCHEMAS[command]["title"] == f"toolkit {command}"
    jsonschema.Draft7Validator.check_schema(SCHEMAS[command])


OTHERS = [name for name, command in all_commands().items() if name not in TRAINING and not command.wraps_training]


@pytest.mark.parametrize("command", OTHERS)
def test_every_command_has_a_schema(command, capsys):
    assert main(["schema", command]) == 0
    jsonschema.Draft7Validator.check_schema(json.loads(capsys.readouterr().out))


def test_unknown_command(refusal):
    assert "did you mean 'pretrain'" in refusal("schema", "pretrian")


@pytest.mark.parametrize("path", sorted((ROOT / "config_hub").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_names_its_schema_and_validates(path):
    text = path.read_text()
    command, reference = re.search(
        r"^#   toolkit (\w+) .*\n# yaml-language-server: \$schema=(\S+)$", text, re.M
    ).groups()
    assert (path.parent / reference).resolve() == ROOT / "config_hub" / "schema" / f"{command}.json"
    assert is_valid(command, yaml.safe_load(text)) == (True, True)


GOOD = [
    "train: {max_steps: 10, learning_rate: 1e-3, max_tokens: 1e6}",
    "train.max_steps: 10",
    "train: {max_steps: null, micro_batch_size: auto}\ntrain.learning_rate: auto",
    "data: {class_path: TextFiles, init_args: {train_data_path: x, vocab_size: characters}}",
    "data: {class_path: TextFiles, train_data_path: x}",
    "data: PythonStdlib\ndata.vocab_size: 300",
    "data: {vocab_size: 300}",
    "data: {class_path: Mixture, init_args: {sources: {a: {data: PythonStdlib, weight: 1}}, sources.a.weight: 2}}",
    "optimizer: {betas: [0.9, 0.95], options: {momentum: 0.9}}",
    "objective: NextToken",
    "resume: auto",
    "fsdp: {wrap_classes: [A, B], auto_wrap: class}",
    "extensions: []",
]
BAD = [
    "trian: {max_steps: 10}",
    "train: {max_step: 10}",
    "train.max_step: 10",
    "train: {max_steps: many}",
    "train: {max_steps: 1.5}",
    "train: {learning_rate: [1]}",
    "train: {lr_schedule: cosin}",
    "train: 3",
    "train: {keep_best: 2}",
    "data: {class_path: TextFile}",
    "data: NoSuchData",
    "data: {class_path: TextFiles, init_args: {train_data_path: x, json_path: y}}",
    "data: {class_path: TextFiles, train_data_path: x, vocab_size: words}",
    "data: {no_such_option: 1}",
    "data.no_such_option: 1",
    "optimizer: {betas: [0.9]}",
    "optimizer: {options: 3}",
    "fsdp: {sharding_strategy: FULL}",
    "devices: two",
    "precision: bf16",
    "max_steps: 10",
]


@pytest.mark.parametrize(("text", "is_good"), [*((t, True) for t in GOOD), *((t, False) for t in BAD)])
def test_validators_and_toolkit_agree(text, is_good, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert is_valid("pretrain", yaml.safe_load(text)) == (is_good, is_good)
    code = main(["pretrain", "--config", str(path), "--print_config"])
    assert code == (0 if is_good else 2), capsys.readouterr().err
