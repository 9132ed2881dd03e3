"""The gate for text that leaves (toolkit.escape): what a stranger wrote is data in every file and line, never code.

Each writer gets hostile text wherever it takes text, and what it writes is parsed and compared with a harmless run's:
the same structure, with the text intact or refused in one line.
"""

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from helpers.cases import check_each

from tests.launching.test_launch import OPTIONS, OUT
from toolkit.cli import main
from toolkit.commands import COMMANDS, LAUNCH
from toolkit.config.command import CommandOptions
from toolkit.config.types import union_members
from toolkit.launching import FORMATS, Format
from toolkit.launching.job import Job

HARMLESS = "harmless"
HOSTILE = (  # without /, so that it is not a path with folders
    "a'\"`touch PWNED`$(touch PWNED)$$(HOME)$$5{x}{{y}}{0}|b|<b>&amp;# **c** [d](e)\\\n"
    "touch PWNED #\r\x1b]0;own\x07\x1b[2J\u2028\x9b---\n```\n"
)
RUN = ["pretrain", "pico-llama", "--devices", "1", "--accelerator", "cpu"]


def text_options(command: str) -> list[str]:
    """Return the options that take text, by their types."""
    import importlib

    options = CommandOptions(importlib.import_module(COMMANDS[command][0]).setup).options()
    return [name for name, option in options.items() if str in union_members(option.kind)]


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


def launch(format: str, capsys, *options: str) -> tuple[str | None, str]:
    """Return the file and the message of `toolkit launch`."""
    fixed = [word for word in OPTIONS[format] if word not in ("--gpu", "H100")]
    end = ["--out_dir", OUT[format], "--initial_checkpoint_dir", "s3://bucket/model"]  # elsewhere: not planned
    at = options.index("--") if "--" in options else len(options)
    code = main([LAUNCH, format, *fixed, *options[:at], "--", *RUN, *end, *options[at + 1 :]])
    out, err = capsys.readouterr()
    assert code in (0, 2) and (code == 0) == bool(out), err
    return out or None, err


def test_no_option_of_launch_or_its_command_adds_lines_or_code(tmp_path, capsys):
    """Each option that takes text, in every format: the text is a word of the command, or refused in one line."""
    (tmp_path / "run").mkdir()
    own = [["--" + name] for name in text_options(LAUNCH) if name != "out"]
    of_command = [["--", "--" + name] for name in text_options("pretrain")]
    assert len(own) > 6 and len(of_command) > 20
    n_written = 0

    def check(format: str, words: list[str]) -> None:
        nonlocal n_written
        *before, flag = words
        text, message = launch(format, capsys, *before, f"{flag}={HOSTILE}")
        assert all(line.isprintable() for line in message.splitlines())
        if text is None:
            *notes, error = message.splitlines()
            assert error.startswith("toolkit launch: ") and all("given 2 times" in note for note in notes), message
            return
        n_written += 1
        harmless, _ = launch(format, capsys, *before, f"{flag}={HARMLESS}")
        parsed = parse_file(format, text, tmp_path / "run")
        expected = parse_file(format, harmless, tmp_path / "run")
        assert replace_values(parsed, HOSTILE) == replace_values(expected, HARMLESS)

    check_each(check, [(format, words) for format in FORMATS for words in own + of_command])
    assert n_written > 20  # --log.run and others are free text


def test_settings_file_of_a_stranger_is_no_part_of_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(format: str, name: str) -> None:
        settings = {"model_name": "pico-llama", "devices": 2, "accelerator": "cpu", "out_dir": OUT[format]}
        path = Path("/shared" if "/shared" in OPTIONS[format] else str(tmp_path), "settings.yaml")
        with mock.patch("toolkit.cli.parser.read_config", lambda file: settings | {name: f"/x{HOSTILE}"}):
            assert main([LAUNCH, format, *OPTIONS[format], "--", "pretrain", "--config", str(path)]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and f"--{name} '/x" in err and err[:-1].isprintable(), err

    cases = [(format, "initial_checkpoint_dir") for format in FORMATS if format != "skypilot"]
    check_each(check, cases)
