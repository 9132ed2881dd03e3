"""Runs that are killed by SIGKILL, in real processes: the resume trains on the answers that were stored."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.compare_runs import copy_without, curve
from helpers.on_policy import GRPO_RUN, RUN, SAVING, answers_of
from helpers.processes import Forked, finish
from helpers.small_runs import write_base
from toolkit_on_policy.rollouts import path_of

from tests.faults.states import require_same_run

SCRIPT = """
import os, signal, sys

from toolkit_on_policy.objective import OnPolicy

from toolkit import cli
from toolkit.inference.decode import Decoder

batches, append = OnPolicy._batches, Decoder._append
n_tokens = 0


def make_batches(self, *args):
    if self._launch.progress.step == int(os.environ.get("KILL_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)  # after the file of the step was written
    return batches(self, *args)


def count_tokens(self, logits):
    global n_tokens
    n_tokens += len(logits)
    append(self, logits)


OnPolicy._batches, Decoder._append = make_batches, count_tokens
code = cli.main(sys.argv[1:])
print("GENERATED", n_tokens)
sys.exit(code)
"""
KILLS = 20


def start(folder: Path, words: str, out: str, **environ: str) -> Forked:
    arguments = ["finetune_full", *words.split(), "--out_dir", out, "--resume", "auto"]
    script = folder / "counted.py"
    script.write_text(SCRIPT)
    return Forked(arguments, script=script, PYTHONPATH=str(folder), **environ)


def generated(folder: Path, words: str, out: str) -> int:
    """Run to the end; return the number of tokens that were generated, by rank 0."""
    process = start(folder, words, out)
    text, err = finish(process)
    assert process.returncode == 0, err
    return int(text.rpartition("GENERATED ")[2])


def require_same(folder: Path, out: str) -> None:
    """Compare a run with the whole one bit for bit. A kill may leave files of answers that nobody needs any more."""
    whole = answers_of("whole")
    assert {name: content for name, content in answers_of(out).items() if name in whole} == whole
    require_same_run(folder / out, folder / "whole")


def test_a_run_killed_before_its_update_generates_nothing_again(folder):
    assert generated(folder, SAVING, "whole") >= 3 * 16 * 8
    process = start(folder, SAVING, "killed", KILL_AT="2")
    finish(process)
    assert process.returncode == -signal.SIGKILL
    assert path_of(Path("killed"), 2).exists() and not Path("killed", "final").exists()
    damaged = path_of(Path("damaged"), 2)
    copy_without(folder / "killed", folder / "damaged")
    damaged.write_text("damaged\n")
    assert generated(folder, SAVING, "killed") == 0
    require_same(folder, "killed")
    assert generated(folder, SAVING, "damaged") == 16 * 8
    require_same(folder, "damaged")


@pytest.mark.parametrize(("kill_at", "old", "new"), [("3", "rate 1e-2", "rate 5e-2"), ("1", "base ", "teacher ")])
def test_answers_of_other_weights_are_not_used(folder, corpus, kill_at, old, new):
    """A resume with another learning rate, and a new start from another model in the folder of a killed run."""
    (folder / "teacher").mkdir()
    write_base(folder / "teacher", corpus, n_layer=3)
    words = SAVING.replace("max_steps 3", "max_steps 4")
    finish(start(folder, words, "killed", KILL_AT=kill_at))
    assert path_of(Path("killed"), int(kill_at)).exists()
    assert generated(folder, words.replace(old, new, 1), "killed") > 0
    assert max(row["logprob_difference_largest"] for row in curve("killed")) < 1e-5


@pytest.mark.slow
def test_twenty_kills_at_random_instants(folder):
    words = SAVING.replace("max_steps 3", "max_steps 8")
    chance, n_kills, n_runs = random.Random(0), 0, 0
    begin = time.monotonic()
    generated(folder, words, "whole")
    seconds = time.monotonic() - begin
    while n_kills < KILLS:
        out, n_runs = f"killed-{n_runs}", n_runs + 1
        for is_last in [*[False] * 6, True]:
            process = start(folder, words, out)
            deadline = time.monotonic() + chance.uniform(0.2, 1) * seconds
            while process.poll() is None and not is_last and time.monotonic() < deadline:
                time.sleep(0.01)
            if not is_last:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            _, err = finish(process)
            if process.returncode != -signal.SIGKILL:
                break
            n_kills += 1
        assert process.returncode == 0, err
        require_same(folder, out)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["GRPO", "OnPolicyDistillation"])
def test_a_run_of_two_ranks_resumes_on_one_with_the_stored_answers(folder, corpus, objective):
    words = GRPO_RUN
    if objective != "GRPO":
        (folder / "teacher").mkdir()
        write_base(folder / "teacher", corpus, n_layer=3)
        words = f"{RUN} --objective OnPolicyDistillation --objective.teacher_dir teacher"
    words = f"{words} --eval.interval 0 --eval.final_validation false --train.save_interval 2".replace(
        "steps 3", "steps 4"
    )
    generated(folder, words.replace("--devices 1", "--devices 2 --strategy ddp"), "two")
    copy_without(folder / "two", folder / "one", "final", "step-00000004")
    assert generated(folder, words, "one") == 0
    for a, b in zip(curve("one"), curve("two"), strict=True):
        for name in ("loss", "grad_norm", "reward", "divergence"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-5, abs=1e-6), (name, a, b)
