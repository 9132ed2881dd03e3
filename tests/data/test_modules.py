import hashlib
import subprocess
import sys
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from helpers.cases import check_each
from helpers.damage import edit_json

import toolkit.data
from toolkit.data import CharText, HuggingFaceText, LitData, PythonStdlib, SyntheticTokens, TextFiles
from toolkit.data.text import python_stdlib
from toolkit.data.tokens.token_store import TokenWriter
from toolkit.errors import UserError
from toolkit.training.hyperparameters import keep_old_ends


def test_data_modules_import_and_prepare_text_without_heavy_libraries(corpus, tmp_path):
    code = """
import sys, toolkit.data
toolkit.data.TextFiles("x"), toolkit.data.PythonStdlib(), toolkit.data.LitData("x"), toolkit.data.SyntheticTokens()
print([name for name in ("torch", "litdata", "tokenizers", "numpy", "lightning.fabric") if name in sys.modules])
corpus, cache = sys.argv[1:]
toolkit.data.TextFiles(corpus, cache_dir=cache).prepare(tokenizer=None, max_seq_length=16, report=lambda line: None)
print([name for name in ("torch", "litdata", "lightning.fabric") if name in sys.modules])
"""
    words = [sys.executable, "-c", code, str(corpus), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["[]", "[]", ""]


def test_options_have_the_same_default_in_all_modules():
    """jsonargparse carries the defaults of the default module over to the module of --data."""
    defaults = {}
    for module in (getattr(toolkit.data, name) for name in toolkit.data.CLASSES):
        if issubclass(module, HuggingFaceText):
            continue
        for option in (option for option in fields(module) if option.default is not MISSING):
            assert defaults.setdefault(option.name, option.default) == option.default, option.name


def test_s5_the_default_vocabulary_has_the_key_of_its_value(corpus, tmp_path):
    cache = {"cache_dir": str(tmp_path)}

    def check(module, **options):
        keys = [
            module(**options, **size).prepare(tokenizer=None, max_seq_length=16, report=lambda line: None).content_key
            for size in ({}, {"vocab_size": 4096}, {"vocab_size": 300})
        ]
        assert keys[0] == keys[1] != keys[2]

    check_each(lambda module, options: check(module, **options), [
        (TextFiles, {"train_data_path": str(corpus), **cache}),
        (HuggingFaceText, {"path": str(corpus), "val_rows": 0, **cache}),
        (SyntheticTokens, {}),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextFiles("x", vocab_size=256), "--data.vocab_size 256"),
        (lambda: TextFiles("x", val_fraction=1.0), "--data.val_fraction 1.0"),
        (lambda: TextFiles("x", val_fraction=-0.1), "--data.val_fraction -0.1"),
        (lambda: TextFiles("x", val_fraction=0.1, val_data_path="y"), "not supported with --data.val_data_path"),
        (lambda: TextFiles("x", num_workers=-1), "--data.num_workers -1"),
        (lambda: CharText("x", block_size=0), "--data.block_size 0"),
        (lambda: CharText("x", train_split=0), "--data.train_split 0"),
        (lambda: CharText("x", truncate=1.1), "--data.truncate 1.1"),
        (lambda: PythonStdlib(vocab_size=10), "--data.vocab_size 10"),
        (lambda: PythonStdlib(val_fraction=2), "--data.val_fraction 2"),
        (lambda: LitData("x", num_workers=-1), "--data.num_workers -1"),
        (lambda: SyntheticTokens(vocab_size=0), "--data.vocab_size 0"),
        (lambda: SyntheticTokens(num_rows=0), "--data.num_rows 0"),
        (lambda: SyntheticTokens(seed=-1), "--data.seed -1"),
    ],
)
def test_invalid_options_raise_one_line_errors(make, message):
    with pytest.raises(UserError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_python_stdlib_selects_source_files():
    found = python_stdlib.find_sources()
    names = {"/".join(p.parts[-2:]) for p in found}
    assert any(name.endswith("/argparse.py") for name in names) and "json/decoder.py" in names
    parts = {part for p in found for part in p.parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
    assert not any(p.name.startswith("_sysconfigdata") for p in found)  # contains machine paths
    assert 4e6 < sum(p.stat().st_size for p in found) < 20e6
    assert found == sorted(found) == python_stdlib.find_sources()


def test_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match="--data PythonStdlib: no Python source"):
        PythonStdlib().prepare(tokenizer=None, max_seq_length=8)


def test_undecodable_sources_are_skipped(monkeypatch, tmp_path):
    (tmp_path / "good.py").write_text("x = 1")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda _: str(tmp_path))
    assert [p.name for p in python_stdlib.find_sources()] == ["good.py"]


