"""Prompts for metrics are what training sees before the last answer."""

import json

import pytest
from helpers.cases import check_each
from helpers.chatml import CHATML
from toolkit_metric.prompts import prompt_template, read_prompts

from toolkit.data import JSON, Preference
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError

TURNS = [{"role": r, "content": c} for r, c in (("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d"))]
ROWS = [
    {"prompt": f"question {i}", "completion": f"reply {i}"}
    if i % 2
    else {"messages": [*TURNS[:3], dict(TURNS[3], n=i)]}
    for i in range(20)
]


@pytest.fixture
def write(tmp_path):
    def write(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture
def chat(tokenizer):
    return tokenizer.with_files({"chat_template.jinja": CHATML.encode()})


def prompts_of(path, template, *, val=None, data=None, max_rows=None, with_choices=False):
    return read_prompts(data, val, path, template, max_rows, with_choices)


def test_prompts_of_held_out_rows_are_those_of_training(write, chat, tmp_path):
    options = {"val_split_fraction": 0.3, "cache_dir": str(tmp_path / "cache"), "train_on": "last_answer"}
    data = JSON(json_path=write(ROWS), **options)
    prepared = data.prepare(tokenizer=chat, max_seq_length=200, report=lambda line: None)
    template = prompt_template(prepared.tokenizer)
    prompts = prompts_of(None, template, val=prepared.val, data=data)
    assert len(prompts) == len(prepared.val) == 6
    for i, prompt in enumerate(prompts):
        row = prepared.val[i]
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        start = next(j for j, label in enumerate(labels) if label >= 0)
        assert prompt.ids == ids[: start + 1] and prompt.where == prepared.val.where(i)[0]
        answer = chat.decode([label for label in labels if label >= 0])
        assert answer.strip() == prompt.reference
        assert ROWS[int(prompt.where.rpartition(" ")[2]) - 1] == prompt.row
    assert prompts_of(None, template, val=prepared.val, data=data, max_rows=3) == prompts[::2]
    assert set(template.stop_ids) >= {chat.added_tokens["<|im_end|>"]}


def test_a_base_model_gets_plain_text(write):
    tokenizer = train_bpe(["two and two is four"], 260)
    template = prompt_template(tokenizer)
    (prompt,) = prompts_of(write([{"prompt": "two and two is", "completion": " four"}]), template)
    assert prompt.ids == tokenizer.encode("two and two is") and prompt.reference == " four"
    assert template.stop_ids == [tokenizer.eos_id]


def test_rows_without_an_answer_have_no_reference(write, chat):
    template, with_answer = prompt_template(chat), {"prompt": "c?", "completion": "d"}
    pair = {"prompt": "c?", "chosen": "d", "rejected": "e"}
    rows = [with_answer, {"prompt": "c?"}, {"messages": TURNS[2:3]}, {"prompt": "c?", "answer": "d"}, pair]
    prompts = prompts_of(write(rows), template)
    assert [prompt.reference for prompt in prompts] == ["d", None, None, "d", "d"]
    assert len({tuple(prompt.ids) for prompt in prompts}) == 1


def test_choices_are_answers_without_their_end(write, chat, tokenizer):
    row = {"prompt": "is it", "completion": "no", "choices": ["yes, certainly", "no"]}
    for each in (chat, tokenizer):
        (prompt,) = prompts_of(write([row]), prompt_template(each), with_choices=True)
        for (ids, loss_mask), text in zip(prompt.choices, row["choices"], strict=True):
            start = len(prompt.ids)
            assert ids[:start] == prompt.ids and each.decode(ids[start:]) == text
            assert loss_mask == [False] * start + [True] * (len(ids) - start)


def test_mistakes_in_rows_are_one_line(write, chat):
    template = prompt_template(chat)

    def check(row, message, **options):
        with pytest.raises(UserError, match=message):
            prompts_of(write([row]), template, **options)

    needs = "rows.jsonl line 1: needs choices, a list of texts, one of which is the row's answer"
    good = {"prompt": "q", "completion": "a"}
    check_each(check, [
        ({"text": "plain"}, "rows.jsonl line 1: is plain text without a prompt; give rows with prompts"),
        ({"nothing": "q"}, "rows.jsonl line 1: has no known column"),
    ])  # fmt: skip
    for more in ({}, {"choices": ["a"]}, {"choices": ["b", "c"]}, {"choices": ["a", 1]}):
        check(good | more, needs, with_choices=True)
    for path, message in ((write([good], "rows.txt"), "must end in .json or .jsonl"), ("none.json", "no such file")):
        with pytest.raises(UserError, match=message):
            prompts_of(path, template)
    with pytest.raises(UserError, match="--data Preference has no held-out rows with answers; give --eval.metric_data"):
        prompts_of(None, template, data=Preference(json_path="x"))
