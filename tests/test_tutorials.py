"""Every command of the pages on several devices, troubleshooting.md, finetune.md and convert.md is run verbatim."""

import contextlib
import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.small_runs import text_data
from helpers.smollm2 import gguf_file
from helpers.talker import make_talker
from helpers.tiny_models import randomize

from toolkit import extension
from toolkit.checkpoints.folder import load_model
from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.commands import all_commands
from toolkit.config.command import CommandOptions
from toolkit.config.other_tools import suggest_option
from toolkit.data.tokenizer import train_bpe
from toolkit.extension import KINDS
from toolkit.models.families import family_of, get_config
from toolkit.ui.loggers import read_metrics

ROOT = Path(__file__).parents[1]


def commands_of(*names: str) -> list[str]:
    """Return the blocks of commands of these pages."""
    pages = [(ROOT / "tutorials" / f"{name}.md").read_text() for name in names]
    return [block for page in pages for block in re.findall(r"```bash\n(.*?)```", page, re.S)]


BLOCKS = commands_of(
    "distributed", "launching", "strategies", "plans", "run_files", "cluster",
    "parallelism", "troubleshooting", "performance", "precision",
)  # fmt: skip
FINETUNE, CONVERT = commands_of("finetune", "finetune_modes"), commands_of("convert")
PREFERENCES, METRIC = commands_of("preferences", "heads"), commands_of("metric")
EXPERTS = commands_of("experts")
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
OTHER_TOOLS = [f"from_{tool}" for tool in ("litgpt", "trl", "axolotl", "nanogpt", "torchtitan", "torchtune")]
# installs nothing: what the page installs must be there
PIP = """\
for word; do
    case $word in install|-*|.*) ;; *) python -c "from importlib.metadata import version; version('$word')" ;; esac
done"""


# the programs of clusters: each resolves the options of the command in its file
CLUSTERS = {
    "sbatch": 'exec bash "$@"',
    "srun": 'exec "$@" --print_config',
    "kubectl": """exec python - "$3" <<'END'
import subprocess, sys, yaml
*_, job = yaml.safe_load_all(open(sys.argv[1]))
subprocess.run([*job["spec"]["trainer"]["command"], "--print_config"], check=True)
END""",
    "sky": """exec python - "${@: -1}" <<'END'
import subprocess, sys, yaml
command = yaml.safe_load(open(sys.argv[1]))["run"].rstrip()
subprocess.run(f"{command} --print_config", shell=True, check=True)
END""",
    "docker": 'until [ "$1" = --entrypoint=toolkit ]; do shift; done; shift 2; exec toolkit "$@" --print_config',
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with scripts/ and stubs of the clusters' programs."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    add_commands(folder, CLUSTERS)
    page = (ROOT / "tutorials" / "distributed.md").read_text()
    (folder / "guide.yaml").write_text(re.search(r"```yaml\n(distributed:.*?)```", page, re.S)[1])
    return folder


def add_commands(folder: Path, commands: dict[str, str]) -> None:
    """Write command stubs, as lines of bash."""
    (folder / "bin").mkdir()
    for name, lines in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash -e\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)


def run(block: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run commands in the folder, with its stubs first on PATH."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", block],
        cwd=folder, env=os.environ | {"PATH": path} | variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done


def test_there_are_commands():
    text = "".join(BLOCKS)
    assert len(BLOCKS) >= 6 and "torchrun" in text and "NODE_RANK" in text and "sbatch" in text


CASES = [pytest.param(block, id=re.sub(r"\W+", "-", block)[:60]) for block in BLOCKS]


@pytest.mark.slow
@pytest.mark.parametrize("block", CASES)
def test_commands_of_the_tutorial(block, workplace):
    run(block, workplace)
    for out_dir in re.findall(r"--out_dir (?!/|s3:)(\S+)", block):
        assert (workplace / out_dir / "final" / "COMPLETE").exists()


def test_troubleshooting_page_names_options_that_exist():
    page = (ROOT / "tutorials" / "troubleshooting.md").read_text()
    setups = [command.load() for command in all_commands().values()]
    known = {option for setup in setups for option in CommandOptions(setup).options()}
    named = set(re.findall(r"--([a-z_]+(?:\.[a-z_]+)?)", page))
    assert len(named) > 30 and named <= known | {"help"}


