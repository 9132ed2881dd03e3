"""The ledger of trials: failures are kept with their seed, counts accumulate, and the page is current."""

import json
import re

from tests.faults import core, page
from tests.faults.ways import WAYS


def trial(seed, failure=None, commit="a", count=1):
    line = {"way": "kill-calls", "subject": "ordinary", "seed": seed, "count": count, "failure": failure}
    return line | {"commit": commit, "machine": "m", "date": "2026-01-01"}


def test_a_trial_without_a_fault_counts_nothing(tmp_path):
    way = core.Way("way", "holds", "S1", lambda: ["s"], lambda subject, quick: range(1), lambda *_: False)
    line = core.attempt(way, "s", 0, tmp_path)
    assert (line["count"], line["failure"]) == (0, None)


def test_a_broken_promise_and_a_broken_trial_are_failures(tmp_path):
    def run(subject, seed, folder):
        assert seed != 1, "the losses differ"
        return 7 // (2 - seed) if seed < 3 else None

    way = core.Way("way", "holds", "S1", lambda: ["s"], lambda subject, quick: range(3), run)
    lines = [core.attempt(way, "s", seed, tmp_path) for seed in range(4)]
    assert [line["count"] for line in lines] == [3, 1, 1, 1]
    failures = [line["failure"] for line in lines]
    assert failures[0] is None and failures[1].startswith("the losses differ")
    assert failures[2].startswith("the trial failed: ZeroDivisionError")
    assert failures[3].startswith("the trial failed: TypeError")  # it does not say whether its fault happened


def test_messages_have_no_paths_of_this_machine(tmp_path):
    message = f"two\nlines of {tmp_path}/out and {core.ROOT}/toolkit/errors.py, and more " + "x" * 500 + " the end"
    short = core.shorten(message, tmp_path)
    assert short.startswith("two lines of FOLDER/out and toolkit/errors.py") and short.endswith("the end")
    assert len(short) == 400
    for row in json.loads(core.SUMMARY.read_text()):
        assert not any("/tmp/" in failure["message"] for failure in row["failures"])


def test_counts_accumulate_over_commits_and_a_second_start_replaces_its_own(tmp_path):
    ledger = tmp_path / "trials.jsonl"
    ledger.write_text("".join(json.dumps(t) + "\n" for t in (trial(0), trial(1, "broke"))) + '{"way": "kil')
    rows = core.summarize(core.read_trials(ledger), [])
    rows = core.summarize([trial(0), trial(1, "broke"), trial(2), trial(2)], rows)
    assert [(row["commit"], row["count"], row["failures"]) for row in rows] == [
        ("a", 3, [{"seed": 1, "message": "broke"}])
    ]
    rows = core.summarize([trial(0, commit="b", count=5)], rows)
    assert [(row["commit"], row["count"]) for row in rows] == [("a", 3), ("b", 5)]
    text = page.page(rows)
    first = text.splitlines()[2]
    assert first.startswith("Total: 8 kills and faults (1 failed), 0 fuzz inputs (0 failed), 1 failures open, over 2 ")
    assert "Newest commit, `b`: 5 kills and faults (0 failed)," in first
    assert re.search(r"^\| kill-calls \| a run .* \| 8 \| 1 \| 1 \|$", text, re.M)
    (never,) = re.findall(r"^- kill-calls: (.*)$", text, re.M)
    assert "adapters" in never and "ordinary" not in never
    assert "- `kill-calls:ordinary:1` at `a`: `broke`" in text
    rows = core.summarize([trial(1, commit="c") | {"date": "2026-01-02"}], rows)
    assert "(1 failed), 0 fuzz inputs (0 failed), 0 failures open" in page.page(rows)
    assert "| 9 | 1 | 0 |" in page.page(rows) and "1 others held when a later" in page.page(rows)


def test_the_page_is_current():
    assert page.PAGE.read_text() == page.page(json.loads(core.SUMMARY.read_text()))
    names = [way.name for way in WAYS.values()]
    assert len(names) == len(set(names)) and all(way.promise and way.invariants for way in WAYS.values())
