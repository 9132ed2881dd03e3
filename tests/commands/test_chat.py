"""`toolkit chat` on a real folder: a terminal, a pipe, one question; and what comes where."""

import builtins
import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
from helpers.sealing import seal
from helpers.talker import ANSWERS, make_talker

from toolkit.cli import main
from toolkit.inference import load
from toolkit.inference.chat import Conversation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_talker(tmp_path_factory.mktemp("models") / "talker")


class Stdin(io.StringIO):
    def __init__(self, text: str, person: bool = False) -> None:
        super().__init__(text)
        self.isatty = lambda: person


def chat(folder, monkeypatch, capsys, text="", *options, person=False, code=0) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", Stdin(text, person))
    assert main(["chat", str(folder), "--temperature", "0", *options]) == code
    return tuple(capsys.readouterr())


STATISTICS = r"\d+ tokens in [\d.]+ s, [\d.]+ tokens/s\n"


def test_a_pipe_one_turn_per_line(folder, monkeypatch, capsys):
    out, err = chat(folder, monkeypatch, capsys, "1\n\n  2 \n3")
    assert out == f"{ANSWERS['1']}\n{ANSWERS['2']}\n{ANSWERS['3']}\n"
    assert re.fullmatch(STATISTICS * 3, err)


def test_nothing_after_quit(folder, monkeypatch, capsys):
    assert chat(folder, monkeypatch, capsys, "1\n/quit\n2\n")[0] == f"{ANSWERS['1']}\n"
    assert chat(folder, monkeypatch, capsys, "")[0] == ""


@pytest.mark.slow
def test_weights_in_4_bits(folder, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    kinds, quantize = [], load.quantize_linears
    monkeypatch.setattr(load, "quantize_linears", lambda m, kind, **k: kinds.append(kind) or quantize(m, kind, **k))
    assert chat(folder, monkeypatch, capsys, "1\n", "--quantize", "bnb.nf4")[0] == f"{ANSWERS['1']}\n"
    assert kinds == ["bnb.nf4"]


def test_one_question_and_out(folder, monkeypatch, capsys):
    out, err = chat(folder, monkeypatch, capsys, "3\n", "--prompt", "1")
    assert out == f"{ANSWERS['1']}\n" and re.fullmatch(STATISTICS, err)
    assert chat(folder, monkeypatch, capsys, "2", "--prompt", "-")[0] == f"{ANSWERS['2']}\n"


def test_notes_are_printed_after_the_answer(folder):
    with redirect_stdout(io.StringIO()) as terminal, redirect_stderr(terminal):
        main(["chat", str(folder), "--temperature", "0", "--prompt", "1", "--max_new_tokens", "2"])
    answer, note, speed = terminal.getvalue().splitlines()
    assert ANSWERS["1"].startswith(answer) and note == "stopped after 2 tokens: --max_new_tokens reached"
    assert re.fullmatch(STATISTICS, speed + "\n")


def test_interactive_chat_shows_header_and_survives_errors(folder, monkeypatch, capsys):
    out, err = chat(folder, monkeypatch, capsys, "x" * 70 + "\n1\n", person=True)
    assert out == f"{ANSWERS['1']}\n"  # stdout is no terminal here: the prompt goes to stderr
    assert err.startswith(f"{folder} on cpu; template: checkpoint_dir {folder}: chat_template.jinja\n/quit or Ctrl-D")
    assert ">>> with this question the conversation has 72 tokens" in err


def test_ctrl_c_interrupts_an_answer_then_the_chat(folder, monkeypatch, capsys):
    questions, ask = iter(["1", "2", KeyboardInterrupt]), Conversation.ask

    def typed(prompt):
        print(prompt, end="")
        question = next(questions)
        if question is KeyboardInterrupt:
            raise KeyboardInterrupt
        return question

    def interrupted(self, question):
        for i, piece in enumerate(ask(self, question)):
            if question == "1" and i == 2:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(builtins, "input", typed)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Conversation, "ask", interrupted)
    out, err = chat(folder, monkeypatch, capsys, person=True, code=130)
    assert out == f">>> ei\n>>> {ANSWERS['2']}\n>>> "
    assert "(interrupted)\n" in err and err.endswith("toolkit chat: interrupted\n")


