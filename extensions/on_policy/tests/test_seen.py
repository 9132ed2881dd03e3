import json
import math
from pathlib import Path

import pytest
from helpers.compare_runs import rows_of
from helpers.on_policy import GRPO_RUN, RUN, run
from toolkit_metric.prompts import prompt_template, read_prompts
from toolkit_on_policy.prompts import Prompts

from toolkit.cli import main
from toolkit.data import JSON
from toolkit.data.tokenizer import Tokenizer

TWO = """
import time

def scores(answers, references, rows):
    time.sleep(0.2)
    return {"letters": [len(answer) for answer in answers], "is_even": [len(answer) % 2 == 0 for answer in answers]}
"""
SEEN = GRPO_RUN.replace("scores:length", "two:scores").replace("--eval.max_new_tokens 0", "") + " --eval.interval 3"


@pytest.fixture
def two(folder):
    (folder / "two.py").write_text(TWO)
    return folder


def number(row: dict[str, str], name: str) -> float:
    return float(row[name])


def test_each_reward_their_sum_and_the_speed_are_seen_everywhere(two, capsys):
    words = f"{SEEN} --eval.initial_validation true --train.keep_best true --logger_name tensorboard"
    assert run(words, "out") == 0
    printed = capsys.readouterr().out
    first, *rows = rows_of(Path("out"))
    for row in (*rows, {name.removeprefix("val_"): first[name] for name in first if name.startswith("val_")}):
        assert number(row, "reward") == pytest.approx(number(row, "reward_letters") + number(row, "reward_is_even"))
    assert not first["val_loss"] and not first["val_ppl"] and not first["val_bpb"] and "val_dropped" not in first
    assert "nan" not in Path("out/logs/metrics.csv").read_text()
    for row in rows:  # the functions take 0.2 s of a step, which is neither a wait for data nor part of the update
        update_s = number(row, "update_s")
        assert number(row, "data_wait_s") < 0.2 <= number(row, "step_s") - update_s
        tokens = number(row, "tokens_per_sec") * number(row, "step_s")
        assert number(row, "update_tokens_per_sec") == pytest.approx(tokens / update_s)
        assert number(row, "rollout_tokens_per_sec") > number(row, "answer_tokens") * 16 / number(row, "step_s")
    line = next(line for line in printed.splitlines() if "step 3/3 | loss" in line)
    assert (
        f"reward {number(rows[-1], 'reward'):.3g}" in line and " answers: " in line and "waiting for data" not in line
    )
    line = next(line for line in printed.splitlines() if "step 3/3 | validation" in line)
    reward = f"validation reward {number(rows[-1], 'val_reward'):.4g}, reward letters "
    assert reward in line and "perplexity" not in line and "loss" not in line and "dropped" not in line
    assert "best/ is the checkpoint with the highest val_reward" in printed
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("out/logs/tensorboard")
    events.Reload()
    for name in ("val_reward", "reward_is_even", "rollout_tokens_per_sec", "update_tokens_per_sec", "dropped"):
        assert name in events.Tags()["scalars"]
    assert main(["report", "out", "--format", "md"]) == 0
    report = capsys.readouterr().out
    assert f"| reward | {number(rows[-1], 'val_reward'):.4g} |" in report and "validation loss" not in report
    page = Path("out/report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["charts"][0] == ["Reward", "", ["reward", "val_reward"]]


def test_samples_are_answers_with_their_rewards(two, capsys):
    """The first of the held-out prompts; none with --eval.max_new_tokens 0."""
    assert run(SEEN, "out") == 0
    printed = capsys.readouterr().out
    events = [json.loads(line) for line in Path("out/logs/events.jsonl").read_text().splitlines()]
    samples = [event for event in events if event["kind"] == "sample"]
    assert len({event["prompt"] for event in samples}) == len(samples) == 3
    for event in samples:
        letters = len(event["text"])
        note = f", letters {letters}, is_even {1 - letters % 2}"
        assert event["note"] == note and f'sample after step 3{note}, to "{event["prompt"]}":' in printed
        assert event["prompt"].startswith("token ") and "of the lin" in event["prompt"]
    assert Path("out/report.html").read_text().count("<summary>after step 3, letters ") == 3
    assert run(f"{SEEN} --eval.max_new_tokens 0", "none") == 0
    assert "sample after" not in capsys.readouterr().out


def test_steps_that_train_on_nothing_are_counted_and_said_once(folder, capsys, monkeypatch):
    monkeypatch.setattr("toolkit_on_policy.callback.IDLE_STEPS", 2)
    words = f"{GRPO_RUN} --eval.interval 0".replace("scores:length", "scores:equal")
    assert run(words, "out") == 0
    printed = capsys.readouterr().out
    assert printed.count("warning: the last 2 steps trained on no answer") == 1 and "nan" not in printed
    for row in rows_of(Path("out")):
        assert row["dropped"] == "1.0" and not row["logprob_difference_median"] and float(row["loss"]) == 0
    page = Path("out/report.html").read_text()
    assert "trained on no answer" in page and "NaN" not in page.partition('id="data">')[2].partition("</script>")[0]


def test_distillation_shows_its_answers_without_rewards(folder, corpus, capsys):
    from helpers.small_runs import write_base

    (folder / "teacher").mkdir()
    write_base(folder / "teacher", corpus)
    words = f"{RUN} --objective OnPolicyDistillation --objective.teacher_dir teacher --eval.interval 3"
    assert run(words.replace("--eval.max_new_tokens 0", ""), "out") == 0
    printed = capsys.readouterr().out
    assert printed.count('sample after step 3, to "token ') == 3 and "reward" not in printed
    row = rows_of(Path("out"))[-1]
    assert float(row["val_loss"]) == float(row["val_divergence"]) and math.isfinite(float(row["val_loss"]))
    assert "perplexity" not in printed and not row["val_bpb"]


def test_the_rows_that_json_holds_out_are_held_out(folder):
    """A model that was trained on the others with --data JSON has not seen them."""
    tokenizer, options = Tokenizer.load(Path("base")), {"json_path": "prompts.jsonl"}
    for fraction in (None, 0.01, 0.25, 0.99):
        data = JSON(**options, prompt_style="plain", val_split_fraction=fraction, cache_dir="cache")
        val = data.prepare(tokenizer=tokenizer, max_seq_length=64).val
        template = prompt_template(tokenizer)
        expected = [prompt.where for prompt in read_prompts(data, val, None, template, None, False)]
        prepared = Prompts(**options, val_split_fraction=fraction).prepare(tokenizer=tokenizer, max_seq_length=64)
        assert expected and [prompt.where for prompt in prepared.val.prompts] == expected
        assert len(prepared.train) + len(prepared.val) == 16


def test_prompts_are_inspected_and_answered_by_evaluate(folder, capsys):
    data = ["--data", "Prompts", "--data.json_path", "prompts.jsonl", "--data.val_split_fraction", "0.25"]
    assert main(["inspect_data", *data, "--tokenizer_dir", "base", "--num_samples", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Sample 1: prompts.jsonl line ") and ", reference 'reads " in lines[0]
    assert lines[0].endswith(" tokens") and lines[1].startswith("token 0 of the lin")  # one token has e and r
    counts = {line[:20].strip(): line[20:].strip() for line in lines[3:]}
    assert counts["train rows"] == "12" and counts["val rows"] == "4" and float(counts["tokens per row"]) > 4
    assert int(counts["longest row"]) >= float(counts["tokens per row"]) and "trained" not in "".join(lines)
    assert main(["evaluate", "base", *data]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("has no tokens with loss; give --eval.metric for answers")
    metric = ["--eval.metric", "scores:length", "--eval.metric_new_tokens", "8", "--format", "json"]
    assert main(["evaluate", "base", *data, *metric]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == 4 and 0 <= result["letters"] < 7
    assert main(["prepare_data", *data, "--tokenizer_dir", "base"]) == 0
