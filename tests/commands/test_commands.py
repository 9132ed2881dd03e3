"""The commands together, on real files: prepare, train, evaluate, and what the README and config_hub show."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from helpers.cases import slow_except
from helpers.processes import Forked, finish
from helpers.small_runs import text_data

from toolkit.cli import main
from toolkit.commands import all_commands
from toolkit.ui.loggers import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> Path:
    """A pico model, trained by the real command."""
    out = tmp_path_factory.mktemp("run") / "out"
    assert main(["pretrain", "pico-llama", *text_data(corpus), *run(out), "--train.max_steps", "10"]) == 0
    return out


def run(out: Path) -> list[str]:
    sizes = ["--train.global_batch_size", "8", "--train.max_seq_length", "64", "--train.learning_rate", "3e-3"]
    return ["--accelerator", "cpu", "--out_dir", str(out), *sizes]


def test_evaluate_repeats_the_validation_of_the_run(corpus, trained, capsys):
    options = ["--max_seq_length", "64", "--format", "json", "--accelerator", "cpu"]
    assert main(["evaluate", str(trained / "final"), *text_data(corpus)[:4], *options]) == 0
    result = json.loads(capsys.readouterr().out)
    last = (trained / "logs" / "metrics.csv").read_text().splitlines()[-1].split(",")
    header = (trained / "logs" / "metrics.csv").read_text().splitlines()[0].split(",")
    row = dict(zip(header, last, strict=True))
    assert result["loss"] == pytest.approx(float(row["val_loss"]), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(float(row["val_bpb"]), rel=1e-5)
    assert result["data"] == "TextFiles, val"
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]), rel=1e-6)


def test_max_iters_has_the_same_name_as_in_training(corpus, trained, capsys, refusal):
    options = ["--max_seq_length", "64", "--format", "json", "--accelerator", "cpu", "--eval.max_iters"]
    command = ["evaluate", str(trained / "final"), *text_data(corpus)[:4], *options]
    assert main([*command, "1"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 4 * 64
    assert "--eval.max_iters 0: must be greater than zero" in refusal(*command, "0")


def test_evaluate_counts_bits_per_byte_of_the_text(corpus, trained, capsys):
    """On all of the training rows the bytes of the targets are the text's, but for the first of each row."""
    options = ["--max_seq_length", "64", "--format", "json", "--accelerator", "cpu", "--split", "train"]
    assert main(["evaluate", str(trained / "final"), *text_data(corpus)[:4], *options]) == 0
    result = json.loads(capsys.readouterr().out)
    n_bytes = result["loss"] / math.log(2) * result["tokens"] / result["bits_per_byte"]
    text = sum(len(path.read_bytes()) for path in corpus.iterdir())
    assert 0.85 * text < n_bytes < 0.97 * text  # 95 % are training data, and of 65 tokens 64 are targets


def test_hyperparameters_repeat_the_run(trained, tmp_path):
    again = tmp_path / "again"
    assert main(["pretrain", "--config", str(trained / "final/hyperparameters.yaml"), "--out_dir", str(again)]) == 0
    logs = [(out / "logs/metrics.csv").read_text().splitlines() for out in (trained, again)]
    columns = [[line.split(",")[2:5] for line in lines] for lines in logs]
    assert columns[0] == columns[1]


def test_json_lines_of_a_run_in_a_pipe(corpus, tmp_path, monkeypatch, capsys):
    """Standard output has only JSON, also if a callback prints; and the last line says how the run ended."""
    (tmp_path / "talking.py").write_text(
        "from toolkit import Callback\n\n\nclass Talking(Callback):\n    def on_step_end(self, trainer, metrics):\n"
        "        print('step', trainer.progress.step)\n        1 / (4 - trainer.progress.step)\n"
    )
    options = [*text_data(corpus), *run(tmp_path / "out"), "--log.format", "json", "--callbacks", "talking.Talking"]
    options += ["--train.save_interval", "2", "--eval.interval", "2", "--resume", "auto"]
    words = ["pretrain", "pico-llama", *options, "--train.max_steps"]
    monkeypatch.chdir(tmp_path)
    process = Forked([*words, "3"])
    out, err = finish(process)
    assert process.returncode == 0 and "step 3\n" in err, err
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*words, "6"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["event"] == "end" and last["status"] == "failed" and "ZeroDivisionError" in last["error"]
    events = [json.loads(line) for line in out.splitlines()]
    kinds = [event["event"] for event in events if event["event"] not in ("note", "phase")]
    assert kinds == ["start", "step", "step", "validation", "checkpoint", "step", "validation", "checkpoint", "end"]
    rows = [event for event in events if event["event"] == "step"]
    metrics = read_metrics(tmp_path / "out" / "logs" / "metrics.csv")
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in metrics[:3]]
    assert events[-1]["status"] == "finished" and events[-1]["model"] == str(tmp_path / "out" / "final")


