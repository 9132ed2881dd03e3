"""Instruction data as rows: labels, lengths, packing, the validation split, the cache (S5), and the log."""

import json
import pickle
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.chatml import CHATML

from toolkit.data import CSV, JSON, LIMA, Alpaca, Dolly, HuggingFace, Parquet
from toolkit.data.sft.tokenize import Counts
from toolkit.errors import UserError


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Return a function that prepares rows in a private cache and returns the data and its log lines."""

    def run(rows, max_seq_length=200, tokenizer=tokenizer, **options):
        lines = []
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"cache_dir": str(tmp_path / "cache"), "val_split_fraction": 0.0} | options
        data = JSON(str(path), **options)
        data = data.prepare(tokenizer=tokenizer, max_seq_length=max_seq_length, report=lines.append)
        return data, " | ".join(lines)

    return run


def qa(question, answer):
    return {"prompt": question, "completion": answer}


MANY = [qa(f"question {i}", f"answer {i} " + "word " * (i * 7 % 23)) for i in range(60)]


def documents(rows):
    """Yield (inputs, labels) of every document of all rows, as lists."""
    for i in range(len(rows)):
        row = rows[i]
        numbers = row.get("documents", torch.zeros_like(row["input_ids"]))
        for document in numbers.unique():
            mask = numbers == document
            yield row["input_ids"][mask].tolist(), row["labels"][mask].tolist()


def labelled(tokenizer, rows) -> list[str]:
    """Return the label text of each document."""
    return [tokenizer.decode([t for t in labels if t != -100], False) for _, labels in documents(rows)]


def test_labels_are_the_answer_and_its_end_of_turn(prepare, tokenizer):
    data, log = prepare([qa("hi", "yes")])
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    ids = tokenizer.encode(text)
    row = data.train[0]
    assert row["input_ids"].tolist() == ids[:-1] and row["input_ids"].dtype == row["labels"].dtype == torch.int64
    prompt = len(tokenizer.encode(text.partition("yes")[0]))
    answer = ids[prompt : prompt + 4]
    assert row["labels"].tolist() == [-100] * (prompt - 1) + answer + [-100]
    assert data.train.lengths.tolist() == [len(ids) - 1] and set(row) == {"input_ids", "labels"}
    assert "chat template: the checkpoint: chat_template.jinja; end of turn: <|im_end|>" in log
    assert f"1 samples, 0 truncated, 0 dropped; {len(ids) - 1} tokens, trained: {4 / (len(ids) - 1):.1%}" in log
    assert json.loads(data.tokenizer.files["generation_config.json"])["eos_token_id"][-1] == ids[-2]


TWO = {"messages": [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "abcd", strict=True)]}


def test_train_on_selects_the_loss_mask(prepare, tokenizer):
    def trained(**options):
        return labelled(tokenizer, prepare([TWO], **options)[0].train)[0]

    everything = "user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    everything += "<|im_start|>assistant\nd<|im_end|>\n"
    assert trained() == trained(train_on="answers") == "b<|im_end|>d<|im_end|>"
    assert trained(train_on="last_answer") == "d<|im_end|>"
    assert trained(train_on="all") == trained(mask_prompt=False) == everything


def test_alpaca_rows_take_the_alpaca_style_where_the_model_has_no_template(prepare, plain):
    data, lines = prepare([{"instruction": "q", "input": "", "output": "a"}] * 3, tokenizer=plain)
    assert "has no chat template; rows with instruction and output use alpaca's" in lines
    assert "### Instruction" in plain.decode(data.train[0]["input_ids"].tolist())
    with pytest.raises(UserError, match="has no chat template; choose one of"):
        prepare([{"messages": [{"role": "user", "content": "q"}]}] * 3, tokenizer=plain)


def test_conversations_that_end_with_the_user_are_noted(prepare):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    _, lines = prepare([{"messages": turns}, {"messages": turns[:2]}])
    assert "1 conversations end with a message of the user" in lines


def test_plain_text_needs_no_template(prepare, plain):
    data, log = prepare([{"text": "some text"}], tokenizer=plain)
    ids = plain.encode("some text", eos=True)
    assert data.train[0]["input_ids"].tolist() == ids[:-1] and data.train[0]["labels"].tolist() == ids[1:]
    assert data.tokenizer is plain and "template" not in log
    with pytest.raises(UserError, match="--data.prompt_style: .* has no chat template"):
        prepare([{"text": "some text"}, qa("a", "b")], tokenizer=plain)
    data, log = prepare([{"text": "some text"}, qa("a", "b")], tokenizer=plain, prompt_style="alpaca")
    assert len(data.train) == 2 and "chat template: --data.prompt_style alpaca" in log
    assert "chat_template.jinja" in data.tokenizer.files
    with pytest.raises(UserError, match="--data.prompt_style alpaka: .*did you mean 'alpaca'"):
        prepare([{"text": "some text"}], prompt_style="alpaka")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


def test_tools_and_weights_of_a_row(prepare, tokenizer, tmp_path):
    shows = tokenizer.with_files({"chat_template.jinja": SHOWS_TOOLS.encode()})
    masked = {"messages": [TWO["messages"][0], {**TWO["messages"][1], "weight": 0}, *TWO["messages"][2:]]}
    rows = [{**masked, "tools": [TOOL]}, {**masked, "tools": json.dumps([TOOL])}, {**TWO, "tools": None}]
    data, log = prepare(rows, tokenizer=shows)
    assert labelled(shows, data.train) == ["d<|im_end|>", "d<|im_end|>", "b<|im_end|>d<|im_end|>"]
    inputs = [shows.decode(ids, False) for ids, _ in documents(data.train)]
    assert inputs[0] == inputs[1] == json.dumps([TOOL]) + inputs[2]
    renamed, _ = prepare([{**masked, "functions": [TOOL]}], tokenizer=shows, columns={"tools": "functions"})
    assert next(documents(renamed.train)) == next(documents(data.train))
    nothing = [*TWO["messages"][:1], {"role": "assistant", "content": "b", "weight": 0}]
    assert "without a trained token" in prepare([TWO, {"messages": nothing}])[1]
    half = {"messages": [*TWO["messages"][:3], {**TWO["messages"][3], "weight": 0.5}]}
    for row, message in (
        ({**TWO, "tools": [TOOL]}, "does not render the row's tools"),
        (half, "weight 0.5: must be 0"),
    ):
        with pytest.raises(UserError, match=f"rows.jsonl line 2: .*{message}"):
            prepare([TWO, row])


def test_template_file_changes_rows_and_cache_key_and_is_saved(prepare, tokenizer, tmp_path):
    file = tmp_path / "mine.jinja"
    first, _ = prepare([TWO])
    keys = [first.content_key]
    for source in ("Mine. " + CHATML, "Other. " + CHATML):
        file.write_text(source)
        data, log = prepare([TWO], chat_template=str(file))
        assert "preparing" in log and "using cached" in prepare([TWO], chat_template=str(file))[1]
        assert tokenizer.decode(data.train[0]["input_ids"].tolist(), False).startswith(source[:5])
        assert data.tokenizer.files["chat_template.jinja"] == source.encode()
        keys.append(data.content_key)
    assert len(set(keys)) == 3
    with pytest.raises(UserError, match="--data.chat_template .*: is not supported with --data.prompt_style"):
        JSON("x", chat_template=str(file), prompt_style="alpaca")


# ---- lengths


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_split_predicts_every_token_once(prepare, packing):
    complete = list(documents(prepare(MANY, 500, train_on="all")[0].train))
    data, log = prepare(MANY, 40, train_on="all", on_long="split", packing=packing)
    assert data.train.lengths.max() <= 40 and "0 truncated, 59 split, 0 dropped" in log
    pieces = sorted(documents(data.train), key=str) if packing == "best_fit" else list(documents(data.train))
    inputs, labels = ([t for document in complete for t in document[i]] for i in (0, 1))
    if packing == "none":
        assert [t for piece in pieces for t in piece[0]] == inputs
        assert [t for piece in pieces for t in piece[1]] == labels
    else:
        assert sorted(t for piece in pieces for t in piece[1]) == sorted(labels)


def test_split_drops_pieces_without_an_answer(prepare, tokenizer):
    data, log = prepare([qa("long question " * 10, "yes")], 50, on_long="split")
    assert labelled(tokenizer, data.train) == ["yes<|im_end|>"]
    assert "1 split (3 pieces without a trained token dropped), 0 dropped" in log


def test_split_drops_pieces_whose_only_target_is_the_first_token(prepare):
    """The first token of a row is never a target: here it is the end-of-turn token, followed by a newline."""
    complete = prepare([qa("hi", "yes")])[0].train
    data, log = prepare([qa("hi", "yes")], len(complete[0]["labels"]) - 1, on_long="split")
    assert len(data.train) == 1 and "1 split (1 pieces without" in log


def test_truncate_keeps_the_head(prepare):
    complete = list(documents(prepare(MANY, 500)[0].train))
    data, log = prepare(MANY, 60)
    found = list(documents(data.train))
    assert found == [(inputs[:60], labels[:60]) for inputs, labels in complete]
    long = sum(len(inputs) > 60 for inputs, _ in complete)
    assert f"60 samples, {long} truncated, 0 dropped" in log and 0 < long < 60
    exact = len(complete[0][0])
    assert "0 truncated" in prepare(MANY[:1], exact)[1] and "1 truncated" in prepare(MANY[:1], exact - 1)[1]


def test_samples_without_a_trained_token_are_dropped(prepare, tokenizer):
    rows = [qa("long question " * 20, "yes"), qa("hi", "yes"), {"messages": [{"role": "user", "content": "alone"}]}]
    data, log = prepare(rows, 60)
    assert labelled(tokenizer, data.train) == ["yes<|im_end|>"]
    assert "3 samples, 0 truncated, 2 dropped (2 without a trained token)" in log
    with pytest.raises(UserError, match=r"rows.jsonl: no sample is left to train on: 1 samples, .* 1 dropped"):
        prepare(rows[:1], 60)


def test_a_longer_row_is_advised_only_where_length_is_the_reason(prepare):
    unanswered = {"messages": [{"role": "user", "content": "alone"}]}
    for row, is_cut in ((qa("long question " * 20, "yes"), True), (unanswered, False)):
        with pytest.raises(UserError, match="no sample is left to train on") as error:
            prepare([row], 60)
        assert ("increase --train.max_seq_length" in str(error.value)) is is_cut


def test_on_long_drop_and_error(prepare, tokenizer):
    rows = [qa("hi", "yes"), qa("hi", "word " * 40)]
    data, log = prepare(rows, 60, on_long="drop")
    assert labelled(tokenizer, data.train) == ["yes<|im_end|>"] and "1 dropped (1 too long)" in log
    with pytest.raises(UserError, match=r"rows.jsonl line 2: 2\d\d tokens, but a row has room for 61 .*max_seq_length"):
        prepare(rows, 60, on_long="error")


# ---- packing (N9)


def test_n9_packed_rows_hold_the_same_documents(prepare):
    alone, packed = prepare(MANY)[0], prepare(MANY, packing="best_fit")[0]
    assert sorted(documents(packed.train)) == sorted(documents(alone.train)) and len(packed.train) < len(alone.train)
    for i in range(len(packed.train)):
        row = packed.train[i]
        assert {len(values) for values in row.values()} == {packed.train.lengths[i]} and len(row["labels"]) <= 200
        assert {values.dtype for values in row.values()} == {torch.int64}
        for document in range(int(row["documents"][-1]) + 1):
            mask = row["documents"] == document
            assert row["positions"][mask].tolist() == list(range(int(mask.sum())))
        assert row["documents"].tolist() == sorted(row["documents"].tolist())
    assert f"{packed.train.lengths.sum() / (200 * len(packed.train)):.1%} full" in packed.summary


def test_no_document_predicts_the_next_one(prepare, tokenizer):
    """The label at the last input of a document is its own last token, or masked."""
    text = [{"text": letter * 10} for letter in "abc"]
    row = prepare(text, 40, packing="best_fit")[0].train[0]
    ends = torch.tensor([9, 19, 29])
    assert row["documents"].unique().tolist() == [0, 1, 2]
    assert row["labels"][ends].tolist() == [tokenizer.eos_id] * 3
    row = prepare([qa("a", "b"), qa("c", "d")], packing="best_fit")[0].train[0]
    begins = [i for i in range(1, len(row["positions"])) if row["positions"][i] == 0]
    assert len(begins) == 1 and row["labels"][begins[0] - 1] == -100


def test_s2_packing_is_deterministic(prepare, tmp_path):
    first = list(documents(prepare(MANY, packing="best_fit")[0].train))
    shutil.rmtree(tmp_path / "cache")
    assert list(documents(prepare(MANY, packing="best_fit")[0].train)) == first


# ---- held-out samples


def test_val_split_fraction_holds_out_random_samples(prepare, tokenizer):
    everything = list(documents(prepare(MANY, 500)[0].train))
    data, log = prepare(MANY, 500, val_split_fraction=None)  # 5 %
    train, val = list(documents(data.train)), list(documents(data.val))
    assert len(val) == 3 and sorted(train + val) == sorted(everything) and "57 train rows; 3 val rows" in log
    assert train == [document for document in everything if document not in val]
    assert val != everything[:3] and val != everything[-3:]
    again = prepare(MANY, 500, val_split_fraction=0.05, packing="best_fit")[0]
    assert sorted(documents(again.val)) == sorted(val)
    assert prepare(MANY[:1], val_split_fraction=0.5)[0].val is None


def test_pieces_of_a_sample_stay_together(prepare, tokenizer):
    rows = [{"text": chr(97 + i) * 30} for i in range(20)]
    data, _ = prepare(rows, 10, on_long="split", val_split_fraction=0.3)
    letters = [
        {chr_ for inputs, _ in documents(rows) for chr_ in tokenizer.decode(inputs)} for rows in (data.train, data.val)
    ]
    assert len(letters[0]) == 14 and len(letters[1]) == 6 and not letters[0] & letters[1]
    assert len(data.val) == 18


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_held_out_duplicates_of_training_samples_are_reported(prepare, packing):
    data, log = prepare([*MANY, *MANY[:30]], 500, val_split_fraction=0.2, packing=packing)
    held_out = Counter(map(str, documents(data.val)))
    repeats = sum(held_out[document] for document in set(map(str, documents(data.train))))
    assert 0 < repeats < 18 == held_out.total()
    assert data.train.statistics["val_samples_also_trained"] == repeats
    assert f"{repeats} of 18 held-out samples are also trained on" in log
    assert "also trained" not in prepare(MANY, 500, val_split_fraction=0.2)[1]


def test_validation_file(tokenizer, tmp_path):
    for name, rows in (("train.jsonl", MANY), ("val.jsonl", MANY[:2])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(**options):
        data = JSON(str(tmp_path), cache_dir=str(tmp_path / "cache"), **options)
        return data.prepare(tokenizer=tokenizer, max_seq_length=200, report=lambda _: None)

    data = run()
    assert len(data.train) == 60 and list(documents(data.val)) == list(documents(data.train))[:2]
    assert data.val.where(1) == [f"{tmp_path}/val.jsonl line 2"]
    with pytest.raises(UserError, match="--data.val_split_fraction 0.1: remove it: .* has validation rows"):
        run(val_split_fraction=0.1)
    (tmp_path / "val.jsonl").write_text('{"prompt": "q", "completion": ""}')
    with pytest.raises(UserError, match="val.jsonl line 1: has an empty answer"):
        run()


# ---- the cache


def test_s2_rows_and_keys_equal_those_of_earlier_versions(prepare, plain):
    """A run from before the format changed can be resumed: its checkpoints record this key of tokens, mask and rows."""
    for options, rows, key in (
        ({}, (57, 3), "8ddb19d3719a31e03165b0550ee3f883e6c305533c9ae33a1d39d0c4035169ca"),
        ({"packing": "best_fit", "val_split_fraction": 0.2}, (30, 11),
         "fe13a66f299faa453ba65eafad45e7b83f23f4c205c90fc438e96158509a6ba8"),
    ):  # fmt: skip
        options = {"val_split_fraction": None, "prompt_style": "alpaca"} | options
        data = prepare(MANY, 400, plain, **options)[0]
        assert (len(data.train), len(data.val)) == rows and data.content_key == key


def test_s5_template_content_changes_the_key(prepare, tokenizer):
    assert "preparing" in prepare(MANY)[1]
    changed = tokenizer.with_files({"chat_template.jinja": CHATML.replace("assistant\n", "assistant\n\n").encode()})
    data, log = prepare(MANY, tokenizer=changed)
    assert "preparing" in log and data.tokenizer.files["chat_template.jinja"] == changed.files["chat_template.jinja"]


def test_dataset_is_picklable(prepare):
    rows = prepare(MANY, packing="best_fit")[0].train
    before = list(documents(rows))  # the files are memory-mapped now
    sent = pickle.dumps(rows)
    assert len(sent) < 20_000 and list(documents(pickle.loads(sent))) == before
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]


def test_token_ids_beyond_16_bits(prepare, tokenizer):
    raw = json.loads(tokenizer.files["tokenizer.json"])
    raw["model"]["vocab"]["yes"] = 70_000
    raw["model"]["merges"] = [["y", "e"], ["ye", "s"]]
    raw["model"]["vocab"]["ye"] = 69_999
    big = tokenizer.with_files({"tokenizer.json": json.dumps(raw).encode()})
    assert 70_000 in prepare([qa("hi", "yes")], tokenizer=big)[0].train[0]["labels"].tolist()


def test_longest_samples_are_reported(prepare):
    statistics = prepare(MANY, 60)[0].train.statistics
    sizes = [len(inputs) + 1 for inputs, _ in documents(prepare(MANY, 500)[0].train)]
    order = sorted(range(60), key=lambda i: (-sizes[i], i))[:5]
    assert [tuple(entry) for entry in statistics["longest"]] == [(sizes[i], 0, i + 1) for i in order]
    counts = Counts()
    for number in range(1, 8):
        counts.measure(5, 0, number)
    assert [number for *_, number in counts.to_dict()["longest"]] == [1, 2, 3, 4, 5]


# ---- the modules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_split_fraction": 1.0}, "--data.val_split_fraction 1.0: must be at least 0 and less than 1"),
        ({"val_split_fraction": -0.1}, "--data.val_split_fraction -0.1"),
        ({"num_workers": -1}, "--data.num_workers -1"),
        (
            {"mask_prompt": False, "train_on": "last_answer"},
            "--data.mask_prompt false: .* --data.train_on is last_answer",
        ),
        ({"columns": {"a": "b"}}, "--data.columns a: unknown column"),
    ],
)
def test_invalid_options_are_errors(options, message):
    with pytest.raises(UserError, match=message):
        JSON("x", **options)


def test_tokenizer_is_required():
    with pytest.raises(UserError, match="--data JSON: needs the tokenizer of the model; specify --tokenizer_dir"):
        JSON("x").prepare(tokenizer=None, max_seq_length=8)


def test_template_errors_name_the_row(prepare, tokenizer):
    strict = CHATML + "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
    strict = tokenizer.with_files({"chat_template.jinja": strict.encode()})
    rows = [qa("a", "b"), {"messages": [{"role": "assistant", "content": "c"}]}]
    with pytest.raises(UserError, match=r"rows.jsonl line 2: .*rejects the messages: user first"):
        prepare(rows, tokenizer=strict)


def test_all_file_formats_give_the_same_data(tokenizer, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.json").write_text(json.dumps(MANY))
    lines = [f"{row['prompt']},{row['completion']}\n" for row in MANY]
    (tmp_path / "a.csv").write_text("prompt,completion\n" + "".join(lines))
    parquet.write_table(pyarrow.Table.from_pylist(MANY), tmp_path / "a.parquet")
    modules = [JSON(f"{tmp_path}/a.json"), CSV(f"{tmp_path}/a.csv"), Parquet(f"{tmp_path}/a.parquet")]
    keys = set()
    for module in modules:
        module.cache_dir = str(tmp_path / "cache")
        keys.add(module.prepare(tokenizer=tokenizer, max_seq_length=100, report=lambda _: None).content_key)
    assert len(keys) == 1


SETS = {
    Alpaca: ({"instruction": "q", "input": "i", "output": "a", "text": "Below is ..."}, {"output": ""}),
    Dolly: ({"instruction": "q", "context": "i", "response": "a", "category": "open_qa"}, {"response": ""}),
    LIMA: ({"conversations": ["q", "a"], "source": "stackexchange"}, {"conversations": ["q", ""]}),
}


@pytest.mark.parametrize("module", SETS)
def test_named_datasets_read_their_columns(tokenizer, tmp_path, module):
    row, change = SETS[module]
    (tmp_path / "set.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | change))
    data = module(local_path=str(tmp_path / "set.jsonl"), cache_dir=str(tmp_path), val_split_fraction=0.0)
    data = data.prepare(tokenizer=tokenizer, max_seq_length=200, report=lambda _: None)
    assert labelled(tokenizer, data.train) == ["a<|im_end|>"] and "1 dropped (1 with an empty answer)" in data.summary
    text = tokenizer.decode(data.train[0]["input_ids"].tolist(), False)
    assert ("user\nq<|im_end|>" if module is LIMA else "user\nq\n\ni<|im_end|>") in text


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return datasets


def test_hugging_face_module_reads_a_local_folder(datasets, tokenizer, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for name, rows in (("train", [*MANY, qa("q", "")]), ("test", MANY[:3])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(**options):
        data = HuggingFace(str(folder), cache_dir=str(tmp_path / "cache"), **options)
        lines = []
        return data.prepare(tokenizer=tokenizer, max_seq_length=500, report=lines.append), lines

    data, lines = run(val_split="test")
    assert len(data.train) == 60 and len(data.val) == 3 and "1 dropped (1 with an empty answer)" in data.summary
    assert list(documents(data.val)) == list(documents(data.train))[:3] and "preparing" in lines[0]
    assert data.train.where(2) == [f"{folder} train row 3"]
    assert "using cached" in run(val_split="test")[1][0]
    assert len(run(split="train[:10]", val_split_fraction=0.0)[0].train) == 10
    with pytest.raises(UserError, match=r"--data.repo_id .*split nothing: cannot be loaded") as error:
        run(split="nothing")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"--data.repo_id .*/nowhere, .*cannot be loaded"):
        HuggingFace(f"{tmp_path}/nowhere").prepare(tokenizer=tokenizer, max_seq_length=8)


def test_hugging_face_module_reads_folders_of_save_to_disk(datasets, tokenizer, tmp_path):
    rows = datasets.Dataset.from_list(MANY)
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train=rows, test=rows.select(range(3))).save_to_disk(tmp_path / "two")

    def run(name, **options):
        data = HuggingFace(str(tmp_path / name), cache_dir=str(tmp_path / "cache"), val_split_fraction=0.0, **options)
        return data.prepare(tokenizer=tokenizer, max_seq_length=500, report=lambda _: None).train

    expected = list(documents(run("two")))
    assert len(expected) == 60 and list(documents(run("one"))) == expected
    assert list(documents(run("one", split="train[:3]"))) == list(documents(run("two", split="test"))) == expected[:3]
    with pytest.raises(UserError, match="split test: cannot be loaded"):
        run("one", split="test")


# ---- real data


@pytest.mark.slow
def test_chatterbot_corpus_is_packed(tokenizer, tmp_path):
    pytest.importorskip("chatterbot_corpus")
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    try:
        import chatterbot_to_jsonl
    finally:
        sys.path.pop(0)
    path = tmp_path / "chatterbot.jsonl"
    assert chatterbot_to_jsonl.write(path, "messages") > 800
    assert len(set(path.read_text().splitlines())) == len(
        path.read_text().splitlines()
    )  # the package contains duplicates
    turns = next(chatterbot_to_jsonl.conversations(["ai"]))
    assert turns[0] == "What is AI?"
    data = JSON(str(path), cache_dir=str(tmp_path), packing="best_fit")
    data = data.prepare(tokenizer=tokenizer, max_seq_length=1024, report=lambda _: None)
    efficiency = data.train.lengths.sum() / (len(data.train) * 1024)
    assert efficiency > 0.97 and 0.3 < data.train.statistics["trained_tokens"] / data.train.statistics["tokens"] < 0.9
    assert np.array_equal(data.train.lengths, [len(data.train[i]["labels"]) for i in range(len(data.train))])
    found = {tokenizer.decode(inputs, False) for inputs, _ in documents(data.train)}
    assert any(f"user\n{turns[0]}<|im_end|>\n<|im_start|>assistant\n{turns[1]}<|im_end|>" in text for text in found)
    assert chatterbot_to_jsonl.write(path, "prompt", ["trivia"]) > 100
    assert set(json.loads(path.read_text().splitlines()[0])) == {"prompt", "completion"}
