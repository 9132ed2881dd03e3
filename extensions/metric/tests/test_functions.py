"""The shipped metrics against libraries that are not ours, and their edge cases."""

import math
import os
import random
import re
import select
import sys

import numpy as np
import pytest
from helpers.cases import check_each
from toolkit_metric import functions
from toolkit_metric.entries import METRICS, Metric, parse_metrics
from toolkit_metric.process import summarize

from toolkit import extension
from toolkit.errors import UserError
from toolkit.extension import Extension

WORDS = ["the", "cat", "sat", "on", "a", "mat,", "The", "dog!", "isn't", "over-fed", "42", "déjà", "vu"]


@pytest.mark.slow  # rouge_score takes 20 s to import
def test_rouge_l_and_standard_errors_are_those_of_rouge_score_and_lm_eval():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    lm_eval_metrics = pytest.importorskip("lm_eval.api.metrics")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(0, 12))) for _ in range(200)]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    values = functions.rouge_l(*zip(*pairs, strict=True), rows=[])["rouge_l"]
    expected = [scorer.score(reference, answer)["rougeL"].fmeasure for answer, reference in pairs]
    np.testing.assert_allclose(values, expected, atol=1e-12)
    assert len(set(values)) > 20
    assert summarize({"m": values})["m_stderr"] == pytest.approx(lm_eval_metrics.mean_stderr(values))


def test_summary_is_mean_and_standard_error():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    # by hand: mean 0.6, squared deviations 3 x 0.16 + 2 x 0.36 = 1.2, variance 1.2 / 4, error sqrt(0.3 / 5)
    assert summarize({"m": values, "n": 3.0}) == {"m": 0.6, "m_stderr": pytest.approx(math.sqrt(0.06)), "n": 3.0}
    for unknown in ([0.5], [1.0, math.nan], [1.0, math.inf]):
        assert math.isnan(summarize({"m": unknown})["m_stderr"])


def test_matches():
    def check(name, argument, answer, reference, expected):
        arguments = [] if argument is None else [argument]
        assert getattr(functions, name)([answer], [reference], [{}], *arguments) == {name: [expected]}

    check_each(check, [
        ("exact_match", None, " Paris\n", "Paris", True),
        ("exact_match", None, "paris", "Paris", False),
        ("number", None, "so 1,250 apples", "#### 1250", True),
        ("number", None, "3 of 5.0", "5", True),
        ("number", None, "-5", "5", False),
        ("number", None, "none", "none", False),
        ("regex", r"answer is (\w+)", "The answer is B.", "B", True),
        ("regex", r"answer is (\w+)", "The answer is B.", "the answer is C", False),
        ("regex", r"\d{4}", "in 1789, or 1790", "1789", True),
        ("regex", r"\d{4}", "unknown", "1789", False),
        ("regex", r"\d{4}", "in 1789", None, True),
        # rouge-score: 3 of 4 and 5 words
        ("rouge_l", None, "The cat, sat down", "a CAT sat down isn't", pytest.approx(0.6)),
        ("rouge_l", None, "", "", 0.0),
    ])  # fmt: skip


def test_numbers_by_the_grammar_of_the_page():
    """Values as in Python's arithmetic, of the last number of the text."""

    def check(text, value):
        is_equal = functions.number([text, text], [str(value), str(value + 1)], [{}, {}])
        assert is_equal == {"number": [True, False]}, functions._last_number(text)

    check_each(check, [
        ("1e-3", 0.001), ("1E-3 m", 0.001), ("1e5", 100_000), (".5", 0.5), ("-.5", -0.5), ("1/2", 0.5),
        ("-3/4.", -0.75), ("05/06/2024", 2024), ("1/0", 0), ("2024-05-06", 6), ("5-3", 3), ("1\u22122", 2),
        ("COVID-19", 19), ("(2)-3", 3), ("\u22125", -5), ("x=-5", -5), ("**-7**", -7), ("-$5", -5), ("$-5", -5),
        ("\u20ac1,250.50", 1250.5), ("50%", 50), ("(1,2)", 2), ("1,,2", 2), ("1,2345", 2345), ("No.5", 5),
        ("so...5", 5), ("5.", 5), ("v1.2.3", 3),
        ("9" * 5000 + " 4", 4), ("1e99999", 99999),
    ])  # fmt: skip
    for one, other in (("1e309", "1e310"), ("9" * 5000, "8" * 5000), ("1e-400", "0"), ("0.1", "0.10000000000000001")):
        assert functions.number([one, one], [one, other], [{}, {}]) == {"number": [True, False]}


@pytest.mark.slow  # lm-eval takes seconds to import
def test_numbers_are_those_of_lm_eval_s_flexible_extract():
    """With the normalization of gsm8k. It reads neither exponents nor fractions, and a hyphen as a sign."""
    filters = pytest.importorskip("lm_eval.filters.extraction")
    extract = filters.RegexFilter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
    draw = random.Random(0)
    texts = [
        f"{draw.choice(['so ', '= ', '#### ', '(', ''])}{draw.choice(['', '-'])}{draw.choice(['', '$'])}{number}{end}"
        for number in ("7", "42", "1,250", "1,250,000", "3.25", "0.5", "12.0", "-8")
        for end in (" apples", "", ".", "%", ")", " and so on", "\n")
        if not number.startswith("-")
    ]
    (found,) = zip(*extract.apply([[text] for text in texts], [{}] * len(texts)), strict=True)
    theirs = [text.replace(",", "").replace("$", "").removesuffix(".") for text in found]
    assert functions.number(texts, theirs, [{}] * len(texts))["number"] == [True] * len(texts) and len(set(theirs)) > 8


