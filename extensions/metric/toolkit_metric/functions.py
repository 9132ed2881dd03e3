"""The metrics that every run can use. See :mod:`toolkit_metric.entries` for the arguments.

Each returns one number per row: 1 or 0, between them for ROUGE-L, or any for a reward.
"""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

Rows = Sequence[dict[str, Any]]
References = Sequence[str | None]
Scores = dict[str, list[float]]

CHECK_SECONDS = 10.0
"""Time limit of a checker per answer."""
_NUMBER = re.compile(
    r"((?<![^\W_])(?<![)\]])[-\u2212])?[$€£]?"  # no sign after a letter, digit or bracket: 5-3, 2024-05-06, Apollo-11
    r"((?<![\d/])\d+/0*[1-9]\d*(?![\d/]|\.\d)"  # not in a date
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+\u2212]?\d{1,4}(?!\d))?"
    r"|(?<![\w.])\.\d+(?:[eE][-+\u2212]?\d{1,4}(?!\d))?)"
)


def _by_row(score: Callable[[Any, Any], float]) -> Callable[..., Scores]:
    """Return the metric whose values are ``score(answer, reference)`` of each row."""

    def metric(answers: Sequence[str], references: References, rows: Rows) -> Scores:
        return {score.__name__: list(map(score, answers, references))}

    metric.needs_references = metric.higher_is_better = True  # type: ignore[attr-defined]
    return metric


@_by_row
def exact_match(answer: str, reference: str) -> bool:
    """Whether the answer equals the reference, without whitespace around them."""
    return answer.strip() == reference.strip()


def choice(log_probs: Sequence[Sequence[float]], references: References, rows: Rows) -> Scores:
    """Whether the reference is the most probable of the row's choices; ``choice_norm``: per character.

    The second divides log-probabilities by the lengths of the choices, as ``acc_norm`` of lm-eval.
    """
    scores: Scores = {"choice": [], "choice_norm": []}
    for values, reference, row in zip(log_probs, references, rows, strict=True):
        choices = row["choices"]
        correct = [text.strip() for text in choices].index((reference or "").strip())
        by_length = [value / max(1, len(text)) for value, text in zip(values, choices, strict=True)]
        scores["choice"].append(values.index(max(values)) == correct)
        scores["choice_norm"].append(by_length.index(max(by_length)) == correct)
    return scores


choice.needs_log_probs = choice.needs_references = choice.higher_is_better = True  # type: ignore[attr-defined]


@_by_row
def number(answer: str, reference: str) -> bool:
    """Whether the last number of the answer equals the last number of the reference, exactly: 1,000.0 equals 1000.

    A number has a minus, unless a letter, a digit or a closing bracket stands right before it, a currency sign, digits
    with or without commas between groups of three, decimals and an exponent; or it is a fraction of integers.
    """
    return _last_number(answer) == _last_number(reference) is not None


def _last_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits = numbers[-1]
    # Decimal reads any number of digits
    above, below = (
        Fraction(Decimal(part)) for part in (digits + "/1").replace(",", "").replace("\u2212", "-").split("/")[:2]
    )
    return (-1 if sign else 1) * above / below


def regex(answers: Sequence[str], references: References, rows: Rows, pattern: str) -> Scores:
    """Whether what the pattern finds first in the answer is what it finds in the reference.

    With a group, its text is compared. A reference without a match is compared as it is; without a reference, a match
    is enough.
    """
    compiled = re.compile(pattern)

    def find(text: str) -> str | None:
        match = compiled.search(text)
        return match and match[bool(compiled.groups)]

    def is_equal(answer: str, reference: str | None) -> bool:
        text = find(answer)
        if text is None or reference is None:
            return text is not None
        expected = find(reference)
        return text.strip() == (reference if expected is None else expected).strip()

    return {"regex": list(map(is_equal, answers, references))}


@_by_row
def json_valid(answer: str, reference: object) -> bool:
    """Whether the answer is one JSON value as RFC 8259 has it, with at most about 900 levels."""
    try:
        json.loads(answer, parse_constant=int, parse_int=str)  # int refuses NaN, and 4,300 digits
    except (ValueError, RecursionError):
        return False
    return True


@_by_row
def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L: F1 of the longest common subsequence of words (Lin, 2004), as rouge-score without stemmer."""
    one, other = (re.findall("[a-z0-9]+", text.lower()) for text in (answer, reference))
    lengths = [0] * (len(other) + 1)  # of the longest common subsequence of the words so far and other[:i]
    for word in one:
        previous = 0
        for i, same in enumerate(other, 1):
            previous, lengths[i] = lengths[i], previous + 1 if word == same else max(lengths[i], lengths[i - 1])
    return 2 * lengths[-1] / (len(one) + len(other)) if lengths[-1] else 0.0


def check(answers: Sequence[str], references: References, rows: Rows, command: str) -> Scores:
    """Whether a command accepts the answer with exit code 0 within :data:`CHECK_SECONDS`.

    The command reads one JSON object from standard input: answer, reference and row. Its output is dropped.
    """
    words = shlex.split(command)

    def accepts(values: tuple[str, str | None, dict[str, Any]]) -> bool:
        content = json.dumps(dict(zip(("answer", "reference", "row"), values, strict=True))).encode()
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(content, CHECK_SECONDS)
            return process.returncode == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(OSError):  # also what the command has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {"check": list(pool.map(accepts, zip(answers, references, rows, strict=True)))}


json_valid.needs_references = False  # type: ignore[attr-defined]
regex.higher_is_better = check.higher_is_better = True  # type: ignore[attr-defined]