def test_prepared_data_is_found_by_the_run(corpus, tmp_path, capsys):
    cache = ["--data.cache_dir", str(tmp_path / "cache")]
    assert main(["prepare_data", *text_data(corpus), *cache, "--max_seq_length", "64"]) == 0
    assert "preparing" in capsys.readouterr().out
    options = [*text_data(corpus), *cache, *run(tmp_path / "out"), "--train.max_steps", "1"]
    assert main(["pretrain", "pico-llama", *options]) == 0
    assert "using cached" in capsys.readouterr().out


def test_tensorboard_gets_the_metrics(corpus, tmp_path):
    pytest.importorskip("tensorboard")
    options = [*text_data(corpus), *run(tmp_path / "out"), "--train.max_steps", "3", "--logger_name", "csv,tensorboard"]
    assert main(["pretrain", "pico-llama", *options]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (tmp_path / "out" / "logs").rglob("events.out.*")
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == [1, 2, 3]


CONFIGS = sorted((ROOT / "config_hub").rglob("*.yaml"))
FAST = [path for path in CONFIGS if path.parent.name in ("pretrain", "smollm2-135m")]


@pytest.mark.parametrize("path", slow_except(FAST, CONFIGS), ids=lambda path: path.stem)
def test_every_config_starts_with_its_command_and_parses(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = re.search(r"^#\s+toolkit (\w+ .*)$", path.read_text(), re.M)[1]
    assert str(path.relative_to(ROOT)) in command
    assert main([*shlex.split(command), "--print_config"]) == 0
    shown, written = yaml.safe_load(capsys.readouterr().out), yaml.safe_load(path.read_text())
    for group, values in written.items():
        if group not in ("data", "objective"):  # each class has other defaults
            assert shown[group] == (shown[group] | values if isinstance(values, dict) else values)


PAGES = {"pretrain": 3, "streaming": 6, "remote_storage": 3, "reference": 6}


@pytest.mark.parametrize(
    ("page", "count"), [("README.md", 4), *((f"tutorials/{name}.md", n) for name, n in PAGES.items())]
)
def test_page_names_only_existing_options(page, count, capsys, monkeypatch):
    """Every `toolkit ...` line of the page parses, with its options, and every file that it links is there."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text()
    commands = re.findall(r"^toolkit (.+?)(?:\s+[#>].*)?$", text.replace("\\\n", " "), re.M)
    assert len(commands) >= count
    for command in commands:
        words = shlex.split(command)
        assert words[0] in all_commands()
        if "gpt2_train_cfg.yaml" not in words:  # minGPT's, see extensions/foreign/tests/test_other_formats.py
            assert main([*words, "--print_config"]) == 0, command
    for link in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
    for command in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", text, re.M):
        assert f"\n{''.join(command)}:" in (ROOT / "Makefile").read_text()


def test_a_finished_run_prints_commands_that_work_on_its_model(corpus, tmp_path, capsys):
    out = tmp_path / "a folder"
    assert main(["pretrain", "pico-llama", *text_data(corpus), *run(out), "--train.max_steps", "1"]) == 0
    _, _, after = capsys.readouterr().out.partition("finished after 1 steps")
    commands = [shlex.split(line) for line in after.splitlines() if line.startswith("  ")]
    assert [words[:2] for words in commands] == [["toolkit", c] for c in ("generate", "evaluate", "convert_to_hf")]
    for words in commands:
        assert main(words[1:]) == 0
