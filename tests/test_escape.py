"""The gate for text that leaves (toolkit.escape): what a stranger wrote is data in every file and line, never code.

Each writer gets hostile text wherever it takes text, and what it writes is parsed and compared with a harmless run's:
the same structure, with the text intact or refused in one line.
"""

import ast
import csv
import gc
import io
import json
import re
import subprocess
from html.parser import HTMLParser
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from helpers.cases import check_each
from markdown_it import MarkdownIt
from rich.console import Console
from toolkit_launch.formats import FORMATS, Format
from toolkit_launch.job import Job
from toolkit_report.compare import render_json
from toolkit_report.markdown import render_markdown
from toolkit_report.page import render_page
from toolkit_report.run import read_runs

from extensions.launch.tests.test_launch import OPTIONS, OUT
from toolkit.checkpoints.hf.card import write_model_card
from toolkit.cli import main
from toolkit.commands import all_commands
from toolkit.config.checks import print_once
from toolkit.config.command import CommandOptions
from toolkit.config.types import union_members
from toolkit.config.values import OptionValue
from toolkit.errors import notice
from toolkit.escape import csv_writer, one_line, printable, to_yaml
from toolkit.io.streams import EscapedOutput
from toolkit.models.families import get_config
from toolkit.ui.console import JSONProgress, PlainProgress
from toolkit.ui.events import write_event
from toolkit.ui.live import LiveProgress
from toolkit.ui.loggers import COLUMNS
from toolkit.ui.progress import ProgressDisplay

HARMLESS = "harmless"
HOSTILE = (  # without /, so that it is not a path with folders
    "a'\"`touch PWNED`$(touch PWNED)$$(HOME)$$5{x}{{y}}{0}|b|<b>&amp;# **c** [d](e)\\\n"
    "touch PWNED #\r\x1b]0;own\x07\x1b[2J\u2028\x9b---\n```\n"
)
RUNS = {  # models that are elsewhere: not planned
    "pretrain": ["pretrain", "pico-llama", "--initial_checkpoint_dir", "s3://bucket/model"],
    "finetune_lora": ["finetune_lora", "/shared/model", "--data", "JSON", "--data.json_path", "/shared/rows.json"],
}


def text_options(command: str, data: str = "PythonStdlib") -> list[str]:
    """Return the options that take text, by their types."""
    options = CommandOptions(all_commands()[command].load())
    options.update({"data": OptionValue("", data)} if command != "launch" else {})
    return [name for name, option in options.options().items() if str in union_members(option.kind)]


def replace_values(value: Any, text: str) -> Any:
    """Return the structure of a value: each text that contains ``text`` becomes a mark."""
    if isinstance(value, dict):
        return {key: replace_values(inner, text) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_values(inner, text) for inner in value]
    return value.replace(text, "<text>") if isinstance(value, str) else value


# ---- launch: every format


def run_shell(script: str, folder: Path) -> list[list[str]]:
    """Run a script with stubs of the programs that it starts; return the words of each call."""
    programs, log = folder / "bin", folder / "calls"
    if not programs.exists():
        programs.mkdir()
        for name in ("srun", "docker", "toolkit", "scontrol"):
            (programs / name).write_text(f"#!/bin/bash\nprintf '%s\\0' {name} \"$@\" $'\\n' >> '{log}'\n")
            (programs / name).chmod(0o755)
    log.unlink(missing_ok=True)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HF_TOKEN": "secret", "HOME": "/home/me"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True)
    for file in (leftovers := {*folder.iterdir()} - {programs, log}):
        file.unlink()
    assert done.returncode == 0 and not done.stderr and not leftovers, f"the text was run: {leftovers} {done.stderr!r}"
    calls = log.read_bytes().decode(errors="surrogateescape").split("\0\n\0")
    return [call.split("\0") for call in calls if call]


