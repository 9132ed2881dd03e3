import io
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.io.streams import SafeOutput
from toolkit.ui.console import PlainProgress, make_progress
from toolkit.ui.progress import Pace, ProgressDisplay

METRICS = {"loss": 3.2145, "learning_rate": 3.94e-4, "grad_norm": 0.873, "tokens_per_sec": 12345.6, "tokens": 5_242_880}
VALIDATION = {"val_loss": 3.3012, "val_ppl": 27.145, "val_bpb": 1.2134}


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def timestamp(monkeypatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: form)


STAMP = "%Y-%m-%d %H:%M:%S "


def steps_in(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"step (\d+)[/ ].*\| loss", text)]


def test_step_is_one_line_with_all_numbers(clock):
    out = io.StringIO()
    progress = PlainProgress(out, clock)
    progress.total_steps = 1000
    progress.step(1, METRICS | {"mfu": 0.4123, "peak_memory_gb": 12.345})
    clock.now = 65.0
    progress.step(2, METRICS | {"mfu": None})
    first, second = out.getvalue().splitlines()
    assert first == (
        f"{STAMP}step 1/1000 | loss 3.2145 | lr 3.9e-04 | grad norm 0.87 | tok/s 12.3k | tokens 5.24M | MFU 41.2% | "
        "memory 12.3 GB | elapsed 0s"
    )
    assert second == (
        f"{STAMP}step 2/1000 | loss 3.2145 | lr 3.9e-04 | grad norm 0.87 | tok/s 12.3k | tokens 5.24M | "
        "elapsed 1m 05s | 18h 01m left"
    )


def test_steps_are_printed_once_per_second_plus_first_and_last(clock):
    out = io.StringIO()
    with PlainProgress(out, clock) as progress:
        progress.total_steps = 100
        for step in range(1, 101):
            progress.step(step, METRICS)
            clock.now += 0.125
        assert out.getvalue().splitlines()[-1].startswith(f"{STAMP}step 100/100 |"), "printed before later output"
    assert steps_in(out.getvalue()) == [*range(1, 101, 8), 100]


def test_after_a_minute_steps_are_printed_every_ten_seconds(clock):
    out = io.StringIO()
    with PlainProgress(out, clock) as progress:
        progress.total_steps = 200
        for step in range(1, 201):
            progress.step(step, METRICS)
            clock.now += 1
    assert steps_in(out.getvalue()) == [*range(1, 61), *range(70, 201, 10)]


def test_last_step_without_a_step_limit_is_printed_at_close(clock):
    out = io.StringIO()
    with PlainProgress(out, clock) as progress:
        for step in range(1, 8):
            progress.step(step, METRICS)
    assert steps_in(out.getvalue()) == [1, 7]
    assert "step 7 |" in out.getvalue() and "left" not in out.getvalue()
    progress.close()
    assert steps_in(out.getvalue()) == [1, 7], "a second close prints nothing"


def test_everything_except_steps_is_printed_immediately(clock):
    out = io.StringIO()
    progress = PlainProgress(out, clock)
    progress.phase("preparing data")
    progress.phase("training")
    progress.phase("preparing data")
    progress.phase("training")
    progress.step(1, METRICS)
    progress.total_steps = 10  # known only now
    for step in (2, 3):
        progress.step(step, METRICS)
        progress.phase("validating")
        progress.phase("training")
        progress.validation(step, VALIDATION)
        progress.checkpoint(step, "out/step-00000002")
    progress.message("a message [/with] brackets")
    assert out.getvalue().splitlines()[:2] == ["Preparing data", "Training"]
    assert out.getvalue().splitlines()[3:] == [
        f"{STAMP}step 2/10 | validation loss 3.3012, perplexity 27.14, bits per byte 1.2134",
        f"{STAMP}step 2/10 | saved out/step-00000002",
        f"{STAMP}step 3/10 | validation loss 3.3012, perplexity 27.14, bits per byte 1.2134",
        f"{STAMP}step 3/10 | saved out/step-00000002",
        "a message [/with] brackets",
    ]


def bottlenecks(clock, data_wait_s: float, pause: float) -> str:
    """Return the last line of 100 steps of a second, with a pause for a save after step 50."""
    out = io.StringIO()
    with PlainProgress(out, clock) as progress:
        progress.total_steps = 100
        progress.phase("training")
        for step in range(1, 101):
            clock.now += 1
            progress.step(step, METRICS | {"data_wait_s": data_wait_s})
            if step == 50:
                progress.phase("saving")
                clock.now += pause
                progress.phase("training")
    return out.getvalue().splitlines()[-1]


