"""Pairs of completions, and rated ones, as rows: prompts, labels, lengths, and mistakes."""

import json

import numpy as np
import pytest
from helpers.chatml import CHATML

from toolkit.data import JSON, Preference
from toolkit.data.sft.messages import EmptyAnswerError
from toolkit.data.sft.schemas import EqualAnswersError, parse_row
from toolkit.errors import UserError

USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "good"), ("assistant", "bad")))
EARLIER = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "earlier"}]


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Return a function that prepares rows in a private cache and returns the data and its log lines."""

    def run(rows, max_seq_length=200, module=Preference, kind="pairs", tokenizer=tokenizer, **options):
        lines = []
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"cache_dir": str(tmp_path / "cache"), "val_split_fraction": 0.0} | options
        data = module(json_path=str(path), **options)
        data = data.prepare(tokenizer=tokenizer, max_seq_length=max_seq_length, report=lines.append, kind=kind)
        return data, " | ".join(lines)

    return run


def texts(tokenizer, row) -> tuple[str, str]:
    """Return the prompt and the labels of a row as text."""
    inputs, labels = row["input_ids"].tolist(), row["labels"].tolist()
    first = next(i for i, label in enumerate(labels) if label >= 0)
    answer = [label for label in labels if label >= 0]
    assert answer[:-1] == inputs[first + 1 : first + len(answer)]
    return tuple(tokenizer.decode(ids, skip_special_tokens=False) for ids in (inputs[: first + 1], answer))


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "user\nq"),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, "user\nq"),
        ({"prompt": "q", "chosen": GOOD, "rejected": BAD}, "user\nq"),
        ({"prompt": [USER], "chosen": "good", "rejected": "bad"}, "user\nq"),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "user\nq"),  # UltraFeedback repeats it
        ({"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, "assistant\nearlier"),
        ({"prompt": [*EARLIER, USER], "chosen": "good", "rejected": "bad", "system": "s"}, "system\ns"),
    ],
)
def test_a_pair_is_two_rows_with_loss_on_the_completions(row, prompt, prepare, tokenizer):
    data, _ = prepare([row])
    assert len(data.train) == 1 and data.train.group_size == 2
    pair = data.train[0]
    (prompts, answers) = zip(*(texts(tokenizer, row) for row in pair), strict=True)
    assert answers == ("good<|im_end|>", "bad<|im_end|>")
    assert prompts[0] == prompts[1] and prompt in prompts[0] and prompts[0].endswith("assistant\n")
    assert data.train.lengths.tolist() == [sum(len(row["input_ids"]) for row in pair)]
    assert [place.rpartition(" ")[2] for place in data.train.where(0)] == ["(chosen)", "(rejected)"]


def test_texts_without_a_prompt_are_divided_where_they_differ(prepare, tokenizer):
    chosen, rejected = ("\n\nHuman: Name a river.\n\nAssistant: The " + end for end in ("Nile.", "Nanga Parbat"))
    data, _ = prepare([{"chosen": chosen, "rejected": rejected}])
    prompt = "\n\nHuman: Name a river.\n\nAssistant: The "
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    assert [texts(tokenizer, row) for row in data.train[0]] == [(prompt, f"Nile.{eos}"), (prompt, f"Nanga Parbat{eos}")]


def test_rated_rows_and_pairs_have_labels(prepare, tokenizer):
    rows = [
        {"prompt": "q", "completion": "good", "label": True},
        {"messages": [*EARLIER, USER, BAD], "label": 0},
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
    ]
    data, _ = prepare(rows, kind="rated")
    found = [(texts(tokenizer, row)[1], row["values"]["label"]) for row in map(data.train.__getitem__, range(4))]
    assert found == [(f"{answer}<|im_end|>", label) for answer, label in [("good", 1), ("bad", 0)] * 2]


def test_prompts_are_cut_from_the_left_then_completions_from_the_right(prepare, tokenizer):
    pair = {"prompt": "p" * 30, "chosen": "c" * 20, "rejected": "r" * 5}
    whole, _ = prepare([pair])
    longest = len(whole.train[0][0]["input_ids"]) + 1
    for limit, kept in ((longest, 30), (longest - 7, 29), (40, 5)):
        data, lines = prepare([pair], max_seq_length=limit - 1)
        prompts, answers = zip(*(texts(tokenizer, row) for row in data.train[0]), strict=True)
        assert prompts[0] == prompts[1] and prompts[0].count("p") == kept
        assert answers == ("c" * 20 + "<|im_end|>", "r" * 5 + "<|im_end|>")
        assert ("cut 1 prompts from the left, then 0 completions" in lines) == (kept < 30)
    data, lines = prepare([pair], max_seq_length=10)
    prompts, answers = zip(*(texts(tokenizer, row) for row in data.train[0]), strict=True)
    assert prompts == ("\n", "\n") and answers == ("c" * 10, "r" * 5 + "<|im_end|>")
    assert "cut 1 prompts from the left, then 1 completions" in lines
    with pytest.raises(UserError, match="tokens, but a row has room for 11 .*truncate or drop"):
        prepare([pair], max_seq_length=10, on_long="error")
    same = {"prompt": "q", "chosen": "x" * 30, "rejected": "x" * 31}
    with pytest.raises(UserError, match="no sample is left.*1 without a trained token"):
        prepare([same], max_seq_length=20)
    assert len(prepare([same, pair], max_seq_length=60, on_long="drop")[0].train) >= 1


def test_a_held_out_pair_stays_together(prepare):
    rows = [{"prompt": f"question {i}", "chosen": "good", "rejected": "bad"} for i in range(40)]
    data, _ = prepare(rows, val_split_fraction=0.2, num_workers=0)
    assert (len(data.train), len(data.val)) == (32, 8)
    for split in (data.train, data.val):
        for i in range(len(split)):
            chosen, rejected = split.where(i)
            assert chosen.replace("chosen", "") == rejected.replace("rejected", "")
    again, lines = prepare(rows, val_split_fraction=0.2, module=JSON)  # any chat data
    assert again.content_key == data.content_key and np.array_equal(again.train.lengths, data.train.lengths)


MISTAKES = {
    "has no rejected answer; it has prompt, chosen": {"prompt": "q", "chosen": "a"},
    r"has an empty answer \(rejected\)": {"prompt": "q", "chosen": "a", "rejected": None},
    r"has an empty answer \(chosen\)": {"prompt": "q", "chosen": " ", "rejected": "b"},
    "chosen and rejected are equal": {"prompt": "q", "chosen": "a", "rejected": "a"},
    "has an empty prompt": {"prompt": " ", "chosen": "a", "rejected": "b"},
    "prompt: is an empty list": {"prompt": [], "chosen": "a", "rejected": "b"},
    "begin differently; add a prompt": {"chosen": "a", "rejected": "b"},
    "has no prompt, and chosen and rejected begin differently": {"chosen": [GOOD], "rejected": [BAD]},
    "the completion ends with a message of the user": {"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]},
    "not an object": ["a", "b"],
    "chosen: is a number": {"prompt": "q", "chosen": 3, "rejected": "b"},
}


def test_mistakes_in_rows_are_one_line():
    for message, row in MISTAKES.items():
        with pytest.raises(UserError, match=f"^file line 7: .*{message}") as error:
            parse_row(row, "file line 7", kind="pairs")
        assert "\n" not in str(error.value)
        assert isinstance(error.value, EmptyAnswerError) == ("empty answer" in message or "equal" in message)
        assert isinstance(error.value, EqualAnswersError) == ("equal" in message)
    with pytest.raises(UserError, match="label 'maybe': must be true"):
        parse_row({"prompt": "q", "completion": "a", "label": "maybe"}, "row 1", kind="rated")


def test_mistakes_in_options_and_templates_are_one_line(prepare, tokenizer, tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for options, message in (
        ({"packing": "best_fit"}, "packing best_fit: is not supported with preferences"),
        ({"on_long": "split"}, "on_long split"),
        ({"train_on": "all"}, "train_on all"),
        ({"mask_prompt": False}, "mask_prompt false"),
    ):
        with pytest.raises(UserError, match=message):
            prepare([pair], **options)
    template = tmp_path / "same.jinja"
    template.write_text(CHATML.replace("m['content']", "m['content'] | lower"))
    with pytest.raises(UserError, match=r"rows.jsonl line 1: .*renders chosen and rejected as the same tokens"):
        prepare([pair | {"chosen": "Same", "rejected": "same"}], chat_template=str(template))
    with pytest.raises(UserError, match="is a pair of answers.*use --objective DPO"):
        prepare([pair], module=JSON, kind="answers")
    rated = {"prompt": "q", "completion": "a", "l": 1}
    with pytest.raises(UserError, match=r"--data.columns.label: has no effect without an objective for preferences"):
        prepare([rated], module=JSON, kind="answers", columns={"label": "l"})
    with pytest.raises(UserError, match=r"--data.json_path a: is not supported with --data.repo_id"):
        Preference(json_path="a", repo_id="b")