def test_synthetic_tokens_are_a_pure_function_of_the_row():
    data, same, other = (
        SyntheticTokens(vocab_size=50, num_rows=10, seed=s).prepare(
            tokenizer=None, max_seq_length=16, report=lambda _: None
        )
        for s in (1, 1, 2)
    )
    assert len(data.train) == 10 and data.vocab_size == 50 and data.val is None and data.tokenizer is None
    row = data.train[7]
    assert row["input_ids"].shape == row["labels"].shape == (16,)
    assert torch.equal(row["input_ids"][1:], row["labels"][:-1]) and row["input_ids"].max() < 50
    assert torch.equal(row["input_ids"], same.train[7]["input_ids"]) and data.content_key == same.content_key
    assert not torch.equal(row["input_ids"], other.train[7]["input_ids"]) and data.content_key != other.content_key
    assert not torch.equal(row["input_ids"], data.train[6]["input_ids"])
    with pytest.raises(IndexError):
        data.train[10]


@pytest.fixture
def prepared(corpus, tmp_path):
    """Return a folder of prepare_data, and its data."""
    module = TextFiles(str(corpus), cache_dir=str(tmp_path), vocab_size=300)
    data = module.prepare(tokenizer=None, max_seq_length=32, report=lambda _: None)
    return next(tmp_path.glob("text_files-*")), data


@pytest.fixture
def plain(prepared, tmp_path):
    """Return a folder of LitData's own with the same rows, without checksums, and the data."""
    data = prepared[1]
    for name, rows in (("train", data.train), ("val", data.val)):
        writer = TokenWriter(tmp_path / name, np.uint16)
        writer.add(rows.store.tokens(rows.start, rows.start + rows.n_tokens))
        writer.finish()
        (tmp_path / name / "tokens" / "crc32.npy").unlink()
        (tmp_path / "plain").mkdir(exist_ok=True)
        (tmp_path / name / "tokens").rename(tmp_path / "plain" / name)
    return tmp_path / "plain", data


def test_litdata_reads_prepared_and_plain_chunks(prepared, plain):
    folder, data = prepared
    for path in (folder, plain[0]):
        lines = []
        again = LitData(str(path)).prepare(tokenizer=data.tokenizer, max_seq_length=32, report=lines.append)
        assert len(again.train) == len(data.train) and len(again.val) == len(data.val)
        for split, i in (("train", 3), ("val", -1)):
            i %= len(getattr(data, split))
            assert torch.equal(getattr(again, split)[i]["labels"], getattr(data, split)[i]["labels"])
        assert f"{data.train.tail_tokens + data.val.tail_tokens} leftover tokens at chunk ends" in lines[-1]
        assert any("not verified" in line for line in lines) == (path is not folder)
        assert again.vocab_size <= data.tokenizer.vocab_size and data.vocab_size is None
    for path, has_tokenizer in ((folder / "tokens", False), (folder, True)):
        alone = LitData(str(path), split_names=None).prepare(tokenizer=None, max_seq_length=32, report=lines.append)
        assert len(alone.train) == data.train.store.n_tokens // 33 and alone.val is None
        assert (alone.tokenizer and alone.tokenizer.files) == (data.tokenizer.files if has_tokenizer else None)
        assert alone.content_key != again.content_key
    resumed = LitData(str(folder))
    keep_old_ends(resumed)  # the model of an older run has the vocabulary of the tokens
    assert resumed.prepare(tokenizer=None, max_seq_length=32, report=lines.append).tokenizer is None


