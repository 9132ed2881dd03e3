"""Row schemas and readers: rows to records, files to rows, and one-line errors with file and row."""

import contextlib
import json
import os
import time

import pytest
from helpers.rows import to_record

from toolkit.data.sft.datasets import HubRows
from toolkit.data.sft.messages import EmptyAnswerError
from toolkit.data.sft.readers import (
    CSV_KINDS,
    JSON_KINDS,
    PARQUET_KINDS,
    RowFile,
    describe_row,
    find_splits,
)
from toolkit.data.sft.schemas import known_columns, parse_row, require_columns
from toolkit.errors import UserError
from toolkit.io.safe_parse import MAX_ROW

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
LONG = "7" * 5000  # digits
FROM_INSTRUCTION = {**USER, "instruction": "q", "input": ""}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "q", "output": "a"}, [FROM_INSTRUCTION, ASSISTANT]),
        ({"instruction": "q", "input": "", "output": "a", "text": "all of it"}, [FROM_INSTRUCTION, ASSISTANT]),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            [{"role": "user", "content": "q\n\ni", "instruction": "q", "input": "i"}, ASSISTANT],
        ),
        (
            {"instruction": "q", "context": "i", "response": "a", "category": "qa"},
            [{"role": "user", "content": "q\n\ni", "instruction": "q", "input": "i"}, ASSISTANT],
        ),
        ({"instruction": "q", "answer": "a"}, [FROM_INSTRUCTION, ASSISTANT]),
        ({"prompt": "q", "completion": "a"}, [USER, ASSISTANT]),
        ({"prompt": "q", "completion": "a", "text": None, "messages": None}, [USER, ASSISTANT]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER, ASSISTANT]),
        ({"prompt": [USER], "completion": "a"}, [USER, ASSISTANT]),
        ({"prompt": "q", "completion": ASSISTANT}, [USER, ASSISTANT]),
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"messages": json.dumps([USER, ASSISTANT])}, [USER, ASSISTANT]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER, ASSISTANT]),
        ({"conversations": ["q", "a", "q"]}, [USER, ASSISTANT, USER]),
        ({"messages": [{**USER, "name": "Ann", "tool_calls": None}]}, [{**USER, "name": "Ann"}]),
        ({"messages": [{**ASSISTANT, "tool_calls": ""}]}, [{**ASSISTANT, "tool_calls": ""}]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, [USER]),
        ({"system": "s", "prompt": "q", "completion": "a"}, [{"role": "system", "content": "s"}, USER, ASSISTANT]),
        (
            {"system": "s", "messages": [{"role": "system", "content": "s\n"}, USER]},
            [{"role": "system", "content": "s\n"}, USER],
        ),
        ({"prompt": [USER], "input": "", "completion": "a"}, [USER, ASSISTANT]),
        ({"prompt": json.loads(r'"\ud83d\ude42"'), "completion": "a"}, [{**USER, "content": "🙂"}, ASSISTANT]),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
            [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
        ),
    ],
)
def test_rows_of_all_schemas_are_parsed(row, messages):
    record = to_record(row, "file line 1")
    assert list(record.messages) == messages and record.text is None and record.where == "file line 1"


def test_plain_text_row_has_no_messages():
    record = to_record({"text": "some text", "id": 3}, "x")
    assert record.text == "some text" and record.messages is None


