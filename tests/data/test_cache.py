"""The cache of prepared data (S5), which text and instruction data share: hits, keys, damage, failures."""

import errno
import json
import os
import shutil
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from helpers.cases import check_each
from helpers.damage import edit_json, flip

from toolkit.data import JSON, TextFiles, cache
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError

ROWS = [{"prompt": f"question {i}", "completion": f"answer {i} " + "word " * (i * 7 % 23)} for i in range(60)]
CHUNK = "tokens/chunk-0-0.bin"
DAMAGE = {
    "manifest emptied": lambda f: (f / "manifest.json").write_text(""),
    "manifest of another kind": lambda f: (f / "manifest.json").write_text("[]"),
    "manifest of other data": lambda f: edit_json(f / "manifest.json", lambda m: m.update(key="0" * 64)),
    "manifest missing": lambda f: (f / "manifest.json").unlink(),
    "chunk truncated": lambda f: os.truncate(f / CHUNK, 10),
    "chunk missing": lambda f: (f / CHUNK).unlink(),
    "a chunk that is a pipe": lambda f: ((f / CHUNK).unlink(), os.mkfifo(f / CHUNK)),
    "a low bit of a token": lambda f: flip(f / CHUNK, 100),
    "a high byte of a token": lambda f: flip(f / CHUNK, -1, 0xFF),
    "index changed": lambda f: edit_json(f / "tokens/index.json", lambda index: index["chunks"].append(1)),
    "a checksum changed": lambda f: edit_json(
        f / "checksums.json", lambda sums: sums["files"][CHUNK].update(crc32=["0"])
    ),
    "checksums missing": lambda f: (f / "checksums.json").unlink(),
    "checksums of another kind": lambda f: (f / "checksums.json").write_text("[]"),
    "everything missing": lambda f: (shutil.rmtree(f), f.mkdir()),
}
TEXT_DAMAGE = {
    "manifest without splits": lambda f: edit_json(f / "manifest.json", lambda m: m["splits"].pop("val")),
    "manifest with an invalid split": lambda f: edit_json(f / "manifest.json", lambda m: m["splits"].update(train=3)),
    "manifest with other counts": lambda f: edit_json(
        f / "manifest.json", lambda m: m["splits"].update(train=[0, 10**9])
    ),
    "tokenizer missing": lambda f: shutil.rmtree(f / "tokenizer"),
    "tokenizer changed": lambda f: (f / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "a"}'),
}
JSON_DAMAGE = {
    "manifest without counts": lambda f: edit_json(f / "manifest.json", lambda m: m.pop("facts")),
    "a count changed": lambda f: edit_json(f / "manifest.json", lambda m: m["facts"].update(samples=3)),
    "one label changed": lambda f: flip(f / "loss_mask/chunk-0-0.bin", -3),
    "one row changed": lambda f: flip(f / "rows.npz", -3),
    "rows missing": lambda f: (f / "rows.npz").unlink(),
}


class Case(NamedTuple):
    """A data module. ``changes``: options that each give other data; ``edited`` has changed one word of a file."""

    module: type
    options: dict
    changes: tuple[dict, ...]
    edited: tuple[str, str, str]
    code: str
    damage: dict