def expand(word: str) -> str:
    """Replace variables as Kubernetes does in the command and the environment of a pod."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else f"value of {m[2]}", word)


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


def parse_shell(text: str, folder: Path) -> Any:
    return {"calls": run_shell(text, folder), "lines": len(text.split("\n"))}


def parse_driver(text: str, folder: Path) -> Any:
    tree = ast.parse(text)
    words = next(node for node in ast.walk(tree) if isinstance(node, ast.List) and len(node.elts) > 3)
    values = [ast.literal_eval(word) for word in words.elts]
    words.elts = []
    return {"words": values, "code": ast.dump(tree)}


def parse_documents(text: str, folder: Path) -> Any:
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        if "run" in document:
            document["run"] = parse_shell(document["run"], folder)["calls"]
    kubernetes = "kind" in documents[0]

    def expand_commands(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: expand_commands(inner, key) for key, inner in value.items()}
        if isinstance(value, list):
            return [expand_commands(inner, name) for inner in value]
        return expand(value) if name in ("command", "args", "value") and kubernetes else value

    return expand_commands(documents)


PARSERS = {"slurm": parse_shell, "docker": parse_shell, "ray": parse_driver}


def parse_file(format: str, text: str, folder: Path) -> Any:
    """Return the comment lines and what the format's own parser reads."""
    known = PARSERS.get(format, parse_documents)
    return {"comments": len(comments(text)), "content": known(text, folder)}


def render_job(format: str, text: str) -> str:
    words = ("toolkit", "pretrain", "--log.run", text, f"--log.group={text}", "--seed", "1")
    secrets = ("HF_TOKEN",) if "secrets" in FORMATS[format].options else ()
    job = Job("run", words, 2, 8, True, f"memory unknown: {text}", gpu="H100", shared_dir="/shared", secrets=secrets)
    return FORMATS[format].render(job if not FORMATS[format].required else Job(**{**vars(job), "image": "image:1"}))


def wrong_formats(folder: Path) -> list[str]:
    """Return the names of formats whose files have another structure with hostile text, or do not hold it intact."""
    wrong = []
    for format in FORMATS:
        parsed = {}
        for text in (HARMLESS, HOSTILE):
            try:
                parsed[text] = parse_file(format, render_job(format, text), folder)
            except (AssertionError, ValueError, SyntaxError, yaml.YAMLError) as error:
                parsed[text] = error
        if isinstance(parsed[HARMLESS], Exception):
            raise parsed[HARMLESS]
        same = isinstance(parsed[HOSTILE], dict) and (
            replace_values(parsed[HARMLESS], HARMLESS) == replace_values(parsed[HOSTILE], HOSTILE)
        )
        wrong += [] if same and json.dumps(HOSTILE)[1:-1] in json.dumps(parsed[HOSTILE]) else [format]
    return wrong


def test_files_of_launch_keep_their_structure_and_their_words(tmp_path):
    assert not wrong_formats(tmp_path)


def test_rogue_format_is_named(tmp_path):
    rogue = {
        "rogue-comment": Format(lambda job: f"# {job.summary}\ntoolkit {job.shell()}\n", set()),
        "rogue-words": Format(lambda job: f"docker '{' '.join(job.command)}'\n", set()),
    }
    with mock.patch.dict(FORMATS, rogue), mock.patch.dict(PARSERS, dict.fromkeys(rogue, parse_shell)):
        assert wrong_formats(tmp_path) == [*rogue]


def launch(format: str, command: str, option: str, is_own: bool, capsys) -> tuple[str | None, str]:
    """Return the file and the message of `toolkit launch` with an option of its own or of the command."""
    fixed = [word for word in OPTIONS[format] if word not in ("--gpu", "H100")]
    run = [*RUNS[command], "--devices", "1", "--accelerator", "cpu", "--out_dir", OUT[format]]
    code = main(["launch", format, *fixed, *[option] * is_own, "--", *run, *[option] * (not is_own)])
    out, err = capsys.readouterr()
    assert code in (0, 2) and (code == 0) == bool(out), err
    return out or None, err


