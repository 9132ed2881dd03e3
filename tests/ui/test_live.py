import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from rich.console import Console

from toolkit.ui.live import LiveProgress

METRICS = {"loss": 3.2145, "learning_rate": 3.94e-4, "grad_norm": 0.873, "tokens_per_sec": 12345.6, "tokens": 5_242_880}
VALIDATION = {"val_loss": 3.3012, "val_ppl": 27.145, "val_bpb": 1.2134}
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=width, height=30,
                   color_system=None, highlight=False, markup=False, legacy_windows=False)  # fmt: skip


def shown(progress: LiveProgress) -> list[str]:
    """Return the current lines of the display."""
    width = progress.console.width
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    screen.print(progress)
    return [line.rstrip() for line in screen.file.getvalue().splitlines()]


def printed(progress: LiveProgress) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", progress.console.file.getvalue())


@pytest.fixture
def make():
    made = []

    def build(total_steps: int | None, width: int = 80) -> LiveProgress:
        made.append(LiveProgress(terminal(width)))
        made[-1].total_steps = total_steps
        return made[-1]

    yield build
    for progress in made:
        progress.close()


def report_run(progress: LiveProgress) -> None:
    progress.phase("training")
    progress.step(1, METRICS)
    time.sleep(0.01)
    progress.step(320, METRICS | {"mfu": 0.4123, "peak_memory_gb": 12.345})
    progress.validation(300, VALIDATION)
    progress.checkpoint(300, "out/step-00000300")


def test_display_shows_all_numbers_in_fixed_columns(make):
    progress = make(1000)
    report_run(progress)
    empty, head, step, memory, saved, validation = shown(progress)
    assert empty == ""
    assert re.fullmatch(r" Training   ━+╸? *━* *320/1,000   32%", head.replace("╺", "━")), head
    assert step == " loss        3.2145  lr         3.9e-04  grad norm     0.87  tok/s        12.3k"
    assert memory == " tokens       5.24M  MFU          41.2%  memory     12.3 GB  elapsed         0s"
    assert re.fullmatch(r" left +\d+s  saved at +300", saved)
    assert validation == " step 300     validation loss 3.3012   perplexity 27.14   bits per byte 1.2134"


def test_the_bottleneck_has_a_row(make):
    progress = make(1000)
    progress.step(1, METRICS)
    time.sleep(0.01)
    progress.step(2, METRICS | {"data_wait_s": 0.005})
    assert re.fullmatch(r" waiting for data: \d+ % of the time", shown(progress)[-1])
    progress.step(2000, METRICS | {"data_wait_s": 0.0})


@pytest.mark.parametrize("width", [10, 20, 40, 60, 79, 200])
def test_lines_are_complete_at_every_width(make, width):
    progress = make(1000, width)
    report_run(progress)
    lines = shown(progress)
    assert max(map(len, lines)) <= min(width, 79)
    if width >= 40:  # no number is cut
        text = " ".join(lines)
        assert all(number in text for number in ("3.2145", "12.3k", "27.14", "1.2134", "320/1,000", "12.3 GB"))
    assert len(lines) == {79: 6, 200: 6, 60: 8, 40: 9}.get(width, len(lines))


def test_bar_pulses_before_the_first_step_and_without_a_known_end(make):
    progress = make(None)
    progress.phase("preparing data")
    assert re.fullmatch(r" Preparing data ━+ 0s", shown(progress)[1])
    progress.step(1200, METRICS)
    assert re.fullmatch(r" Preparing data ━+ step 1,200", shown(progress)[1])
    assert "left" not in "".join(shown(progress))


def test_100_percent_only_after_the_last_step(make):
    progress = make(1000)
    progress.step(999, METRICS)
    assert "99%" in shown(progress)[1]
    progress.step(1000, METRICS)
    assert "100%" in shown(progress)[1]


def test_messages_validations_and_prints_stay_above_the_display(make, capsys):
    progress = make(1000)
    progress.step(300, METRICS)
    progress.message("out/[a]/[/b] :smile: stays as it is")
    progress.validation(300, VALIDATION)
    print("a print of another library")
    progress.close()
    text = printed(progress)
    for line in (
        "out/[a]/[/b] :smile: stays as it is",
        "step 300     validation loss 3.3012   perplexity 27.14   bits per byte 1.2134",
        "a print of another library",
    ):
        assert f"{line}\n" in text.replace("\r", "")
    print("afterwards")
    assert capsys.readouterr().out == "afterwards\n"


def test_reporting_a_step_does_not_draw(make):
    progress = make(1000)
    progress._live._refresh_thread.stop()
    before = progress.console.file.getvalue()
    started = time.thread_time()
    for step in range(1000):
        progress.step(step, METRICS)
    assert time.thread_time() - started < 0.2  # measured: 2 us each; drawing takes 2 ms
    assert progress.console.file.getvalue() == before


def test_exception_releases_the_terminal():
    console = terminal(80)
    with pytest.raises(KeyboardInterrupt), LiveProgress(console) as progress:
        progress.step(1, METRICS)
        assert sys.stdout is not sys.__stdout__
        raise KeyboardInterrupt
    text = console.file.getvalue()
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert not hasattr(sys.stdout, "rich_proxied_file")


def test_forked_worker_bypasses_the_display(make, tmp_path):
    progress = make(10)
    with progress._live._lock:  # the drawing thread may hold it at the moment of the fork
        child = os.fork()
        if child == 0:
            os._exit(1 if hasattr(sys.stdout, "rich_proxied_file") else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert hasattr(sys.stdout, "rich_proxied_file"), "the parent keeps its display"


def in_terminal(code: str, **environment: str) -> str:
    """Return a program's output to a terminal."""
    parent, child = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k != "COLUMNS"}  # a terminal has a width
    variables |= {"TERM": "xterm-256color", **environment}
    program = subprocess.Popen([sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=variables)
    os.close(child)
    output = b""
    while select.select([parent], [], [], 300)[0]:
        try:
            part = os.read(parent, 65536)
        except OSError:  # the program has closed its side
            break
        if not part:
            break
        output += part
    os.close(parent)
    assert program.wait(timeout=300) == 0, output.decode()
    return output.decode()


PROGRAM = f"""
from toolkit.ui.console import make_progress
with make_progress(True) as progress:
    progress.total_steps = 2
    progress.phase("training")
    for step in (1, 2):
        progress.step(step, {METRICS!r})
    progress.message("a message")
    print("[/no] markup", end="", flush=True)
"""


def test_terminal_shows_the_live_display_and_restores_the_cursor():
    text = in_terminal(PROGRAM)
    assert "━" in text and "100%" in text and "\x1b[32m" in text
    assert "a message" in text and "[/no] markup" in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def test_no_color_is_respected():
    text = in_terminal(PROGRAM, NO_COLOR="1")
    assert "100%" in text and not re.search(r"\x1b\[[0-9;]*3[0-9]m", text)


def test_dumb_terminal_gets_plain_lines():
    text = in_terminal(PROGRAM, TERM="dumb")
    assert "\x1b" not in text and "step 2/2 | loss 3.2145" in text


def test_terminal_without_unicode_gets_ascii():
    text = in_terminal(PROGRAM, PYTHONIOENCODING="ascii")
    assert "100%" in text and text.isascii() and "?" not in re.sub(r"\x1b\[\?", "", text)