CASES = {
    "text": Case(
        TextFiles, {"vocab_size": 300},
        ({"tokenizer": None, "vocab_size": 301}, {"val_fraction": 0.1}, {"val_fraction": 0.0}, {"tokenizer": "other"},
         {"tokenizer": None, "vocab_size": "characters"}, {"text_fraction": 0.5}),
        ("part03.txt", "model", "modal"), "text.prepare_text", TEXT_DAMAGE,
    ),
    "instructions": Case(
        JSON, {"val_split_fraction": 0.2},
        ({"max_seq_length": 80}, {"prompt_style": "alpaca"}, {"train_on": "all"}, {"packing": "best_fit"},
         {"val_split_fraction": 0.1}, {"max_seq_length": 80, "on_long": "drop"},
         {"max_seq_length": 80, "on_long": "split"}, {"tokenizer": "plain", "prompt_style": "chatml"}),
        ("rows.jsonl", "answer 59", "another answer"), "sft.prepare_sft", JSON_DAMAGE,
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def source(case, corpus, tmp_path):
    """A folder of text, or a file of rows."""
    if case.module is TextFiles:
        return shutil.copytree(corpus, tmp_path / "source")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def prepare(case, source, tokenizer, plain, tmp_path):
    """Return a function that prepares the data in a private cache and returns the data and its log lines."""
    tokenizers = {"chat": tokenizer, "plain": plain, None: None}

    def run(path=source, tokenizer="chat", max_seq_length=200, **options):
        lines = []
        if tokenizer == "other":
            tokenizers[tokenizer] = train_bpe(["other text, another tokenizer " * 50], 280)
        module = case.module(str(path), **{"cache_dir": str(tmp_path / "cache"), **case.options, **options})
        active = tokenizers[tokenizer]
        data = module.prepare(tokenizer=active, max_seq_length=max_seq_length, report=lines.append)
        return data, " | ".join(lines)

    return run


def content(data):
    splits = [rows for rows in (data.train, data.val) if rows is not None]
    return [[{n: v.tolist() for n, v in rows[i].items()} for i in range(len(rows))] for rows in splits]


def folders(path):
    return sorted(file.name for file in path.iterdir())


def test_s5_miss_then_hit(case, prepare, tmp_path):
    first, log = prepare()
    assert "preparing" in log and "not prepared yet" in log and "using cached" not in log
    again, log = prepare()
    assert "using cached" in log and "preparing" not in log and again.summary == first.summary
    assert again.content_key == first.content_key and content(again) == content(first)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    (folder,) = (tmp_path / "cache").iterdir()
    if case.module is TextFiles:
        assert folders(folder) == ["checksums.json", "content_keys", "manifest.json", "tokenizer", "tokens"]
    else:
        assert folders(folder) == ["checksums.json", "loss_mask", "manifest.json", "rows.npz", "tokens"]
        assert folder.name.startswith("json-") and "end of turn" in log


def test_s5_every_input_changes_the_key(case, prepare, source, tmp_path, monkeypatch):
    keys = [prepare()[0].content_key]
    for change in case.changes:
        data, log = prepare(**change)
        assert "preparing" in log, change
        keys.append(data.content_key)
    name, old, new = case.edited
    file = source / name if source.is_dir() else source
    file.write_text(file.read_text().replace(old, new, 1))
    data, log = prepare()
    assert "preparing" in log
    keys.append(data.content_key)
    assert len(set(keys)) == len(keys) == len(folders(tmp_path / "cache"))
    monkeypatch.setattr(f"toolkit.data.{case.code}.CODE_VERSION", 10**6)
    assert "preparing" in prepare()[1]


def test_s5_moved_and_renamed_files_hit_the_cache(prepare, source, tmp_path):
    first = prepare()[0]
    moved = shutil.move(source, tmp_path / "elsewhere.jsonl")
    for i, file in enumerate(sorted(moved.glob("*"), reverse=True)):
        os.utime(file.rename(moved / f"{i}.md"), (i, i))
    data, log = prepare(moved)
    assert "using cached" in log and data.content_key == first.content_key
    if moved.is_file():
        assert data.train.where(4)[0].startswith(f"{moved} line ")


def test_s5_damaged_cache_is_rebuilt(case, prepare, source, tmp_path):
    if source.is_file():
        source.write_text("".join(source.read_text().splitlines(True)[:4]))
    first = prepare()[0]
    (folder,), expected, damage = (tmp_path / "cache").iterdir(), content(first), DAMAGE | case.damage

    def check(name):
        damage[name](folder)
        again, log = prepare()
        assert "preparing" in log and "damaged" in log
        assert again.content_key == first.content_key and content(again) == expected
        assert folders(tmp_path / "cache") == [folder.name] and "using cached" in prepare()[1]

    check_each(check, damage)


def test_s5_slower_process_uses_the_published_data(prepare, tmp_path, monkeypatch):
    publish, quicker = cache.publish, []

    def publish_second(*args):
        if not quicker:
            quicker.append(True)
            quicker.append(prepare()[0])  # another process runs to completion first
        publish(*args)

    monkeypatch.setattr(cache, "publish", publish_second)
    assert prepare()[0].content_key == quicker[1].content_key and len(folders(tmp_path / "cache")) == 1


def test_failed_preparation_leaves_no_files(prepare, tmp_path, monkeypatch):
    for error, message in (
        (OSError(errno.ENOSPC, "No space left on device"), r"--data.cache_dir .*: No space left on device"),
        (UserError("line 2: is wrong"), "^line 2: is wrong"),
    ):
        monkeypatch.setattr("toolkit.data.tokens.token_store._ArrayWriter", Mock(side_effect=error))
        with pytest.raises(UserError, match=message):
            prepare()
        assert folders(tmp_path / "cache") == []


def test_unwritable_cache_is_an_error(prepare, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=rf"--data.cache_dir {path}: cannot be used: "):
            prepare(cache_dir=str(path))


def test_default_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.choose_cache_dir() == tmp_path / "toolkit" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.choose_cache_dir() == tmp_path / ".cache" / "toolkit" / "data"