def test_s2_key_of_plain_chunks_is_that_of_earlier_versions(plain):
    """A run from before the store can be resumed: SHA-256 of T + 1, and of the index and the tokens of each split."""
    expected = hashlib.sha256(b"33")
    for name in ("train", "val"):
        tokens = (plain[0] / name / "chunk-0-0.bin").read_bytes()[12:]  # after the header of one item
        expected.update(hashlib.sha256((plain[0] / name / "index.json").read_bytes() + tokens).digest())
    found = LitData(str(plain[0])).prepare(tokenizer=None, max_seq_length=32, report=lambda _: None)
    assert found.content_key == expected.hexdigest()


def test_litdata_without_held_out_tokens(corpus, tmp_path):
    module = TextFiles(str(corpus), cache_dir=str(tmp_path), vocab_size=300, val_fraction=0.0)
    data = module.prepare(tokenizer=None, max_seq_length=32, report=lambda _: None)
    again = LitData(str(next(tmp_path.glob("text_files-*"))))
    again = again.prepare(tokenizer=None, max_seq_length=32, report=lambda _: None)
    assert again.val is None and len(again.train) == len(data.train)


def litdata_error(path, tokenizer=None, max_seq_length=32, **options) -> str:
    with pytest.raises(UserError) as error:
        LitData(str(path), **options).prepare(tokenizer=tokenizer, max_seq_length=max_seq_length)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_s4_hostile_index_is_refused(plain):
    folder, _ = plain
    edit_json(folder / "train/index.json", lambda index: index["chunks"][0].update(filename="../val/chunk-0-0.bin"))
    assert "only plain file names" in litdata_error(folder)


def test_litdata_errors_are_one_line(prepared, plain, tmp_path):
    folder, _ = plain
    assert litdata_error(tmp_path / "nowhere").startswith(f"--data.data_path {tmp_path}/nowhere: no folder")
    assert "see --data.split_names" in litdata_error(folder, split_names=("train", "validation"))
    assert "contains no index.json" in litdata_error(folder, split_names=None)
    with open(folder / "index.json", "wb") as file:
        file.truncate(2**26 + 1)
    message = "index.json is not an index of LitData chunks: index.json: larger than 67,108,864 bytes"
    assert message in litdata_error(folder, split_names=None)
    assert "has a row of 1,000,001 tokens" in litdata_error(folder, max_seq_length=10**6)
    (folder / "train" / "index.json").write_text("{")
    assert "not an index" in litdata_error(folder)
    (prepared[0] / "checksums.json").unlink()
    assert "is damaged (checksums.json is missing); prepare it again" in litdata_error(prepared[0])


def test_litdata_detects_a_different_tokenizer(prepared):
    from toolkit.data.tokenizer import train_bpe

    folder, _ = prepared
    small = train_bpe(["text"], 257)
    assert "made with another tokenizer" in litdata_error(folder, tokenizer=small)


@pytest.mark.parametrize("split", ["train", "val"])
def test_s5_litdata_reads_all_chunks_for_its_key_and_vocabulary(plain, split):
    folder, data = plain

    def prepare(tokenizer=None):
        return LitData(str(folder)).prepare(tokenizer=tokenizer, max_seq_length=32, report=lambda _: None)

    before = prepare(data.tokenizer)
    assert before.vocab_size <= data.tokenizer.vocab_size
    chunk = folder / split / "chunk-0-0.bin"
    content = bytearray(chunk.read_bytes())
    content[-2:] = (999).to_bytes(2, "little")  # uint16
    chunk.write_bytes(content)
    after = prepare()
    assert after.vocab_size == 1000 and after.content_key != before.content_key
    with pytest.raises(UserError, match="contains token 999"):
        prepare(data.tokenizer)