def test_json_is_that_of_rfc_8259():
    def check(text, is_valid):
        assert functions.json_valid([text], [None], [{}]) == {"json_valid": [is_valid]}

    check_each(check, [
        (' {"a": [1]}\n', True), ('"text"', True), ("null", True), ("1" * 5000, True), ("-0.5e-3", True),
        ("1e999", True), ("[" * 900 + "]" * 900, True), ("[" * 100_000, False),
        ("```json\n{}\n```", False), ("", False), ("\n", False),
        ("NaN", False), ("-Infinity", False), ('{"a": NaN}', False), ("[Infinity]", False), ("[1,]", False),
        ("{'a': 1}", False), ("01", False), ('"\t"', False), ("\ufeff{}", False), ("{} {}", False),
    ])  # fmt: skip


def test_an_empty_answer_is_wrong():
    for name in ("exact_match", "number", "rouge_l"):
        assert getattr(functions, name)(["", "\n\n"], ["5"] * 2, [{}] * 2) == {name: [False, False]}


def test_choice_compares_sums_and_sums_per_character():
    rows = [{"choices": [" yes", " certainly not"]}]
    for reference, expected in (("yes", (True, False)), (" certainly not", (False, True))):
        scores = functions.choice([[-2.0, -5.0]], [reference], rows)
        assert (scores["choice"], scores["choice_norm"]) == ([expected[0]], [expected[1]])


def test_check_runs_a_command_with_a_time_limit(tmp_path, monkeypatch):
    """The command starts a child that would run for ever and would keep the pipe open. It is ended, too."""
    monkeypatch.setattr(functions, "CHECK_SECONDS", 2.0)
    os.mkfifo(tmp_path / "of the child")
    child = os.open(tmp_path / "of the child", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "checker.py").write_text(
        "import json, subprocess, sys\n"
        "values = json.load(sys.stdin)\n"
        "print('x' * 1_000_000)\n"
        "if values['answer'] == 'hang': subprocess.run(['sleep', '600'], stdout=open('of the child', 'w'))\n"
        "sys.exit(values['answer'] != values['row']['expected'] + (values['reference'] or ''))\n"
    )
    command = f"{sys.executable} {tmp_path / 'checker.py'}"
    rows = [{"expected": "a"}] * 3
    monkeypatch.chdir(tmp_path)
    assert functions.check(["ab", "a", "hang"], ["b", "b", None], rows, command) == {"check": [True, False, False]}
    is_closed, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert is_closed, "the child still runs"
    with pytest.raises(FileNotFoundError):
        functions.check(["a"], [None], rows[:1], "no-such-command")


def test_extensions_register_metrics(monkeypatch):
    entries = {"ours": Extension(metrics={"mine": "my_package.scores.mine"})}
    monkeypatch.setattr(extension, "_module_extensions", entries)
    assert parse_metrics("mine:x,rouge_l")[0] == Metric("mine:x", "my_package.scores.mine", "x")
    entries["ours"] = Extension(metrics={"rouge_l": "my_package.rouge_l"})
    with pytest.raises(
        UserError, match="extension ours: metrics rouge_l: toolkit already defines this name; rename it"
    ):
        parse_metrics("rouge_l")


def test_entries_are_parsed():
    assert parse_metrics(None) == []
    assert parse_metrics("exact_match, my.module:score") == [
        Metric("exact_match", METRICS["exact_match"]), Metric("my.module:score", "my.module.score"),
    ]  # fmt: skip
    assert parse_metrics(["regex:[a-c,]+:", "check:python c.py"]) == [
        Metric("regex:[a-c,]+:", METRICS["regex"], "[a-c,]+:"),
        Metric("check:python c.py", METRICS["check"], "python c.py"),
    ]  # fmt: skip
    for entry, hint in (
        ("exact_mach", "did you mean 'exact_match'"),
        ("a b", "use exact_match, "),
        ("", "use "),
        ("m:f()", "use "),
    ):
        with pytest.raises(UserError, match=f"--eval.metric {entry[:1]}.*no such metric.*{hint}"):
            parse_metrics(entry)
    for entry, reason in (
        ("regex:", "the pattern matches an empty answer"),
        ("regex:a*", "the pattern matches an empty answer"),
        ("regex:(", "missing )"),
        ("check:", "has no command; write check:COMMAND"),
        ("check:'a", "No closing quotation"),
        ("mine.py:f", "is a file; write mine:f"),
        ("reward", "has no folder; write reward:FOLDER"),
    ):
        with pytest.raises(UserError, match=re.escape(f"--eval.metric {entry}: {reason}")):
            parse_metrics(entry)