def test_columns_are_mapped_by_name():
    row = {"question": "q", "reply": "a", "output": "not this"}
    columns = {"prompt": "question", "completion": "reply"}
    assert list(to_record(row, "x", columns).messages) == [USER, ASSISTANT]
    with pytest.raises(UserError, match=r"x: has no column reply \(--data.columns\); it has question"):
        to_record({"question": "q"}, "x", columns)
    for columns, message in (
        ({"promt": "question"}, "promt: unknown column; did you mean 'prompt'"),
        ({"question": "prompt"}, r"""question: unknown column; did you mean '{"prompt": "question"}'\?$"""),
        ({"prompt": "q", "completion": "q"}, "columns: prompt and completion are both column q; give each its own"),
    ):
        with pytest.raises(UserError, match=f"--data.(columns )?{message}"):
            require_columns(columns)
    assert known_columns({"a": 1, "label": 2, "prompt": 3}, {"label": "a"}) == {"label": "a", "prompt": "prompt"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["q", "a"], "is a list, not an object"),
        ("text", "is a string, not an object"),
        (None, "is null, not an object"),
        ({"foo": 1, "bar": 2}, "has no known column; it has foo, bar"),
        ({"question": "q", "answer": "a"}, '--data.columns .{"prompt": "question", "completion": "answer"}'),
        ({}, "has no known column; it has nothing"),
        ({"prompt": "q", "rating": 3}, "has no completion for the prompt; it has prompt"),
        ({"instruction": "q"}, "has no output for the instruction"),
        ({"instruction": "q", "output": 42}, "output: is a number; it must be a string"),
        ({"instruction": "", "output": "a"}, "has an empty instruction"),
        ({"prompt": "q", "instruction": "q", "output": "a"}, "has both instruction and prompt"),
        ({"prompt": "q", "response": "a", "answer": "b"}, "has both response and answer; choose one"),
        ({"instruction": "q", "input": 3, "output": "a"}, "input: is a number; it must be a string"),
        ({"text": 3}, "text: is a number; it must be a string"),
        ({"messages": []}, "messages: is an empty list"),
        ({"prompt": "q", "completion": "a", "tools": "weather"}, "tools: is a string, not a list of tools"),
        ({"prompt": "q", "completion": "a", "tools": '[{"a": 1, "a": 2}]'}, "a list of tools: duplicate key a"),
        ({"prompt": "q", "completion": "a", "tools": '[{"a": NaN}]'}, "a list of tools: NaN is not JSON"),
        ({"prompt": "q", "completion": "a", "tools": "[" * 10**5}, "tools: is a string, not a list of tools"),
        ({"prompt": "q", "completion": "a", "tools": {"name": "weather"}}, "tools: is an object; it must be a list"),
        ({"prompt": "q", "completion": "a", "tools": ["weather"]}, "tools: tool 1 is a string; it must be an object"),
        (
            {"prompt": "q", "completion": "a", "tools": r'[{"name": "\ud800"}]'},
            r"tools: .*unpaired surrogate \(\\ud800\)",
        ),
        ({"messages": "[" * 10**5}, "messages: is a string, not a list of messages"),
        ({"messages": "hello"}, "messages: is a string, not a list of messages"),
        ({"messages": ["q", {"role": "user", "content": "q"}]}, "message 1: is a string, not an object"),
        ({"messages": [{"content": "q"}]}, "message 1: has no role; it has content"),
        ({"messages": [USER, {"role": "assistant"}]}, r"message 2 \(assistant\): has no content; it has role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"message 1 \(user\): content: is a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1: has non-text content"),
        (
            {"system": "s", "messages": [{"role": "system", "content": "t"}, USER, ASSISTANT]},
            "has a system column and a different system message; remove one of them",
        ),
        (
            json.loads(r'{"prompt": "a \ud800 b", "completion": "c"}'),
            r"prompt: contains an unpaired surrogate \(\\ud800\); fix or remove",
        ),
        (json.loads(r'{"text": "\udfff"}'), r"text: contains an unpaired surrogate \(\\udfff\)"),
        (
            {"messages": r'[{"role": "user", "content": "\ud800"}]'},
            r"messages: .*unpaired surrogate \(\\ud800\)",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "a pair of answers .*prompt, chosen, rejected.*use --objective DPO.*as examples",
        ),
        ({"messages": [{**USER, "name": "\ud83d"}]}, r"messages: contains an unpaired surrogate \(\\ud83d\)"),
    ],
)
def test_invalid_rows_raise_one_line_errors(row, message):
    with pytest.raises(UserError, match=f"^file line 7: .*{message}") as error:
        to_record(row, "file line 7")
    assert "\n" not in str(error.value) and not isinstance(error.value, EmptyAnswerError)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": " \n"},
        {"instruction": "q", "output": None},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"text": ""},
        {"prompt": "q", "completion": []},
    ],
)
def test_empty_answers_raise_their_own_error(row):
    with pytest.raises(EmptyAnswerError, match="^file line 7: .*empty"):
        to_record(row, "file line 7")


# ---- files


