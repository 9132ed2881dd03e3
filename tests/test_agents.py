"""AGENTS.md and experiments.md: every command is parsed, and the comparison of two ideas is run."""

import json
import re
import shlex
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.commands import all_commands
from toolkit.config.command import CommandOptions
from toolkit.ui.loggers import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "AGENTS.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.S)


def words_of(text: str) -> list[list[str]]:
    """Return the words of each command of toolkit in blocks of bash or between backticks."""
    lines = [line.strip().replace("$seed", "1") for line in text.replace("\\\n", "").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("toolkit ")]


def test_every_command_parses(monkeypatch):
    monkeypatch.chdir(ROOT)
    inline = "\n".join(re.findall(r"`(toolkit [^`]*)`", re.sub(r"```.*?```", "", PAGE, flags=re.S)))
    other = re.findall(r"```bash\n(.*?)```", (ROOT / "tutorials" / "experiments.md").read_text(), re.S)
    commands = words_of("\n".join([*BLOCKS, inline, *other]))
    assert len(commands) >= 14
    for name, *options in commands:
        if not {"--print_config", "--help"} & set(options):
            assert parse(name, options) is not None, options
    options = set(CommandOptions(all_commands()["pretrain"].load()).options())
    known = options | {"help", "print_config", "config", "format", "name"}
    assert set(re.findall(r"--([a-z_]+(?:\.[a-z_]+)?)", PAGE)) <= known


def test_make_and_scripts_exist():
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", "".join(BLOCKS)):
        assert re.search(rf"^{target}:", targets, re.M), target
    for path in re.findall(r"(?:python|pytest) ((?:scripts|tests)/\S+\.py)", PAGE):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_two_ideas_are_compared(corpus, tmp_path, monkeypatch, capsys):
    """The commands as they stand, with a second of a small text each."""
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in BLOCKS if "for seed" in block)
    *runs, report = words_of(block)
    data = [
        "--data",
        "TextFiles",
        "--data.train_data_path",
        str(corpus),
        "--data.vocab_size",
        "300",
        "--train.global_batch_size",
        "8",
    ]
    for seed in ("1", "2"):
        for words in runs:
            words = [word.replace("a-1", f"a-{seed}").replace("b-1", f"b-{seed}") for word in words]
            words[words.index("--seed") + 1], words[words.index("--train.max_time") + 1] = seed, "0.02"
            assert main([*words, "--train.max_seq_length", "32", *data]) == 0
    capsys.readouterr()
    assert main(report) == 0
    found = json.loads(capsys.readouterr().out)
    metric = found["groups"][1]["metrics"]["val_bpb"]
    assert found["is_equal"] and metric["difference"] is not None and metric["difference_stderr"] > 0
    named = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("Where the number is") : PAGE.index("**A folder is used once")]))
    assert named - {"json"} <= read_metrics(tmp_path / "out" / "a-1" / "logs" / "metrics.csv")[-1].keys()