def test_every_finetuning_and_conversion_command_parses(tmp_path, monkeypatch):
    """Parsing only: the commands of the page record their arguments instead of running."""
    nothing = dict.fromkeys(("pip", "python", "head", "tail", "curl"), "true")
    record = {"toolkit": 'printf "%s\\0" "$@" "" >> "$ARGUMENTS"'}
    record["torchrun"] = 'until [ "$1" = toolkit ]; do shift; done; exec "$@"'
    add_commands(tmp_path, nothing | record)
    (tmp_path / "config_hub").symlink_to(ROOT / "config_hub")
    for block in FINETUNE + CONVERT + PREFERENCES + METRIC + EXPERTS + commands_of(*OTHER_TOOLS):
        run(block, tmp_path, ARGUMENTS=str(tmp_path / "arguments"))
    monkeypatch.chdir(tmp_path)
    lines = [line.split("\0") for line in (tmp_path / "arguments").read_text().removesuffix("\0\0").split("\0\0")]
    assert {name for name, *_ in lines} >= set(all_commands()) - {
        "pretrain",
        "prepare_data",
        "generate",
        "serve",
        "launch",
        "report",
        "consolidate",
        "verify",
        "doctor",
        "verify_parallel",
        "schema",
        "completion",
    }
    for name, *options in lines:
        if "gpt2_train_cfg.yaml" in options:
            continue  # minGPT's: extensions/foreign/tests/test_other_formats.py
        assert parse(name, options) is not None


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHER_TOOLS)
def test_commands_for_users_of_other_tools_run(page, tmp_path):
    """What a CPU can do, with a tiny model in place of the hub's."""
    make_talker(tmp_path / "checkpoints" / "HuggingFaceTB" / "SmolLM2-135M-Instruct", block_size=256)
    rows = [{"prompt": f"{n} + 1?", "completion": f"{n + 1}"} for n in range(300)]
    (tmp_path / "faq.json").write_text(json.dumps(rows))
    (tmp_path / "faq.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "input.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    (tmp_path / "bin").mkdir()
    blocks = [block for block in commands_of(page) if re.search("SmolLM2|pico-llama|CharText", block)]
    assert blocks
    for block in blocks:
        block = re.sub(r"^toolkit download .*\n", "", block.replace("2000", "200"), flags=re.M)
        run(block, tmp_path, CUDA_VISIBLE_DEVICES="")
        for out_dir in re.findall(r"--out_dir (?!/|s3:)(\S+)", block):
            assert (tmp_path / out_dir / "final" / "COMPLETE").exists()


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


@pytest.mark.slow
def test_finetuning_page_runs_from_top_to_bottom(tmp_path):
    gguf_file()  # skips without it
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    add_commands(tmp_path, {"pip": PIP})
    for block in FINETUNE:
        done = run(block, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "huggingface"))
        print(block, done.stdout, done.stderr, sep="\n")
    with open(tmp_path / "out" / "trivia" / "logs" / "metrics.csv") as file:
        losses = [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    assert len(losses) == 4 and losses[0] > 6 and max(losses[1:]) < 2.7


@pytest.mark.slow
def test_metric_page(tmp_path):
    """As it stands, with a tiny model that has a chat template."""
    make_talker(tmp_path / "checkpoints" / "smollm2", block_size=128)
    page = (ROOT / "tutorials" / "metric.md").read_text()
    (tmp_path / "my_metrics.py").write_text(re.search(r"```python\n(.*?)```", page, re.S)[1])
    for block in METRIC:
        if "--eval.tasks" not in block:  # they are on the hub; see extensions/metric/tests/test_answer_metrics.py
            run(block, tmp_path)
    assert (tmp_path / "out" / "capitals" / "best" / "COMPLETE").exists()
    last = read_metrics(tmp_path / "out" / "margins" / "logs" / "metrics.csv")[-1]
    names = ("short", "short_stderr", "longest", "margin", "margin_stderr", "choice", "choice_norm")
    assert all(last[f"val_{name}"] == last[f"val_{name}"] for name in names) and 0 <= last["val_choice"] <= 1


@pytest.mark.slow
def test_experts_page(tmp_path, corpus):
    """On a random model of the same type; its peft code loads adapters with the logits of toolkit's."""
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("peft")
    tokenizer = train_bpe([file.read_text() for file in sorted(corpus.iterdir())], 300)
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    eos = '{"eos_token": "<|endoftext|>"}'
    files = {"chat_template.jinja": template, "special_tokens_map.json": eos, "added_tokens.json": "{}"}
    tokenizer = tokenizer.with_files({name: text.encode() for name, text in files.items()})
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 0, "pad_token_id": None}
    config = transformers.OlmoeConfig(vocab_size=tokenizer.vocab_size, **sizes, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, seed=0)
    model.save_pretrained(tmp_path / "olmoe")
    tokenizer.save(tmp_path / "olmoe")
    run("toolkit convert_from_hf olmoe checkpoints/allenai/OLMoE-1B-7B-0924-Instruct", tmp_path)
    rows = [{"prompt": f"token {i}", "completion": "reads a line"} for i in range(20)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for block in EXPERTS:
        if "toolkit download" not in block:
            run(block, tmp_path)
    page = (ROOT / "tutorials" / "experts.md").read_text()
    ids = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))
    with contextlib.chdir(tmp_path), torch.no_grad():
        exec(re.search(r"```python\n(.*?)```", page, re.S)[1], names := {})
        expected = names["model"].eval()(input_ids=ids).logits
        for name in ("experts", "further"):  # --from_peft trained another epoch
            differs = (load_model(Path("out", name, "final")).eval()(ids) - expected).abs().max() / expected.abs().max()
            assert (differs < 1e-5) == (name == "experts")