def read(path, kinds=JSON_KINDS, name="json_path"):
    """Return the splits of a path, each as a list of (position, row)."""
    splits = find_splits(str(path), f"--data.{name}", kinds)

    def rows(sources):
        return [(describe_row(source, number), row) for source in sources for number, row in source.rows()]

    return rows(splits.train), None if splits.val is None else rows(splits.val)


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_json_lines_are_read_with_line_numbers(tmp_path):
    path = write(tmp_path / "a.jsonl", '\ufeff{"text": "x\u2028y"}\n\n{"text": "z"}')
    expected = [(f"{path} line 1", {"text": "x\u2028y"}), (f"{path} line 3", {"text": "z"})]
    assert read(path) == (expected, None)
    assert read(path.rename(tmp_path / "a.json"))[0][1] == (f"{tmp_path}/a.json line 3", {"text": "z"})


def test_json_list_and_object_of_splits_are_read(tmp_path):
    rows = [{"text": "x"}, {"text": "y"}]
    path = write(tmp_path / "a.json", json.dumps(rows, indent=1))
    assert read(path) == ([(f"{path} row 1", rows[0]), (f"{path} row 2", rows[1])], None)
    for name in ("val", "validation", "test"):
        for indent in (None, 2):
            write(path, json.dumps({"train": rows, name: rows[:1]}, indent=indent))
            assert read(path)[1] == [(f"{path} {name} row 1", rows[0])]


def test_folder_splits_are_found(tmp_path):
    write(tmp_path / "train.json", [{"text": "x"}])
    assert read(tmp_path)[1] is None
    write(tmp_path / "test.jsonl", '{"text": "t"}')
    assert read(tmp_path)[1] == [(f"{tmp_path}/test.jsonl line 1", {"text": "t"})]
    write(tmp_path / "val.jsonl", '{"text": "v"}')
    assert read(tmp_path)[1] == [(f"{tmp_path}/val.jsonl line 1", {"text": "v"})]
    notes = find_splits(str(tmp_path), "--data.json_path", JSON_KINDS).notes
    assert notes == (f"{tmp_path}: not read: test.jsonl (train is the training split, val is the validation split)",)


def test_unread_files_of_a_folder_are_reported(tmp_path):
    for name in ("train.jsonl", "dev.jsonl", "more.JSON", "train.csv", "notes.txt", "trainer.json", ".hidden.json"):
        write(tmp_path / name, '{"text": "x"}')
    (tmp_path / "old.jsonl").mkdir()
    (note,) = find_splits(str(tmp_path), "--data.json_path", JSON_KINDS).notes
    files = "dev.jsonl, more.JSON, train.csv, trainer.json"
    assert note == f"{tmp_path}: not read: {files} (train is the training split; name the validation split val)"
    for i in range(20):
        write(tmp_path / f"a{i:02}.jsonl", '{"text": "x"}')
    (note,) = find_splits(str(tmp_path), "--data.json_path", JSON_KINDS).notes
    assert "not read: a00.jsonl, a01.jsonl, a02.jsonl, a03.jsonl, a04.jsonl and 19 more (" in note


@pytest.mark.parametrize(
    "names",
    [
        ("train.json", "train.jsonl"),
        ("train.jsonl", "train-00000.jsonl"),
        ("train-0.json", "train-1.jsonl"),
        ("val.ndjson", "val.jsonl"),
    ],
)
def test_folder_files_that_may_be_duplicates_are_an_error(tmp_path, names):
    write(tmp_path / "train.jsonl", '{"text": "x"}')
    if names[0].startswith("train"):
        (tmp_path / "train.jsonl").unlink()
    for name in names:
        write(tmp_path / name, '{"text": "x"}')
    with pytest.raises(UserError, match=r"^--data.json_path .*: the folder has ") as error:
        read(tmp_path)
    assert all(f" {name}" in str(error.value) for name in names) and "remove one" in str(error.value)


