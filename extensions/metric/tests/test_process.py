"""Metric functions that fail, exit, hang, or print and return too much end in one line that names the metric."""

import os
import random
import sys
import textwrap
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.cases import check_each
from toolkit_metric import process, worker
from toolkit_metric.entries import METRICS, Metric, Traits, parse_metrics
from toolkit_metric.process import MetricProcess, check_best_by, check_metrics

from toolkit.config import EvalArgs
from toolkit.errors import UserError
from toolkit.objectives import NextToken

MODULE = textwrap.dedent("""
    import os, random, subprocess, sys, time
    from decimal import Decimal

    def good(answers, references, rows):
        random.seed(1)
        print("on stdout", flush=True)
        return {"length": [len(answer) for answer in answers], "all": Decimal(3), "rows": sum(r["n"] for r in rows)}

    def raises(*_):
        raise ValueError("no\\nway")

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    def mute(*_):
        raise Mute

    def interrupts(*_):
        raise KeyboardInterrupt

    def exits(*_):
        sys.exit(3)

    def dies(*_):
        os._exit(7)

    def killed(*_):
        os.kill(os.getpid(), 9)

    def sleeps(*_):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)

    def prints(*_):
        while True:
            print("x" * 10_000)

    def large(*_):
        return {"m": "x" * 2**30}

    def nan(*_):
        return {"m": float("nan")}

    def guessed(*_):
        return {"m": 1}

    guessed.higher_is_better = "yes"
    one_argument = lambda answers: {}
    not_callable = {}
""")


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "my_metrics.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_package")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    started = []

    def start(name: str) -> MetricProcess:
        started.append(MetricProcess(parse_metrics(f"my_metrics:{name}")[0], 60.0))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_a_function_runs_in_a_process_of_its_own(start, capfd):
    random.seed(0)
    expected = random.Random(0).random()
    good = start("good")
    for answers in (["ab", "c"], ["", "d"]):
        values = good.call(answers, ["r", None], [{"n": 1}, {"n": 2}])
        assert values == {"length": list(map(len, answers)), "all": 3.0, "rows": 3.0}
    assert random.random() == expected
    good.close()
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("on stdout\n") == 2


def test_a_function_with_two_arguments_has_two_names():
    values = {}
    for metric in parse_metrics(["regex:[ab]", "rouge_l", "regex:c"]):
        with closing(MetricProcess(metric, 60.0)) as started:
            values |= started.call(["a"], ["b"], [{}])
    assert values == {"regex": [0.0], "rouge_l": [0.0], "regex_2": [0.0]}


def test_hostile_functions_end_in_one_line(start, monkeypatch):
    monkeypatch.setattr(process, "MAX_BYTES", 100_000)
    assert str(start("nan").call(["a"], [None], [{}])["m"]) == "nan"

    def check(name, reason):
        with pytest.raises(UserError) as caught:
            start(name).call(["a"], [None], [{}])
        line = str(caught.value)
        assert caught.value.exit_code == (1 if name == "killed" else 2)
        assert line.startswith(f"--eval.metric my_metrics:{name}: ") and reason in line
        assert "\n" not in line and len(line) < 800

    check_each(check, [
        ("raises", "ValueError: no way"), ("exits", "SystemExit: 3"), ("mute", "Mute: Mute"),
        ("interrupts", "KeyboardInterrupt"), ("dies", "its process ended (exit code 7)"),
        ("killed", "its process was killed by SIGKILL"), ("guessed", "higher_is_better is 'yes', not True, False"),
        ("prints", "printed more than 100,000 bytes"), ("large", "m is str, not a number"),
        ("one_argument", "too many positional arguments; it is called with (answers, references, rows)"),
        ("not_callable", "my_metrics.not_callable is not a function"),
    ])  # fmt: skip


def test_what_functions_may_return():
    def check(result, message):
        with pytest.raises((TypeError, ValueError), match=message):
            worker.check_values(result, 2)

    not_a_dictionary = "returns (dict|NoneType|float), not a dictionary with 1 to 100"
    length = "m is a list of another length than the 2 rows"
    check_each(check, [
        (None, not_a_dictionary), (0.5, not_a_dictionary), ({}, not_a_dictionary),
        ({f"m{i}": 1 for i in range(101)}, not_a_dictionary), ({"m": "1"}, "m is str, not a number"),
        ({"m": [1, [2]]}, "must be a string or a real"),
        ({"m": [1]}, length), ({"m": [1, 2, 3]}, length), ({"m": iter(int, 1)}, length),
        ({"a,b": 1}, "returns the name 'a,b'"), ({1: 1}, "returns the name 1"),
    ])  # fmt: skip
    values = {
        "mean": np.float32(0.5),
        "rows": np.array([True, False]),
        "scalar": np.array(2),
        "lazy": (i for i in "12"),
    }
    assert worker.check_values(values, 2) == {"mean": 0.5, "rows": [1.0, 0.0], "scalar": 2.0, "lazy": [1.0, 2.0]}


def test_a_function_that_never_returns_is_ended_with_its_children(start):
    sleeps = start("sleeps")
    sleeps._seconds = 1.0
    with pytest.raises(UserError, match=r"sleeps: took longer than 1 s \(--eval.metric_timeout\)"):
        sleeps.call(["a"], [None], [{}])
    for _ in range(500):  # until the system has removed the killed child
        try:
            os.killpg(sleeps._process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the process group still runs")


def test_what_cannot_be_loaded_is_named_before_a_run(start, tmp_path):
    def check(options, message):
        with pytest.raises(UserError) as caught:
            check_metrics(EvalArgs(**options))
        assert message in str(caught.value)

    check_each(check, [
        ({"metric": "no_module:f"}, "--eval.metric no_module:f: ModuleNotFoundError: there is no module no_module"),
        ({"metric": "my_metrics:nothing"}, "AttributeError: my_metrics has no nothing"),
        ({"metric": "broken:f"}, "--eval.metric broken:f: ModuleNotFoundError: No module named 'no_such_package'"),
        ({"metric": "leaving:f"}, "ImportError: leaving calls sys.exit(0) when it is imported"),
        ({"metric": "regex"}, "--eval.metric regex: the pattern matches an empty answer, so every"),
        ({"metric": "rouge_l:x"}, "--eval.metric rouge_l:x: TypeError: too many positional arguments"),
        ({"metric": "choice", "metric_data": "no.json"}, "--eval.metric_data no.json: no such file"),
    ])  # fmt: skip
    with pytest.raises(UserError, match="--eval.metric_data a.json: has no effect without --eval.metric"):
        EvalArgs(metric_data="a.json")
    choice = MetricProcess(Metric("choice", METRICS["choice"]), 60.0)
    assert choice.traits == Traits(needs_log_probs=True, needs_references=True, higher_is_better=True)
    assert start("good").traits == Traits()
    choice.close()


def test_names_that_the_options_rule_out():
    def check(metric, name, message):
        args = SimpleNamespace(eval=EvalArgs(best_by=name, metric=metric), objective=NextToken())
        if message is None:
            return check_best_by(args, False)
        with pytest.raises(UserError, match=message):
            check_best_by(args, False)

    check_each(check, [
        ("exact_match", "exact_match", None), (["regex:a", "regex:b"], "regex_2", None),
        ("choice", "choice_norm", None), ("m:f", "acc", None),
        ("exact_match", "exact", "no metric .* name; did you mean 'val_exact_match'"),
        ("regex:a", "regex_2", "did you mean 'val_regex'"),
    ])  # fmt: skip
