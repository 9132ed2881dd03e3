"""Every command of the pages runs, in reading order in one folder, and what a page promises of its results is true."""

import contextlib
import csv
import dataclasses
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.hub_stub import Hub
from helpers.reader import FILES, ROOT, TRAINS, Reader, add_commands, commands_of, pages, run, shorten, text_of
from helpers.small_runs import text_data

from toolkit import extension
from toolkit.checkpoints.folder import load_model
from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.commands import all_commands
from toolkit.config.command import CommandOptions
from toolkit.config.other_tools import suggest_option
from toolkit.extension import KINDS
from toolkit.models.families import family_of, get_config
from toolkit.ui.loggers import read_metrics

OTHER_TOOLS = [f"from_{tool}" for tool in ("litgpt", "trl", "axolotl", "nanogpt", "torchtitan", "torchtune")]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    pytest.importorskip("transformers"), pytest.importorskip("peft"), pytest.importorskip("openai")
    from helpers.s3 import serve  # slow to import

    with Hub() as hub, serve() as s3:
        s3.checks_keys = False
        s3.client.create_bucket(Bucket="my-bucket")
        reader = Reader(tmp_path_factory.mktemp("clone"), hub, s3.environ)
        yield reader
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", pages())
def test_commands_of_the_pages_run_in_reading_order(page, reader):
    """In one folder: a page may need what the pages before it have made, so that ``-k`` selects too little."""
    reader.read(page)
    if page in RESULTS:
        RESULTS[page](reader)


def logged(reader: Reader, run: str) -> list[dict]:
    return read_metrics(reader.folder / "out" / run / "logs" / "metrics.csv")


def check_finetune(reader):
    losses = [row["val_loss"] for row in logged(reader, "trivia") if row["val_loss"] == row["val_loss"]]
    assert len(losses) == 4 and max(losses[1:]) < 0.9 * losses[0]


def check_metric(reader):
    assert (reader.folder / "out" / "capitals" / "best" / "COMPLETE").exists()
    last = logged(reader, "margins")[-1]
    names = ("short", "short_stderr", "longest", "margin", "margin_stderr", "choice", "choice_norm")
    assert all(last[f"val_{name}"] == last[f"val_{name}"] for name in names) and 0 <= last["val_choice"] <= 1


def check_experts(reader):
    """The page's peft code loads adapters with the logits of toolkit's."""
    code = re.search(r"```python\n(.*?)```", text_of("experts"), re.S)[1]
    ids = torch.randint(0, 250, (2, 32), generator=torch.Generator().manual_seed(1))
    with contextlib.chdir(reader.folder), torch.no_grad():
        exec(re.sub(r'"allenai/[^"]+"', '"hub/experts"', code), names := {})
        expected = names["model"].eval()(input_ids=ids).logits
        for name in ("experts", "experts-further"):  # --from_peft trained another epoch
            differs = (load_model(Path("out", name, "final")).eval()(ids) - expected).abs().max() / expected.abs().max()
            assert (differs < 1e-5) == (name == "experts")


def check_heads(reader):
    with open(reader.folder / "predictions.csv") as file:
        assert {row["prediction"] for row in csv.DictReader(file)} <= {"food", "science", "sports"}
    last = logged(reader, "reward")[-1]
    assert last["val_loss"] < 0.7 and last["val_accuracy"] > 0.5


def check_distillation(reader):
    """In the same steps, a small model gets closer to its teacher than without, and better."""
    alone, distilled = logged(reader, "measure")[0], logged(reader, "distilled")[-1]
    assert distilled["val_divergence"] < 0.8 * alone["val_divergence"]
    assert distilled["val_next_token"] < alone["val_next_token"] - 0.05


def check_convert(reader):
    first, again = (reader.folder / "out" / name / "model.safetensors" for name in ("smollm2-hf", "again-hf"))
    assert first.read_bytes() == again.read_bytes()


def check_serve(reader):
    code = re.search(r"```python\n(.*?)```", text_of("serve"), re.S)[1]
    answer = json.loads(reader.last.stdout)["choices"][0]["message"]["content"]
    assert reader.run(f"python - <<'END'\n{code}\nEND").stdout == answer != ""


RESULTS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}