def test_rows_beyond_the_bound_are_refused_with_their_place(tmp_path):
    row = b'{"prompt": "a", "completion": "b"}\n'
    for name, content, message in (
        ("rows.jsonl", row + b"x" * (MAX_ROW + 9), r"rows.jsonl byte 35: line longer than 67,108,864 bytes"),
        ("rows.csv", b"prompt,completion\na,b\n" + b"x" * (MAX_ROW + 9), "rows.csv byte 22: line longer than"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            list(RowFile(tmp_path / name, name[5:], "--data").rows())
    with open(tmp_path / "rows.json", "wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(UserError, match=r"rows.json: more than 1,073,741,824 bytes.*write a row per line"):
        list(RowFile(tmp_path / "rows.json", "json", "--data").rows())


def test_many_columns_take_linear_time(tmp_path):
    (tmp_path / "wide.csv").write_text(",".join(f"c{i}" for i in range(100_000)) + "\n" + "," * 99_999 + "\n")
    started = time.process_time()
    assert len(next(RowFile(tmp_path / "wide.csv", "csv", "--data").rows())[1]) == 100_000
    assert time.process_time() - started < 20  # quadratic: minutes


def test_csv_cells_may_span_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'prompt,completion\nq,"two\nlines"\n\n"x, y",z\n')  # with an empty line
    rows, _ = read(path, CSV_KINDS, "csv_path")
    first, second = {"prompt": "q", "completion": "two\nlines"}, {"prompt": "x, y", "completion": "z"}
    assert rows == [(f"{path} line 2", first), (f"{path} line 5", second)]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))  # the format of spreadsheet exports
    assert read(path, CSV_KINDS, "csv_path")[0] == rows
    write(path, f'text\n"{"x" * 200_000}"\n')  # above csv's default limit
    assert len(read(path, CSV_KINDS, "csv_path")[0][0][1]["text"]) == 200_000


def test_parquet_in_parts(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part, rows in enumerate([[{"messages": [USER, ASSISTANT]}], [{"messages": [USER]}]]):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"train-0000{part}-of-00002.parquet")
    rows, val = read(tmp_path, PARQUET_KINDS, "parquet_path")
    assert [row["messages"] for _, row in rows] == [[USER, ASSISTANT], [USER]] and val is None
    (tmp_path / "train-00001-of-00002.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="train-00001-of-00002.parquet: is not a valid Parquet file") as error:
        read(tmp_path, PARQUET_KINDS, "parquet_path")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a.jsonl line 2: invalid JSON: Expecting value at column \d+$"),
        (
            "a.jsonl",
            '{"text": "x"}\n{"text": "y", "text": "z"}',
            "line 2: invalid JSON: duplicate key text; remove one",
        ),
        ("a.json", '[{"messages": [{"role": "user", "role": "x"}]}]', "a.json is invalid JSON: duplicate key role"),
        ("a.jsonl", '[\n{"text": "x"}\n]', "line 1: invalid JSON: .* must end in .json$"),
        (
            "a.json",
            '[{"text": "x"},\n{"text" "y"}]',
            "json line 2: invalid JSON: Expecting ':' delimiter at column 9",
        ),
        ("a.jsonl", "\n\n", r"^--data.json_path .*a.jsonl: .* contains no rows"),
        ("a.jsonl", "", "contains no text"),
        ("a.json", "", r"a.json\b.* contains no"),
        ("a.json", "[]", "contains no rows"),
        ("a.json", '{\n"data": []}', r'must contain a list of rows, or {"train": \[...\], "val": \[...\]}'),
        ("a.json", '{"train": [],\n"val": 3}', r'^--data.json_path .*a.json must contain a list of rows, or {"train"'),
        ("a.json", '{"train": "x"}', "a.json must contain a list of rows"),
        ("a.json", '{"train": {},\n"val": []}', "a.json must contain a list of rows"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", '{"a":' * 100_000, "nested too deeply"),
        ("a.jsonl", '{"text": "x"}\n{"text": "x", "id": ' + LONG + "}", "a.jsonl line 2: .* has 5000 digits"),
        ("a.json", '[{"text": "x"},\n{"n": -' + LONG + "}]", "a.json is invalid JSON: .* has 5000 digits"),
        (
            "a.json",
            '[{"text": "' + LONG * 2 + '"},\n{"n": ' + LONG + "}]",
            "a.json is invalid JSON: .* has 5000 digits",
        ),
        ("a.txt", "x", r"^--data.json_path .*a.txt: must end in .json or .jsonl or .ndjson; "),
        ("a.csv", "x", "must end in .*; use --data CSV --data.csv_path .*a.csv$"),
        ("missing.json", None, r"^--data.json_path .*missing.json: no such file or folder"),
        ("b", None, "no such file or folder"),
    ],
)
def test_invalid_json_files_raise_one_line_errors(tmp_path, name, content, message):
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(UserError, match=message) as error:
        splits = find_splits(str(tmp_path / name), "--data.json_path", JSON_KINDS)
        for source in splits.train:
            source.fingerprint()
            list(source.rows())
    assert "\n" not in str(error.value)