def test_the_largest_part_besides_computation_is_named(clock):
    assert bottlenecks(clock, 0.12, 0).endswith("| waiting for data: 12 % of the time")
    assert bottlenecks(clock, 0.12, 99).endswith("| saving: 50 % of the time")  # 99 s of 99 steps and a save
    assert bottlenecks(clock, 0.12, 4).endswith("| waiting for data: 12 % of the time")
    assert bottlenecks(clock, 0.04, 5).endswith("| elapsed 1m 45s")  # all below 5 %


def test_json_lines():
    out = io.StringIO()
    with make_progress(True, out) as progress:
        progress.total_steps = 2
        progress.phase("training")
        progress.event("start", out_dir=Path("out"))
        progress.step(1, METRICS | {"tokens_per_sec": math.nan})
        progress.message('a "message"\nof two lines')
        progress.phase("training")
    events = [json.loads(line, parse_constant=pytest.fail) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["phase", "start", "step", "note"]
    assert events[1]["out_dir"] == "out" and events[3]["text"] == 'a "message"\nof two lines'
    assert events[2] == METRICS | {
        "event": "step", "time": events[2]["time"], "step": 1, "total_steps": 2, "tokens_per_sec": None
    }  # fmt: skip


def test_other_ranks_are_silent(capsys):
    with make_progress(False) as progress:
        progress.total_steps = 10
        progress.phase("training")
        progress.message("hello")
        progress.step(1, METRICS)
        progress.validation(1, VALIDATION)
        progress.checkpoint(1, "x")
    assert type(progress) is ProgressDisplay
    assert capsys.readouterr() == ("", "")


RUN = f"""
import sys
from toolkit.ui.console import make_progress
with make_progress(True) as progress:
    progress.total_steps = int(sys.argv[1])
    progress.phase("training")
    for step in range(1, int(sys.argv[1]) + 1):
        progress.step(step, {METRICS!r})
        progress.message("x" * 100)
print("training finished", file=sys.stderr)
"""


def test_pipe_gets_no_escape_codes_even_with_forced_colors(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    done = subprocess.run([sys.executable, "-c", RUN, "3"], capture_output=True, text=True, check=True, timeout=300)
    assert "\x1b" not in done.stdout and done.stdout.endswith("\n")
    assert steps_in(done.stdout) == [1, 3]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_broken_pipe_stops_the_output_not_the_training(unbuffered):
    command, environment = [sys.executable, "-c", RUN, "5000"], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline() == b"Training\n"
    run.stdout.close()
    assert run.stderr.read() == b"training finished\n"
    assert run.wait(timeout=300) == 0


def test_unencodable_characters_are_replaced():
    raw = io.BytesIO()
    out = SafeOutput(io.TextIOWrapper(raw, encoding="ascii"))
    out.write("naïve → text\n")
    out.flush()
    assert raw.getvalue() == b"na?ve ? text\n"


def test_closed_output_is_not_an_error():
    file = io.StringIO()
    file.close()
    out = SafeOutput(file)
    out.write("text")
    out.flush()


def test_time_left_excludes_the_start_and_follows_recent_steps(clock):
    pace = Pace(clock)
    clock.now = 100.0  # preparing, compiling
    pace.step(1)
    assert pace.seconds_left(1, 1000) is None
    for step in range(2, 101):
        clock.now += 0.5
        pace.step(step)
    assert pace.elapsed() == 149.5
    assert pace.seconds_left(100, None) is None
    assert pace.seconds_left(100, 1000) == pytest.approx(450)
    assert pace.seconds_left(1001, 1000) == 0
    for step in range(101, 400):
        clock.now += 2.0
        pace.step(step)
    assert pace.seconds_left(400, 1000) == pytest.approx(1200, rel=0.01)


def test_time_left_after_a_resume(clock):
    pace = Pace(clock)
    for step in (5001, 5011, 5021):  # log_interval 10
        pace.step(step)
        clock.now += 10.0
    assert pace.seconds_left(5021, 6021) == pytest.approx(1000)


def test_pauses_are_a_fraction_of_the_time_left(clock):
    pace = Pace(clock)
    pace.phase("training")
    for step in range(1, 102):
        clock.now += 1.0
        if step % 10 == 1 and step > 1:  # validated before its step is reported, as the training loop does
            pace.phase("validating")
            clock.now += 5.0
            pace.phase("training")
        pace.step(step)
    # 100 steps took 100 s, and 10 validations 50 s
    assert pace.seconds_left(101, 201) == pytest.approx(150)
    assert not math.isnan(pace.elapsed())