def test_no_option_of_launch_or_its_command_adds_lines_or_code(tmp_path, capsys):
    """Each option that takes text: the text is a word of the command, or refused in one line."""
    (tmp_path / "run").mkdir()
    own = [("pretrain", name, True) for name in text_options("launch") if name != "out"]
    pretrain = [("pretrain", name, False) for name in text_options("pretrain")]
    finetune = [("finetune_lora", name, False) for name in text_options("finetune_lora", "JSON")]
    assert len(own) > 6 and len(pretrain) > 20 and ("finetune_lora", "data.prompt_style", False) in finetune
    n_written = 0

    def check(format: str, command: str, name: str, is_own: bool) -> None:
        nonlocal n_written
        text, message = launch(format, command, f"--{name}={HOSTILE}", is_own, capsys)
        assert all(line.isprintable() for line in message.splitlines())
        if text is None:
            *notes, error = message.splitlines()
            assert error.startswith("toolkit launch: ") and all("given 2 times" in note for note in notes), message
            return
        n_written += 1
        harmless, _ = launch(format, command, f"--{name}={HARMLESS}", is_own, capsys)
        parsed = parse_file(format, text, tmp_path / "run")
        expected = parse_file(format, harmless, tmp_path / "run")
        assert replace_values(parsed, HOSTILE) == replace_values(expected, HARMLESS)

    check_each(check, [(format, *case) for format in FORMATS for case in own + pretrain])
    check_each(check, [(format, *case) for format, case in zip(cycle(FORMATS), finetune, strict=False)])
    assert n_written > 20  # --log.run and others are free text


