"""Rows come in by one way: every column that a schema knows is used, refused or named, by every module and metric."""

import ast
import importlib
import json
import pkgutil
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cases import check_each
from toolkit_metric.entries import METRICS
from toolkit_metric.prompts import prompt_template, read_prompts

import toolkit
from toolkit.config.classes import classes_of
from toolkit.data import JSON
from toolkit.data.base import DataModule
from toolkit.data.sft import prepare_sft as preparation
from toolkit.data.sft.readers import Splits
from toolkit.data.sft.schemas import KNOWN_COLUMNS, parse_row
from toolkit.dotted_paths import import_object
from toolkit.errors import UserError
from toolkit.extension import is_built_in, registered

GATE = ("schemas.py", "messages.py")
REPOSITORY = Path(toolkit.__file__).parents[1]
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
BASES = {
    "answers": [{"prompt": "q", "completion": "a"}, {"messages": [USER, ANSWER]}, {"text": "words"}],
    "pairs": [PAIR, {"chosen": "one two", "rejected": "one three"}],
    "rated": [{"prompt": "q", "completion": "a", "label": True}, PAIR],
    "compared": [PAIR],
    "compared_tokens": [PAIR],
    "labeled": [{"text": "words", "label": "x"}, {"messages": [USER, ANSWER], "label": "y"}],
    "unlabeled": [{"text": "words"}, {"messages": [USER, ANSWER]}],
    "prompt": [{"prompt": "q"}, {"prompt": "q", "completion": "a"}, {"messages": [USER]}, PAIR],
}
VALUES = dict.fromkeys(["messages", "conversations"], [USER, {**ANSWER, "content": "other"}])
VALUES |= {"tools": [{"name": "f"}], "history": [["a", "b"]], "margin": 2, "choices": ["a", "b"], "weight": 0.0}
SOURCES = (str(REPOSITORY / "toolkit"), str(REPOSITORY / "extensions"), __file__)
COLUMNS = [*KNOWN_COLUMNS, "weight", "id", "image", "functions"]


class Watched(dict):
    """A row that notes who reads its columns, outside of the gate."""

    def __init__(self, values, readers):
        super().__init__(values)
        self.readers = readers

    def _note(self, name):
        frame = sys._getframe(2)
        while frame and not frame.f_code.co_filename.startswith(SOURCES):
            frame = frame.f_back
        if Path(frame.f_code.co_filename).name not in GATE:
            self.readers.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name, name))


def watch(method, has_name):
    def call(self, *args):
        self._note(args[0] if has_name else "*")
        return getattr(dict, method)(self, *args)

    setattr(Watched, method, call)


for _method in ("__getitem__", "get", "pop", "setdefault"):
    watch(_method, True)
for _method in ("__iter__", "items", "values", "__or__", "__ror__", "copy"):
    watch(_method, False)


class Source(SimpleNamespace):
    name, unit = "rows", "line"

    def rows(self):
        return ((i, Watched(row, self.readers)) for i, row in enumerate(self.values, 1))

    def fingerprint(self):
        return repr(self.values)

    def class_names(self):
        return {}


def subclasses(cls):
    return {cls, *(lower for child in cls.__subclasses__() for lower in subclasses(child))}


def modules_with_rows():
    """Import all of toolkit.data, and return every data module of it that finds rows."""
    for module in pkgutil.walk_packages(importlib.import_module("toolkit.data").__path__, "toolkit.data."):
        importlib.import_module(module.name)
    classes_of(DataModule)  # also of built-in extensions
    found = {cls for cls in subclasses(DataModule) if is_built_in(cls)}
    return sorted(filter(lambda cls: hasattr(cls, "find_rows"), found), key=lambda cls: cls.__name__)


