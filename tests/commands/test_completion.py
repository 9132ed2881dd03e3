"""`toolkit completion`, in the shells themselves: bash and zsh at a terminal, fish with `complete -C`."""

import os
import pty
import select
import shutil
import subprocess
import time

import pytest

from toolkit.cli import main
from toolkit.commands import all_commands

CASES = {
    "toolkit finetune_l": "finetune_lora",
    "toolkit finetune_lora --lora_dr": "--lora_dropout",
    "toolkit pretrain --train.lr_sche": "--train.lr_schedule",
    "toolkit pretrain --train.lr_schedule cos": "cosine",
    "toolkit plan pretrain --train.lr_schedule lin": "linear",
    "toolkit plan pretrain --host_m": "--host_memory_gb",
    "toolkit plan pre": "pretrain",
    "toolkit schema finetune_f": "finetune_full",
    "toolkit pretrain --dry_run t": "true",
    "toolkit verify_parallel finetune_full --data Synth": "SyntheticTokens",
    "toolkit pretrain --strategy dd": "ddp",
    "toolkit pretrain pico": "pico-llama",
    "toolkit finetune_full --data Synthetic": "SyntheticTokens",
    "toolkit finetune_full --data.json_p": "--data.json_path",
    "toolkit pretrain --out_dir ru": "runs_of_today",
    "toolkit generate ru": "runs_of_today",
    "toolkit completion f": "fish",
}
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source ./script"),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u; eval "$(<script)"'),
}


@pytest.fixture
def folder(request, tmp_path, capsys):
    shell = request.getfixturevalue("shell") if "shell" in request.fixturenames else "fish"
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "runs_of_today").mkdir()
    return tmp_path


@pytest.mark.parametrize("shell", START)
def test_tab_at_a_terminal(shell, folder):
    command, setup = START[shell]
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "ZDOTDIR": str(folder), "HISTFILE": ""}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        os.write(ours, f"{setup}; echo rea''dy\n".encode())
        assert "ready" in read_until(ours, "ready")
        for text, expected in CASES.items():
            line = f"{text.rpartition(' ')[0]} {expected}"
            os.write(ours, f"{text}\t".encode())
            shown = read_until(ours, line)
            assert line in shown, shown
            os.write(ours, b"\x15")  # clears the line
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, text: str, seconds: float = 20.0) -> str:
    """Return the terminal's output up to ``text``, or what came in these seconds."""
    shown, deadline = "", time.monotonic() + seconds
    while text not in shown and (left := deadline - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


def test_fish(folder):
    for text, expected in CASES.items():
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source ./script; complete -C '{text}'"],
            cwd=folder, env=os.environ | {"HOME": str(folder)}, capture_output=True, text=True,
        )  # fmt: skip
        assert expected in [word.rstrip("/") for word in done.stdout.split()], done.stdout + done.stderr


def test_script_has_every_command_and_the_names_that_no_type_lists(capsys):
    assert main(["completion", "bash"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = {name: set(text.rstrip(")").split()) for name, _, text in (line.partition("=(") for line in lines)}
    assert words["_shtab_toolkit_subparsers"] == {*all_commands()}
    assert "--data.json_path" in words["_shtab_toolkit_plan_pretrain_option_strings"]
    assert {"auto", "fsdp"} <= words["_shtab_toolkit_pretrain___strategy_choices"]
    commands = words["_shtab_toolkit_schema___command_choices"]
    assert "pretrain" in commands and "verify_parallel" not in commands


def test_unknown_shell(capsys):
    assert main(["completion", "tcsh"]) == 2
    line = "toolkit completion: shell tcsh: must be one of bash, zsh, fish; did you mean 'zsh'?\n"
    assert capsys.readouterr().err == line