def test_settings_file_of_a_stranger_is_no_part_of_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(format: str, name: str) -> None:
        settings = {"model_name": "pico-llama", "devices": 2, "accelerator": "cpu", "out_dir": OUT[format]}
        path = Path("/shared" if "/shared" in OPTIONS[format] else str(tmp_path), "settings.yaml")
        with mock.patch("toolkit.cli.parser.read_config", lambda file: settings | {name: f"/x{HOSTILE}"}):
            assert main(["launch", format, *OPTIONS[format], "--", "pretrain", "--config", str(path)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and f"{name} '/x" in err and err[:-1].isprintable(), err

    cases = [(format, "initial_checkpoint_dir") for format in FORMATS if format != "skypilot"]
    check_each(check, cases)


def test_yaml_of_text_is_text_for_parsers_of_other_versions():
    """Kubernetes' parser reads 1e6 as a number and y as a boolean (resolve.go of go-yaml), where PyYAML reads text."""
    texts = ["1e6", "3e-4", "+.5e3", "0o17", "1_000", "1:30", "y", "N", "yes", "null", "~", ".inf", "=", "a\u2028b"]
    node = yaml.compose(to_yaml(texts))
    assert [scalar.value for scalar in node.value] == texts == yaml.safe_load(to_yaml(texts))
    assert all(scalar.style for scalar in node.value)
    assert to_yaml({"b": ["H100", "a\nb\n"], "a": 1}) == "b:\n- H100\n- |\n  a\n  b\na: 1\n"


# ---- Markdown, HTML and YAML: model card and report


def markdown_structure(text: str) -> list[Any]:
    """Return the elements of a Markdown document without its texts, by markdown-it, an independent parser."""
    markdown = MarkdownIt("commonmark").enable("table")

    def names(tokens: Any) -> list[Any]:
        found: list[Any] = []
        for token in tokens:
            html = Tags(token.content).tags if token.type.startswith("html") else []
            name = [token.type, token.info, *html, *names(token.children or [])]
            found += [] if token.type == "text" and found[-1:] == [name] else [name]
        return found

    return names(markdown.parse(text))


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(" ".join([tag, *(name for name, _ in attrs)]))

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")


def nested(names: list[str], text: str) -> dict[str, Any]:
    """Return settings in which each option is the text."""
    settings: dict[str, Any] = {}
    for name in names:
        *groups, last = name.split(".")
        owner = settings
        for group in groups:
            owner = owner.setdefault(group, {})
        owner[last] = text
    return settings


def write_stranger(folder: Path, text: str) -> Path:
    """Write a run whose settings, names, columns, labels and events are the text."""
    run = folder / text
    column = re.sub(r"[,\r\n\u2028]", " ", text).strip()
    settings = nested([name for name in text_options("pretrain") if not name.startswith("data.")], text)
    settings["data"] = {"class_path": text, "init_args": {"repo_id": text, "json_path": text, text: [text]}}
    settings |= {text: text, "tokenizer_dir": None, "objective": {"class_path": text, "init_args": {text: text}}}
    settings["eval"]["best_by"] = column
    (run / "final").mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "final" / "hyperparameters.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (run / "final" / "COMPLETE").touch()
    columns = [*COLUMNS, f"val_{column}", f"val_{column}_stderr", f"val_loss_{column}", column]
    row = ["1", "2", *["0.5"] * (len(columns) - 2)]
    (run / "logs" / "metrics.csv").write_text(f"{','.join(columns)}\n{','.join(row)}\n", encoding="utf-8")
    environment = {"device": text, text: text}
    write_event(run, "launch", settings=settings, model=text, devices=text, strategy=text, environment=environment)
    write_event(run, "sample", step=text, prompt=text, text=text)
    write_event(run, "warning", text=f"note: {text}")
    write_event(run, "end", error=text)
    return run


def write_card(run: Path, text: str) -> str:
    config = get_config("pico-llama").with_vocab_size(64)
    object.__setattr__(config, "name", text)  # refuses such names itself
    write_model_card(run / "card.md", config, run / "final", has_tokenizer=True)
    return (run / "card.md").read_text(encoding="utf-8")


def test_model_card_and_report_of_a_stranger_have_the_structure_of_a_harmless_one(tmp_path):
    runs, pairs = {}, {}
    for text in (HARMLESS, HOSTILE):
        runs[text] = write_stranger(tmp_path, text)
        pairs[text] = read_runs([str(runs[text]), str(write_stranger(tmp_path / "second", text))])
    cards = {text: write_card(run, text) for text, run in runs.items()}
    fronts = {text: card.split("---\n")[1] for text, card in cards.items()}
    assert yaml.safe_load(fronts[HOSTILE]) == yaml.safe_load(fronts[HARMLESS])
    reports = {text: render_markdown(pair[:1]) for text, pair in pairs.items()}
    compared = {text: render_markdown(pair) for text, pair in pairs.items()}
    for documents in (cards, reports, compared):
        assert markdown_structure(documents[HOSTILE]) == markdown_structure(documents[HARMLESS])
    printed = [cards[HOSTILE], reports[HOSTILE], compared[HOSTILE]]
    for count in (1, 2):
        pages = {text: render_page(pair[:count]) for text, pair in pairs.items()}
        assert Tags(pages[HOSTILE]).tags == Tags(pages[HARMLESS]).tags
        printed.append(pages[HOSTILE].partition("<script")[0])
    assert all(c.isprintable() or c in "\n\t" for text in printed for c in text)
    assert HOSTILE in json.loads(render_json(pairs[HOSTILE]))["groups"][0]["runs"][0]["name"]
    (block,) = (t.content for t in MarkdownIt().parse(cards[HOSTILE]) if t.type == "fence" and t.info == "yaml")
    assert yaml.safe_load(block)["data"]["init_args"]["repo_id"] == HOSTILE
    commands = [t.content for t in MarkdownIt().parse(reports[HOSTILE]) if t.type == "fence"]
    (tmp_path / "shell").mkdir()
    (words,) = run_shell(commands[0], tmp_path / "shell")
    assert words[:3] == ["toolkit", "pretrain", HOSTILE] and f"{HOSTILE}-repeated" in words


def test_model_card_has_no_command_of_a_stranger_and_no_private_text(tmp_path):
    run = write_stranger(tmp_path, HARMLESS)
    plain = {"model_name": "pico-llama", "data": {"class_path": "JSON", "init_args": {"json_path": "/home/al/a.json"}}}
    private = {
        "eval": {"metric": "check:python /home/al/grade.py --token hunter2", "metric_data": "/home/al/b.json"},
        "note": "see ~/al/c.txt or /home/al/d.txt",
    }
    secrets = ("hunter2", "grade", "/al", "home")

    def card(settings: dict[str, Any]) -> str:
        (run / "final" / "hyperparameters.yaml").write_text(yaml.safe_dump(settings))
        return write_card(run, "model")

    line = "`toolkit pretrain pico-llama --config settings.yaml` repeats the run"
    assert line in card(plain)
    assert not [word for word in secrets if word in card(plain | private)]
    assert "see c.txt or d.txt" in card(plain | private)
    for settings in (
        {"model_name": "pico-llama; touch PWNED"}, {"model_name": "--help"}, {"extensions": ["evil"]}, private,
        {"data": {"class_path": "evil.Data"}}, {"callbacks": "evil.C"}, {"optimizer": {"name": "evil.O"}},
        {"objective": "evil.Objective"}, {"checkpoint_dir": "a/b; touch PWNED"},
        {"checkpoint_dir": "a/$(touch PWNED)", "lora_r": 8},
    ):  # fmt: skip
        text = card(plain | settings)
        assert "The settings of the run:" in text and "`toolkit " not in text, settings


# ---- what is printed


def displays() -> list[type[ProgressDisplay]]:
    found = [ProgressDisplay]
    for display in found:
        found += display.__subclasses__()
    return found[1:]


def draw(display_type: type[ProgressDisplay], text: str) -> str:
    """Return what a display prints for events that hold the text."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, highlight=False, markup=False, emoji=False, width=500)
    display = display_type(console if issubclass(display_type, LiveProgress) else file)
    with display:
        display.metric_names = [f"val_{text}"]
        display.phase(text)
        display.event("start", out_dir=text)
        display.message(f"note: {text}")
        display.step(1, {"loss": 1.0, text: 2.0})
        display.validation(1, {"val_loss": 1.0, f"val_loss_{text}": 1.0, f"val_{text}": 2.0})
        display.checkpoint(1, Path(text))
    return file.getvalue()


def wrong_displays() -> list[str]:
    """Return the displays that print other control characters for hostile text than for harmless text."""
    control = re.compile("\x1b\\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028]")
    codes = {d: [{*control.findall(draw(d, text))} for text in (HARMLESS, HOSTILE)] for d in displays()}
    return [display.__name__ for display, (expected, found) in codes.items() if found - expected]


def test_displays_print_no_control_characters_of_a_text():
    assert {"PlainProgress", "JSONProgress", "LiveProgress"} <= {display.__name__ for display in displays()}
    assert not wrong_displays()
    lines = draw(PlainProgress, HOSTILE).splitlines()
    events = [json.loads(line) for line in draw(JSONProgress, HOSTILE).splitlines()]
    assert {HOSTILE} == {event.get("phase", HOSTILE) for event in events} and events[-1]["path"] == HOSTILE
    assert len(lines) == len(draw(PlainProgress, HARMLESS).splitlines()) + HOSTILE.count("\n")  # of the message


def test_live_display_draws_on_a_terminal_whose_text_is_escaped(monkeypatch):
    monkeypatch.setattr("sys.stdout", EscapedOutput(file := io.StringIO()))
    with LiveProgress() as display:
        display.message(HOSTILE)
        print("\x07")  # by another writer, meanwhile
    assert "\x1b[2K" in file.getvalue() and not {"\x07", "\x9b", "\x1b]0"} & {*re.findall("\x1b]0|.", file.getvalue())}


def test_rogue_display_is_named():
    class RogueProgress(PlainProgress):
        def _print(self, text: str) -> None:
            print(text, file=self._file)

    assert wrong_displays() == ["RogueProgress"]
    del RogueProgress
    gc.collect()


def test_notes_errors_and_output_on_a_terminal_are_escaped(capsys):
    class Failing:
        def __str__(self) -> str:
            raise ValueError

    notice(HOSTILE)
    print_once(HOSTILE)
    output = EscapedOutput(file := io.StringIO())
    csv_writer(output).writerow([HOSTILE, "b\u200d"])
    assert main([HOSTILE]) == 2 and main(["pretrain", f"--{HOSTILE}", "x"]) == 2
    printed = "".join(capsys.readouterr()) + file.getvalue()
    assert all(c.isprintable() or c in "\n\u200d" for c in printed) and "\r" not in file.getvalue()
    assert (one_line(Failing()), one_line(f"{HOSTILE}\n").count("\n")) == ("Failing", 0)
    assert list(csv.reader(io.StringIO(file.getvalue(), newline=""))) == [[printable(HOSTILE), "b\u200d"]]