def make(cls, rows, tmp_path):
    """Return a data module with these rows, and the set of their readers outside of the gate."""
    readers = set()
    source = Source(values=rows, readers=readers)
    finds = {"find_rows": lambda self: ("--data.path rows", Splits([source]))}
    required = {f.name: "rows" for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if "path" in (names := {f.name for f in fields(cls)}):
        required["path"] = "rows"
    data = type(cls.__name__, (cls,), finds)(**required, cache_dir=str(tmp_path), val_split_fraction=0.0)
    assert "cache_dir" in names
    return data, readers


def kinds_of(cls):
    kinds = {"Classification": ["labeled"], "Preference": ["pairs", "rated", "compared", "compared_tokens"]}
    return kinds.get(cls.__name__, ["answers"])


def outcome(parse, base, column):
    """Return what happens to a column: used, refused or named; None if nothing."""
    (plain, *_) = parse(base, "line 1")
    try:
        (record, *_) = parse(base | {column: VALUES.get(column, "value")}, "line 1")
    except UserError as error:
        return "refused" if column in str(error) else None
    if column in record.unread:
        return "named"
    return "used" if replace(record, unread=plain.unread) != plain else None


def check_module(cls, tokenizer, tmp_path, monkeypatch):
    """Prepare rows with a module: all reads are the gate's, and every column is used, refused or named."""
    configs = []
    prepare = preparation.prepare_sft
    monkeypatch.setattr(
        preparation, "prepare_sft", lambda config, report: configs.append(config) or prepare(config, report)
    )
    for kind in kinds_of(cls):
        lines, rows = [], [row | {"id": 7, "weight": 0.0} for row in BASES[kind] * 2]
        data, readers = make(cls, rows, tmp_path)
        data.prepare(tokenizer=tokenizer, max_seq_length=300, report=lines.append, kind=kind)
        assert not readers, f"reads columns outside of schemas.py: {sorted(readers)}"
        assert configs, "does not prepare rows by prepare_rows"
        assert any("not read in training: id, weight" in line for line in lines), lines
        for base in BASES[kind]:
            for column in {*COLUMNS} - base.keys():
                assert outcome(configs[-1].parse, base, column), f"{kind}, {sorted(base)}: {column} has no effect"


def check_metric(path, argument):
    readers = set()
    rows = [Watched({"messages": [USER, ANSWER], "choices": ["a", "b"]}, readers)]
    function = import_object(path) if isinstance(path, str) else path
    if getattr(function, "needs_prompts", False):
        return  # gets no rows
    answers = [[0.0, 1.0]] if getattr(function, "needs_log_probs", False) else ["a"]
    function(answers, ["a"], rows, *filter(None, [argument]))
    read = {name for *_, name in readers} - ({"choices"} if getattr(function, "needs_log_probs", False) else set())
    assert not read or argument == "true", f"reads columns of rows: {sorted(read)}"  # check passes the row on


def rogue_lines(source):
    """Return the lines of code that read columns of rows that ``rows()`` or ``first_row()`` gave."""
    found = []
    if ".rows()" not in source and ".first_row()" not in source:
        return found
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        calls = {id(n) for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("rows", "first_row")}
        bound = [
            (n.target if hasattr(n, "target") else n.targets[0])
            for n in nodes
            if isinstance(n, ast.For | ast.comprehension | ast.Assign)
            and any(id(part) in calls for part in ast.walk(n.value if isinstance(n, ast.Assign) else n.iter))
        ]
        names = {part.id for target in bound for part in ast.walk(target) if isinstance(part, ast.Name)}
        for n in nodes:
            value = n.value if isinstance(n, ast.Subscript | ast.Attribute) else None
            is_key = isinstance(n, ast.Attribute) or (
                isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant) and isinstance(n.slice.value, str)
            )
            if isinstance(value, ast.Name) and value.id in names and is_key and "row" in value.id:
                found.append(n.lineno)
    return found


class RogueModule(JSON):
    def prepare(self, **options):
        _, splits = self.find_rows()
        for _, row in splits.train[0].rows():
            row.get("prompt")
        return super().prepare(**options)


class SilentModule(JSON):
    def prepare(self, **options):
        return None


def rogue_metric(answers, references, rows):
    return {"length": [len(row.get("messages", "")) for row in rows]}


ROGUE_COMMAND = """
def setup(source):
    for number, row in source.rows():
        print(row["text"], row.get("label"))
"""


def test_rows_have_one_way_in(tokenizer, tmp_path, monkeypatch):
    modules = modules_with_rows()
    assert {"JSON", "CSV", "Parquet", "HuggingFace", "Preference", "Classification", "LIMA"} <= {
        cls.__name__ for cls in modules
    }

    def check(cls):
        check_module(cls, tokenizer, tmp_path, monkeypatch)

    check_each(check, [cls for cls in modules if not cls.__abstractmethods__])
    paths = METRICS | {name: entry.path for name, entry in registered("metrics").items()}
    arguments = {"regex": "a", "check": "true", "reward": "folder"}
    check_each(check_metric, [(path, arguments.get(name)) for name, path in paths.items()])
    files = [*Path(toolkit.__file__).parent.rglob("*.py"), *(REPOSITORY / "extensions").rglob("toolkit_*/*.py")]
    sources = {path: path.read_text() for path in files if path.name not in GATE}
    assert not [path for path, source in sources.items() if rogue_lines(source)]
    with pytest.raises(AssertionError, match=r"RogueModule.*test_row_gate.py', 'prepare', 'prompt'") as error:
        check_each(check, [RogueModule, SilentModule])
    assert "SilentModule" in str(error.value)
    with pytest.raises(AssertionError, match=r"reads columns of rows: \['messages'\]"):
        check_metric(rogue_metric, None)
    assert rogue_lines(ROGUE_COMMAND) == [4, 4]


def test_columns_of_prompts_and_texts_are_used_refused_or_named(tokenizer, tmp_path):
    def check(kind, base, column):
        parsed = outcome(lambda row, where: parse_row(row, where, kind=kind), base, column)
        assert parsed, f"{column} has no effect"

    cases = [(kind, base) for kind in ("prompt", "unlabeled", "answers") for base in BASES[kind]]
    check_each(check, [(kind, base, column) for kind, base in cases for column in {*COLUMNS} - base.keys()])
    lines, path = [], tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"id": 7}) + "\n" for row in BASES["prompt"]))
    read_prompts(None, None, str(path), prompt_template(tokenizer), None, False, lines.append)
    assert lines == ["note: --eval.metric: not read in prompts: id"]