def test_deeply_nested_rows_raise_one_line_errors():
    for depth in range(800, 1000):  # from depths that can be read and written to depths that cannot be read
        try:
            tools = json.loads('[{"a":' + "[" * depth + "]" * depth + "}]")
        except RecursionError:  # the reader handles this
            break
        with contextlib.suppress(UserError):
            to_record({"prompt": "q", "completion": "a", "tools": tools}, "file line 1")


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    for path, name, kinds in ((tmp_path / "rows.jsonl", "json_path", JSON_KINDS), ("/dev/zero", "csv_path", CSV_KINDS)):
        with pytest.raises(UserError, match=f"--data.{name} .*: not a regular file"):
            find_splits(str(path), f"--data.{name}", kinds)


def test_non_utf8_files_are_an_error(tmp_path):
    for name, kinds in (("a.json", JSON_KINDS), ("b.jsonl", JSON_KINDS), ("c.csv", CSV_KINDS)):
        (tmp_path / name).write_bytes(b'[{"text": "caf\xe9"}]')
        with pytest.raises(UserError, match=f"{name}.* is not UTF-8 text"):
            read(tmp_path / name, kinds)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n1\n", "a.csv line 3: invalid CSV: 1 cells, but the header has 2; quote"),
        ("a,b\n1,2,3\n", "a.csv line 2: invalid CSV: 3 cells, but the header has 2; quote"),
        ("a,a\n1,2\n", "a.csv line 1: invalid CSV: duplicate column a; rename one"),
        ('a,b\n1,"2\n', "a.csv line 2: invalid CSV"),
        ("a,b\n", "contains no rows"),
        (
            "prompt;completion\nq;a\n",
            "a.csv line 1: invalid CSV: columns are separated by ';'; separate them by commas",
        ),
        ("prompt\tcompletion\nq\ta\n", r"a.csv line 1: invalid CSV: columns are separated by '.t'"),
    ],
)
def test_invalid_csv_files_are_an_error(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        read(write(tmp_path / "a.csv", content), CSV_KINDS, "csv_path")


def test_folder_without_training_rows_is_an_error(tmp_path):
    write(tmp_path / "val.json", [{"text": "x"}])
    with pytest.raises(UserError, match="the folder has no train.json or train.jsonl or train.ndjson"):
        read(tmp_path)
    write(tmp_path / "train.json", {"train": [], "val": []})
    with pytest.raises(UserError, match="contains splits itself"):
        read(tmp_path)


def test_missing_extras_are_named(tmp_path, monkeypatch):
    import sys

    from toolkit.data.sft.datasets import load_hub_split

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(UserError, match=r"^--data: Parquet and zstd: needs pyarrow; run: pip install 'pyarrow"):
        read(tmp_path / "a.parquet", PARQUET_KINDS)
    with pytest.raises(UserError, match=r"pip install 'datasets"):
        load_hub_split("x", None, "train", "--data.repo_id x")


def test_hub_that_cannot_be_reached_is_one_line_at_once(monkeypatch):
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    from toolkit.data.sft.datasets import load_hub_split

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(UserError, match=r"--data.repo_id no/such: no download from http://127.0.0.1:9 .*; check the"):
        load_hub_split("no/such", None, "train", "--data Alpaca")
    assert not waits, "waited to try again"


def test_rows_of_tables_have_no_fields_of_other_rows(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    calls = [{"city": "Rome"}, {"days": [1, 2]}]
    rows = [{"messages": [{**USER, "tool_calls": [{"arguments": args}]}], "tools": [args]} for args in calls]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (file,) = find_splits(str(tmp_path / "a.parquet"), "--data.parquet_path", PARQUET_KINDS).train
    assert [row for _, row in file.rows()] == rows
    assert [row for _, row in HubRows(datasets.Dataset.from_list(rows), "a").rows()] == rows


def test_a_row_without_the_column_of_its_kind_is_one_line():
    for kind, row in (("labeled", {"text": "a"}), ("labeled", {"label": 1}), ("unlabeled", {"label": 1})):
        with pytest.raises(UserError, match=r"row 1: has no column (text|label) \(.*_column\); it has (text|label)"):
            parse_row(row, "row 1", kind=kind)
