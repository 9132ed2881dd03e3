"""``reward:FOLDER`` and ``toolkit classify``: the tokens that a model with a head scores."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import check_each
from helpers.chatml import CHATML
from helpers.small_runs import write_base
from toolkit_align import reward as metric
from toolkit_align import text_scorer
from toolkit_align.reward import reward
from toolkit_align.text_scorer import TextScorer
from toolkit_metric.prompts import prompt_template, read_prompts

from toolkit.checkpoints.weights import load_weights, save_weights
from toolkit.data import JSON, Preference
from toolkit.data.chat.template import Encoding
from toolkit.data.sft.schemas import Record
from toolkit.data.sft.tokenize import mark_scored
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.load import load_checkpoint

HEAD = {"head": "reward", "labels": ["reward"], "tie_embeddings": False, "block_size": 128}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, corpus):
    """A reward model, one that rewards each token, and a language model."""
    heads = {"reward": HEAD, "token_reward": HEAD | {"head": "token_reward"}, "lm": {}}
    chat = {"chat_template.jinja": CHATML.replace("'<|im_end|>\n'", "eos_token")}
    return {
        name: str(write_base(tmp_path_factory.mktemp(name), corpus, companions=chat, **config))
        for name, config in heads.items()
    }


@pytest.fixture(scope="module")
def scorer(folders):
    return TextScorer(folders["reward"], base_checkpoint_dir=None, accelerator="cpu", precision=None)


def test_16_bit_weights_score_in_fp32_on_a_cpu(folders, tmp_path):
    weights = load_weights(Path(shutil.copytree(folders["reward"], tmp_path / "m")))
    save_weights({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "m" / "lit_model.pth")
    for precision, dtype in ((None, torch.float32), ("bf16-true", torch.bfloat16)):
        scorer = TextScorer(str(tmp_path / "m"), base_checkpoint_dir=None, accelerator="cpu", precision=precision)
        assert {p.dtype for p in scorer.model.parameters()} == {dtype}


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|endoftext|>" for role, content in turns)


def prompts_of(tmp_path, rows, folder, columns=None):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template, data = prompt_template(Tokenizer.load(folder)), JSON(json_path="", columns=columns)
    prompts = read_prompts(data, None, str(tmp_path / "rows.jsonl"), template, None, False)
    return [{"messages": p.record.messages, "tools": p.record.tools, "where": p.where} for p in prompts]


def test_a_reward_is_that_of_the_answer_in_every_form_of_row(folders, scorer, tmp_path):
    """Against the text by hand. The second row of each form has earlier turns or a system message, if there is one."""

    def check(form, row, *turns, columns=None):
        (prompt,) = prompts_of(tmp_path, [row | {"prediction": "x" * 200_000}], folders["reward"], columns)
        text = chatml(*(turns or [("user", "token one")]), ("assistant", "a line"))
        ids = scorer._options.tokenizer.encode(text)
        assert len(ids) < 128
        (expected,) = scorer.predict(
            [mark_scored(Encoding(ids, [True] * len(ids)), scorer._options.tokenizer.pad_id, False)]
        )
        assert reward(["a line"], ["other"], [prompt], folders["reward"]) == {"reward": pytest.approx(expected)}

    question, answer = {"role": "user", "content": "token one"}, {"role": "assistant", "content": "other"}
    turns = [("user", "and"), ("assistant", "so"), ("user", "token one")]
    chat = [{"from": who, "value": text} for who, text in (("human", "and"), ("gpt", "so"), ("human", "token one"))]
    system = [("system", "be"), ("user", "token one")]
    check_each(check, [
        ("messages", {"messages": [question, answer]}),
        ("question", {"messages": [question]}),
        ("from", {"messages": [*chat, {"from": "gpt", "value": "other"}]}, *turns),
        ("sharegpt", {"conversations": [*chat, {"from": "gpt", "value": "other"}], "system": "be"}, system[0], *turns),
        ("conversations", {"conversations": [question, answer]}),
        ("lima", {"conversations": ["and", "so", "token one", "other"]}, *turns),
        ("pairs", {"conversations": [["and", "so"], ["token one", "other"]]}, *turns),
        ("prompt", {"prompt": "token one", "completion": "other"}),
        ("alpaca", {"instruction": "token one", "input": "", "output": "other", "system": "be"}, *system),
        ("history", {"instruction": "token one", "output": "other", "history": [["and", "so"]]}, *turns),
        ("preference", {"prompt": "token one", "chosen": "other", "rejected": "no"}),
    ])  # fmt: skip
    check("columns", {"q": "token one", "a": "other", "prompt": 1}, columns={"prompt": "q", "completion": "a"})


def test_empty_answers_are_scored(folders, scorer, tmp_path):
    prompts = prompts_of(tmp_path, [{"prompt": "token one"}] * 3, folders["reward"])
    ids = scorer._options.tokenizer.encode(chatml(("user", "token one"), ("assistant", "")))
    (expected,) = scorer.predict(
        [mark_scored(Encoding(ids, [True] * len(ids)), scorer._options.tokenizer.pad_id, False)]
    )
    for name in ("reward", "token_reward"):
        scores = reward(["", "\n\n", "a line"], [None] * 3, prompts, folders[name])["reward"]
        assert all(map(math.isfinite, scores)) and scores[1] == pytest.approx(scores[0]) != scores[2]
        assert name == "token_reward" or scores[:1] == pytest.approx(expected)


def test_a_long_prompt_is_cut_as_in_training(folders, scorer, tmp_path):
    row = {"prompt": "token and " * 60, "chosen": "xq", "rejected": "xz"}
    (prompt,) = prompts_of(tmp_path, [row], folders["reward"])
    data = Preference(json_path=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"), val_split_fraction=0.0)
    options = {"kind": "compared", "max_seq_length": 128, "report": lambda line: None}
    trained = data.prepare(tokenizer=Tokenizer.load(folders["reward"]), **options).train[0]
    record = Record(prompt["messages"], None, "row")
    for of_pair, name in zip(trained, ("chosen", "rejected"), strict=True):
        assert scorer.encode_answer(record, row[name]).ids[:-1] == of_pair["input_ids"].tolist()
    scores = reward(["xq", "xz"], [None] * 2, [prompt] * 2, folders["reward"])["reward"]
    assert scores[0] != scores[1] and scorer.n_cut == 2


def test_a_model_is_loaded_once_and_must_give_a_number(folders, tmp_path, monkeypatch):
    prompts, loads = prompts_of(tmp_path, [{"prompt": "token one"}], folders["lm"]), []
    monkeypatch.setattr(text_scorer, "load_checkpoint", lambda *a, **k: loads.append(a) or load_checkpoint(*a, **k))
    metric._load_scorer.cache_clear()
    for answer in ("so", "no"):
        reward([answer], [None], prompts, folders["reward"])
    assert len(loads) == 1
    with pytest.raises(UserError, match="has no head; train one with toolkit finetune_full --head"):
        reward(["so"], [None], prompts, folders["lm"])