def test_ctrl_c_ends_a_chat_with_a_pipe(folder, monkeypatch, capsys):
    def interrupted(self, question):
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "ask", interrupted)
    chat(folder, monkeypatch, capsys, "1\n2\n", code=130)


def test_another_style_and_a_system_message(folder, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(Conversation, "ask", lambda self, q: (seen.append(self), (yield "x")))
    options = ["--prompt_style", "chatml", "--system", "be brief"]
    _, err = chat(folder, monkeypatch, capsys, "1", *options, person=True)
    (conversation,) = seen
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert "template: --prompt_style chatml\n" in err
    assert "<|im_end|> is not in the vocabulary" in err and "--data.prompt_style" not in err
    assert "--prompt_style chatml: overrides the checkpoint's own chat template\n" in err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--prompt_style", "alpaka"], "--prompt_style alpaka: must be one of"),
        (["--max_new_tokens", "0"], "--max_new_tokens 0: must be greater than zero"),
        (["--top_p", "2"], "--top_p 2.0: must be greater than 0 and at most 1"),
        (["--prompt", " "], "--prompt: is empty; give a question"),
        (["--prompt", "\udcff"], "the question is not valid UTF-8"),
        (["--prompt", "x" * 64], "with this question the conversation has 66 tokens, but must have fewer than 64"),
        (["--base_checkpoint_dir", "x"], "--base_checkpoint_dir x: has no effect"),
        (["--prompt_style", "gemma", "--system", "s"], "--prompt_style gemma: the template rejects the messages"),
    ],
)
def test_invalid_arguments_are_rejected(folder, monkeypatch, capsys, options, line):
    out, err = chat(folder, monkeypatch, capsys, "1\n", *options, code=2)
    assert err.startswith(f"toolkit chat: {line}") and err.count("\n") == 1 and out == ""


def test_a_full_context_ends_a_pipe(folder, monkeypatch, capsys):
    out, err = chat(folder, monkeypatch, capsys, "1\n" + "x" * 70 + "\n2\n", code=2)
    assert out == f"{ANSWERS['1']}\n" and "start a new chat" in err


def test_missing_template_is_reported(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    seal(tmp_path / "base")
    _, err = chat(tmp_path / "base", monkeypatch, capsys, "1\n", code=2)
    assert err.startswith("toolkit chat: --prompt_style: checkpoint_dir") and "alpaca, chatml" in err
    assert err.endswith("or provide --chat_template FILE\n")
    template = ["--chat_template", str(folder / "chat_template.jinja")]
    out, err = chat(tmp_path / "base", monkeypatch, capsys, "1\n", *template)
    assert out == f"{ANSWERS['1']}\n"
    _, err = chat(tmp_path / "base", monkeypatch, capsys, "1\n", *template, "--prompt_style", "chatml", code=2)
    assert "is not supported with --prompt_style chatml; remove one of them" in err
    _, err = chat(folder, monkeypatch, capsys, "1\n", "--chat_template", "no.jinja", code=2)
    assert err.startswith("toolkit chat: --chat_template no.jinja: no such file")


@pytest.mark.slow
def test_in_a_terminal(folder):
    """The real thing: a pseudo-terminal, keys typed into it, the signal that the terminal makes of Ctrl-C."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "toolkit", "chat", str(folder), "--temperature", "0"])
    seen = ""

    def read_until(text: str, keys: bytes = b"") -> None:
        nonlocal seen
        end = time.monotonic() + 60
        os.write(terminal, keys)
        while text not in seen:
            if select.select([terminal], [], [], 5)[0]:
                seen += os.read(terminal, 1000).decode(errors="replace")
            else:
                assert time.monotonic() < end, f"{text!r} never came: {seen}"
                os.write(terminal, keys)  # input() misses a Ctrl-C between its prompt and its wait
        seen = seen.partition(text)[2]

    read_until(">>> ")
    os.write(terminal, b"1\n")
    read_until(ANSWERS["1"])
    read_until(">>> ")
    read_until("interrupted", keys=b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130


@pytest.mark.slow
def test_answers_come_piece_by_piece_and_a_pipe_may_stay_open(folder):
    command = [sys.executable, "-m", "toolkit", "chat", str(folder), "--temperature", "0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        for question in ("1", "3"):
            process.stdin.write(f"{question}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline().decode() == f"{ANSWERS[question]}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