def test_each_page_trains_in_its_own_folders():
    """Commands refuse a folder that is in use, so that a second page with the same name fails."""
    blocks = [(page, shorten(block)) for page in pages() for block in commands_of(page)]
    used = {(page, name) for page, block in blocks for name in TRAINS.findall(block)}
    assert len(used) > 60
    assert not [name for name, n in Counter(name for _, name in used).items() if n > 1]


def test_troubleshooting_page_names_options_that_exist():
    page = text_of("troubleshooting")
    setups = [command.load() for command in all_commands().values()]
    known = {option for setup in setups for option in CommandOptions(setup).options()}
    named = set(re.findall(r"--([a-z_]+(?:\.[a-z_]+)?)", page))
    assert len(named) > 30 and named <= known | {"help"}


def test_every_command_parses(tmp_path, monkeypatch):
    """Parsing only: commands of toolkit record their arguments, and nothing else runs."""
    torchrun = 'while [ $# != 0 -a "$1" != toolkit ]; do shift; done; exec "$@"'
    add_commands(tmp_path, {"toolkit": 'printf "%s\\0" "$@" "" >> "$ARGUMENTS"', "torchrun": torchrun})
    for name in ("cat", "mkdir"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    (tmp_path / "config_hub").symlink_to(ROOT / "config_hub")
    (tmp_path / "toolkit").symlink_to(".")  # the clone
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    variables = {"ARGUMENTS": str(tmp_path / "arguments"), "PATH": str(tmp_path / "bin")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(extension, "_module_extensions", {})
    for page in pages():
        for name, content in FILES.findall(text_of(page)):
            (tmp_path / name).write_text(content)
        for block in commands_of(page):
            run("command_not_found_handle() { :; }\n" + block, tmp_path, **variables)
    lines = [line.split("\0") for line in (tmp_path / "arguments").read_text().removesuffix("\0\0").split("\0\0")]
    assert {name for name, *_ in lines} >= set(all_commands())
    for name, *options in lines:
        if "gpt2_train_cfg.yaml" not in options:  # minGPT's: extensions/foreign/tests/test_other_formats.py
            assert parse(name, options) is not None


def test_pages_for_users_of_other_tools_agree_with_the_hints():
    """Where an unknown flag gets a hint, the tables of the pages have the same option."""
    setups = [all_commands()[name].load() for name in ("pretrain", "finetune_lora")]
    options = {option for setup in setups for option in CommandOptions(setup).options()}
    checked = set()
    for page in OTHER_TOOLS:
        column = None
        for line in (ROOT / "tutorials" / f"{page}.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if "toolkit" in cells:
                column = cells.index("toolkit")
            elif cells and column:
                for name in re.findall(r"`(?:--|\w+\.)?(\w+)", " ".join(cells[:column])):
                    hint = re.search(r"did you mean ([\w.]+)", suggest_option(name, options, str))
                    if hint:
                        checked.add(name)
                        assert hint[1].rpartition(".")[2] in " ".join(cells[column:]), (page, line, hint[1])
    assert len(checked) > 30


EXTEND, CALLBACKS, OBJECTIVE, EXTENSION = (
    (ROOT / "tutorials" / f"extend{part}.md").read_text() for part in ("_family", "_callback", "_objective", "")
)


def test_extend_page_shows_the_functions_of_the_family():
    family = (ROOT / "toolkit" / "models" / "families" / "starcoder2.py").read_text()
    shown = [block for block in re.findall(r"```python\n(.*?)```", EXTEND, re.S) if block.startswith("def ")]
    assert len(shown) == 3
    for block in shown:
        assert block in family


def test_extend_page_renames_a_prefix():
    _, code = [block for block in re.findall(r"```python\n(.*?)```", EXTEND, re.S) if not block.startswith("def ")]
    exec(code, page := {})
    config = get_config("pico-llama").with_vocab_size(256)
    renamed = [name for entry in page["weight_map"](config) for name in entry.hf]
    expected = [name for entry in family_of(config).weight_map(config) for name in entry.hf]
    assert [name.replace("backbone.", "model.") for name in renamed] == expected
    assert not [name for name in renamed if name.startswith("model.")] and "backbone.norm.weight" in renamed


def test_extend_page_names_all_that_an_extension_adds():
    (listed,) = re.findall(r"An extension adds names to the command line: ([^.]+)\.", EXTENSION)
    names = re.split(r", | and ", listed.replace("\n", " ").replace("option groups", "option_groups"))
    assert tuple(names) == KINDS == tuple(re.findall(r"^\| `(\w+)` \|", EXTENSION, re.M))[: len(KINDS)]


def test_extend_page_shows_the_model(capsys):
    pytest.importorskip("transformers")
    code, _ = [block for block in re.findall(r"```python\n(.*?)```", EXTEND, re.S) if not block.startswith("def ")]
    exec(code, {})
    listed = re.findall(r"^    (model\..*)$", EXTEND, re.M)
    assert len(listed) == 5 and set(listed) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("block", re.findall(r"```bash\n(.*?)```", EXTEND, re.S))
def test_extend_page_test_commands(block):
    done = run(block, ROOT)
    assert re.search(r"^\.+ +\[100%\]", done.stdout, re.M)


def test_extend_page_callbacks(tmp_path, monkeypatch, capsys, corpus):
    monkeypatch.chdir(tmp_path)
    for kind, name in (("python", "my_callbacks.py"), ("yaml", "callbacks.yaml")):
        (tmp_path / name).write_text(re.search(rf"```{kind}\n(.*?)```", CALLBACKS, re.S)[1])
    command = re.search(r"```bash\ntoolkit (.*?)\n```", CALLBACKS, re.S)[1]
    monkeypatch.setattr(sys, "path", sys.path[:])  # the run adds this folder
    monkeypatch.delitem(sys.modules, "my_callbacks", raising=False)
    assert main([*command.split(), "--accelerator", "cpu", *text_data(corpus), "--train.max_seq_length", "32"]) == 0
    assert "stopping after step 1: the loss is 9.0 or less" in capsys.readouterr().out
    header, row = (tmp_path / "out" / "callbacks" / "logs" / "metrics.csv").read_text().splitlines()
    assert float(dict(zip(header.split(","), row.split(","), strict=True))["grad_q50"]) > 0


def test_extend_page_objective(tmp_path, monkeypatch, corpus):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # the run adds this folder
    monkeypatch.setattr(extension, "_module_extensions", {})
    monkeypatch.delitem(sys.modules, "focal", raising=False)
    (tmp_path / "focal.py").write_text(re.search(r"```python\n(.*?)```", OBJECTIVE, re.S)[1])
    command = re.search(r"```bash\ntoolkit (.*?)\n```", OBJECTIVE, re.S)[1].split()
    data = [
        "--accelerator",
        "cpu",
        *text_data(corpus),
        "--train.max_seq_length",
        "32",
        "--train.global_batch_size",
        "8",
    ]
    assert main([*command, *data]) == 0
    (row, *_) = read_metrics(tmp_path / "out" / "focal" / "logs" / "metrics.csv")
    assert 0 < row["loss"] < row["cross_entropy"]
    assert main([*command, *data, "--objective.gamma", "0", "--out_dir", "zero"]) == 0
    plain = [word for word in command if "objective" not in word and word not in ("Focal", "1.5")]
    assert main([*plain, *data, "--out_dir", "plain"]) == 0
    zero, plain = (read_metrics(tmp_path / out / "logs" / "metrics.csv") for out in ("zero", "plain"))
    for a, b in zip(zero, plain, strict=True):
        assert a["loss"] == a["cross_entropy"] == pytest.approx(b["loss"], rel=1e-5)


def test_extend_page_extension(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # the run adds this folder
    monkeypatch.setattr(extension, "_module_extensions", {})
    files = ("counting.py", "counting_data.py", "counting_log.py")
    for name, block in zip(files, re.findall(r"```python\n(.*?)```", EXTENSION, re.S), strict=True):
        (tmp_path / name).write_text(block)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    command = re.search(r"```bash\ntoolkit (.*?)\n```", EXTENSION, re.S)[1].replace("\\\n", "")
    assert main([*command.split(), "--accelerator", "cpu", "--devices", "1"]) == 0
    assert "Data: tokens in steps of 3" in capsys.readouterr().out
    options, *points = map(json.loads, (tmp_path / "out/counting/logs/lines.jsonl").read_text().splitlines())
    assert options["extensions"] == ["counting"] and [point["step"] for point in points] == [1, 2, 3, 4]
    kinds = re.findall(r"^\| `(\w+)` \|", EXTENSION, re.M)
    assert kinds == [field.name for field in dataclasses.fields(extension.Extension)]