@pytest.mark.slow
def test_heads_page(tmp_path):
    """As it stands, with a tiny model that has a chat template."""
    make_talker(tmp_path / "checkpoints" / "smollm2", block_size=128)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    run("python scripts/chatterbot_to_jsonl.py trivia.jsonl --topics trivia --form prompt", tmp_path)
    for block in commands_of("heads"):
        run(block, tmp_path)
    with open(tmp_path / "predictions.csv") as file:
        assert {row["prediction"] for row in csv.DictReader(file)} <= {"food", "science", "sports"}
    last = read_metrics(tmp_path / "out" / "reward" / "logs" / "metrics.csv")[-1]
    assert last["val_loss"] < 0.7 and last["val_accuracy"] > 0.5


@pytest.mark.slow
def test_distillation_page(tmp_path):
    """In the same steps, a small model gets closer to its teacher than without, and better."""
    for block in commands_of("distillation"):
        run(block, tmp_path)
    alone, distilled = (
        read_metrics(tmp_path / "out" / name / "logs" / "metrics.csv")[row]
        for name, row in (("measure", 0), ("distilled", -1))
    )
    assert distilled["val_divergence"] < 0.8 * alone["val_divergence"]
    assert distilled["val_next_token"] < alone["val_next_token"] - 0.05


@pytest.mark.slow
def test_conversion_page_runs_from_top_to_bottom(tmp_path):
    gguf_file()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    add_commands(tmp_path, {"pip": PIP})
    run("python scripts/smollm2_to_hf.py hub && toolkit convert_from_hf hub checkpoints/" + SMOLLM2, tmp_path)
    for block in CONVERT:
        if "toolkit download" not in block and "--push_to_hub" not in block:  # their tests have a hub
            done = run(block, tmp_path)
            print(block, done.stdout, done.stderr, sep="\n")
    first, again = (tmp_path / "out" / name / "model.safetensors" for name in ("smollm2-hf", "again-hf"))
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.slow
def test_serving_page(tmp_path):
    """As it stands, but on a free port."""
    pytest.importorskip("starlette"), pytest.importorskip("openai")
    make_talker(tmp_path / "checkpoints" / SMOLLM2, block_size=128)
    add_commands(tmp_path, {"pip": "true"})
    start, ask = commands_of("serve")
    code = re.search(r"```python\n(.*?)```", (ROOT / "tutorials" / "serve.md").read_text(), re.S)[1]
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-e", "-c", start.replace("toolkit serve", "exec toolkit serve --port 0")]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PATH": path}, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        port = re.match(rf"http://127\.0\.0\.1:(\d+)/v1 serves {SMOLLM2} on ", server.stderr.readline())[1]
        answer = json.loads(run(ask.replace("8000", port), tmp_path).stdout)
        (tmp_path / "client.py").write_text(code.replace("8000", port))
        assert run("python client.py", tmp_path).stdout == answer["choices"][0]["message"]["content"] != ""
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 143


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
