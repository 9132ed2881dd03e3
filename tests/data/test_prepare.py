"""Text preparation and its cache (S5): the rows equal the text, and damaged or other data is never reused."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from helpers.damage import flip

from toolkit.data import LitData, PythonStdlib, TextFiles, cache
from toolkit.data.text import documents
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import DataError, UserError

T = 32


@pytest.fixture
def text(corpus, tmp_path):
    """A copy of the corpus that tests may edit."""
    return shutil.copytree(corpus, tmp_path / "text")


@pytest.fixture
def prepare(text, tmp_path):
    """Return a function that prepares the text in a private cache and returns the data and its log lines."""

    def run(tokenizer=None, max_seq_length=T, **options):
        lines = []
        options = {"train_data_path": str(text), "cache_dir": str(tmp_path / "cache"), "vocab_size": 300} | options
        data = TextFiles(**options).prepare(tokenizer=tokenizer, max_seq_length=max_seq_length, report=lines.append)
        return data, " | ".join(lines)

    return run


def all_tokens(rows) -> list[int]:
    """Return the concatenated tokens of all rows."""
    blocks = [rows[i] for i in range(len(rows))]
    return [t for row in blocks for t in (*row["input_ids"].tolist(), row["labels"][-1].item())]


def folders(cache):
    return sorted(p.name for p in cache.iterdir())


def test_s5_another_row_length_is_a_hit(prepare, tmp_path):
    """Rows of any length are blocks of the same tokens; each length has a content key, computed once."""
    first = prepare()[0]
    stream = all_tokens(first.train)
    for _ in range(2):
        data, log = prepare(max_seq_length=T + 9)
        assert "using cached" in log and "preparing" not in log and data.content_key != first.content_key
        tokens = all_tokens(data.train)
        assert len(tokens) > 1000 and tokens[: len(stream)] == stream[: len(tokens)]
    (folder,) = (tmp_path / "cache").iterdir()
    known = folder / "content_keys" / str(T + 10)
    for content in ("", "0" * 64):
        known.write_text(content)
        assert (prepare(max_seq_length=T + 9)[0].content_key == data.content_key) == (content == "")
    shutil.rmtree(folder / "content_keys")
    (folder / "content_keys").touch()  # cannot be written
    assert prepare()[0].content_key == first.content_key


def test_s2_rows_and_keys_equal_those_of_earlier_versions(tmp_path):
    """A run from before the format changed can be resumed: its checkpoints record this key."""
    for number in range(8):
        lines = (f"line {i * 31 % 97} of document {number}\n" for i in range(40 + number))
        (tmp_path / f"{number}.txt").write_text("".join(lines))
    for fraction, share, length, key, rows in (
        (0.05, 1.0, 32, "1aeaac17e6161bf2d7edcb24cf1b970c8f1a2f2ec93660565d31b68c186c3bb4", (219, 11)),
        (0.05, 1.0, 57, "a0be8a5f72b85865622c7d1c5d4bca38fd71a81c0fc6c95878695eb424defc4e", (125, 6)),
        (0.2, 0.5, 32, "6dded94bd9e1198c336cbc961fdf89cd8ecc67b7d389147b462c57fadee8c5b9", (92, 23)),
    ):
        module = TextFiles(
            f"{tmp_path}/*.txt", cache_dir=str(tmp_path / "c"), val_fraction=fraction, text_fraction=share
        )
        data = module.prepare(tokenizer=train_bpe(["x"], 257), max_seq_length=length, report=lambda _: None)
        assert (len(data.train), len(data.val)) == rows and data.content_key == key
    digest = hashlib.sha256(json.dumps([all_tokens(data.train), all_tokens(data.val)]).encode())
    assert digest.hexdigest() == "654a8d191c2422150ddbd91d974bf065aa3d9af8ac063f2a541a804785b441f4"


def test_s5_content_key_depends_only_on_the_rows(prepare):
    """A run resumed with the tokenizer of its checkpoint reads the same data."""
    first = prepare()[0]
    again, log = prepare(tokenizer=first.tokenizer)
    assert "preparing" in log and again.content_key == first.content_key


def test_s5_content_key_detects_a_single_token_change(prepare, text):
    by_bytes = train_bpe(["x"], 257)
    first = prepare(tokenizer=by_bytes)[0]
    file = text / "part03.txt"
    file.write_text(file.read_text().replace("m", "n", 1))
    second = prepare(tokenizer=by_bytes)[0]
    assert len(second.train) == len(first.train) and second.content_key != first.content_key


def test_text_fraction_is_the_start_of_the_text(prepare, corpus):
    data, log = prepare(text_fraction=0.5, vocab_size="characters", val_fraction=0.2)
    texts = sorted(corpus.iterdir(), key=lambda file: hashlib.sha256(file.read_bytes()).hexdigest())
    left, text = round(sum(file.stat().st_size for file in texts) * 0.5), ""
    for content in (file.read_text() for file in texts):
        text += content[:left] + ("<|endoftext|>" if len(content) <= left else "")
        left -= min(left, len(content))
    tokens = data.tokenizer.encode(text)
    n = data.train.store.n_tokens  # no more was tokenized
    assert n == len(tokens)
    n_train = n - int(n * 0.2)
    train, val = all_tokens(data.train), all_tokens(data.val)
    assert train == tokens[: len(train)] and val == tokens[n_train : n_train + len(val)]
    assert n_train - len(train) < T + 1 and n - n_train - len(val) < T + 1
    assert f"{data.tokenizer.vocab_size - 2} different characters" in log


def test_s7_damaged_file_is_named(prepare, tmp_path):
    prepare()
    (folder,) = (tmp_path / "cache").iterdir()
    flip(folder / "tokens" / "chunk-0-0.bin", 100)
    with pytest.raises(UserError, match="--data.data_path .* is damaged .*tokens/chunk-0-0.bin: checksum mismatch"):
        LitData(str(folder)).prepare(tokenizer=None, max_seq_length=T, report=print)
    assert re.search(r"preparing .*damaged \(tokens/chunk-0-0.bin: checksum mismatch", prepare()[1])
    LitData(str(folder)).prepare(tokenizer=None, max_seq_length=T, report=print)


def test_s7_large_data_is_verified_as_it_is_read(prepare, tmp_path, monkeypatch):
    """A run starts without reading the tokens; a damaged chunk is named when it is read."""
    monkeypatch.setattr(cache, "_LARGE_BYTES", 0)
    first = prepare()[0]
    expected = all_tokens(first.train)
    (folder,) = (tmp_path / "cache").iterdir()
    checked = []
    find_damage = cache.find_damage
    monkeypatch.setattr(cache, "find_damage", lambda f, files: checked.extend(files) or find_damage(f, files))
    flip(folder / "tokens" / "chunk-0-0.bin", -1)
    for module in (None, LitData(str(folder))):
        data = module.prepare(tokenizer=None, max_seq_length=T, report=print) if module else prepare()[0]
        assert not data.train.store.array._open  # no chunk was even opened
        with pytest.raises(DataError, match=f"tokens/chunk-0-0.bin: checksum mismatch .*; delete {folder} and prepare"):
            data.val[0]
    assert "manifest.json" in checked and not any(name.endswith(".bin") for name in checked)
    again, log = prepare(max_seq_length=T + 1)  # reads everything, once
    assert "damaged" in log and "preparing" in log
    assert all_tokens(prepare()[0].train) == expected and len(again.train) < len(first.train)
    (folder / "manifest.json").write_text("{}")
    assert "damaged (manifest.json" in prepare()[1]


def run_python(code: str, *args) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


PREPARE = """
    import sys
    from toolkit.data import TextFiles
    text, cache = sys.argv[1:3]
    def run():
        data = TextFiles(text, cache_dir=cache, vocab_size=300)
        return data.prepare(tokenizer=None, max_seq_length=32)
"""


@pytest.mark.slow
def test_s5_killed_preparation_is_never_reused(prepare, text, tmp_path):
    killed = (
        PREPARE
        + """
    import os, signal
    from toolkit.data.tokens.token_store import TokenWriter
    finish = TokenWriter.finish
    def finish_and_die(writer):
        finish(writer)
        os.kill(os.getpid(), signal.SIGKILL)
    TokenWriter.finish = finish_and_die
    run()
    """
    )
    process = run_python(killed, text, tmp_path / "cache")
    output = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output
    (leftover,) = folders(tmp_path / "cache")
    assert leftover.startswith(".tmp-")
    data, log = prepare()
    assert "preparing" in log and "not prepared yet" in log
    (folder,) = folders(tmp_path / "cache")  # leftovers are removed
    assert folder.startswith("text_files-") and len(data.train) > 0


@pytest.mark.slow
def test_s5_concurrent_preparations_agree(prepare, text, tmp_path):
    code = PREPARE + "    print(run().content_key)\n"
    processes = [run_python(code, text, tmp_path / "cache") for _ in range(2)]
    outputs = [p.communicate(timeout=60) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    data, log = prepare()
    assert "using cached" in log
    assert {out.split()[-1] for out, _ in outputs} == {data.content_key}
    assert len(folders(tmp_path / "cache")) == 1


def expected_stream(paths, tokenizer) -> list[int]:
    ordered = sorted((documents.fingerprint([p], "x")[0] for p in paths), key=lambda d: d.sha256)
    return [t for d in ordered for t in tokenizer.encode(d.path.read_bytes().decode(), bos=False, eos=True)]


@pytest.mark.parametrize("count", [1, 2, 12])
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.3])
def test_no_token_is_lost_or_duplicated(prepare, text, count, fraction):
    """The last x % of the tokens are held out, for any number of files; one eos per document."""
    files = sorted(text.iterdir())
    for file in files[count:]:
        file.unlink()
    data, log = prepare(val_fraction=fraction)
    stream = expected_stream(files[:count], data.tokenizer)
    assert stream.count(data.tokenizer.eos_id) == count
    cut = len(stream) - int(len(stream) * fraction)
    train, val = stream[:cut], stream[cut:]
    assert all_tokens(data.train) == train[: len(train) // (T + 1) * (T + 1)]
    tails = [len(train) % (T + 1)]
    if fraction:
        assert all_tokens(data.val) == val[: len(val) // (T + 1) * (T + 1)]
        tails.append(len(val) % (T + 1))
    else:
        assert data.val is None
    assert all(f"{tail} tokens left over" in log for tail in tails if tail)


def test_separate_validation_text(prepare, text, tmp_path):
    held_out = tmp_path / "held_out.txt"
    shutil.move(text / "part00.txt", held_out)
    data, _ = prepare(val_data_path=str(held_out))
    assert all_tokens(data.val) == expected_stream([held_out], data.tokenizer)[: len(data.val) * (T + 1)]
    assert all_tokens(data.train) == expected_stream(text.iterdir(), data.tokenizer)[: len(data.train) * (T + 1)]


def test_large_vocabularies_and_chunks(prepare, monkeypatch):
    """Token ids beyond 16 bits, documents in pieces, many chunks."""
    small = prepare()[0]
    raw = json.loads(small.tokenizer._files["tokenizer.json"])
    raw["model"]["vocab"]["\u0120the"] = 70_000
    files = small.tokenizer._files | {"tokenizer.json": json.dumps(raw).encode()}
    tokenizer = Tokenizer(files, "big")
    complete = prepare(tokenizer=tokenizer)[0]
    assert 70_000 in all_tokens(complete.train) and complete.train.store.dtype.name == "int32"
    monkeypatch.setattr("toolkit.data.tokens.token_store.TOKENS_PER_CHUNK", 1000)
    monkeypatch.setattr("toolkit.data.text.prepare_text.CODE_VERSION", 10**6)
    pieces = prepare(tokenizer=tokenizer)[0]
    assert len(list(pieces.train.store.array.folder.glob("*.bin"))) > 5
    assert pieces.content_key == complete.content_key and all_tokens(pieces.train) == all_tokens(complete.train)


def test_long_documents_tokenized_in_pieces_have_the_same_ids(tmp_path, monkeypatch):
    lines = "def f(x):\n    return x\r\n\n\nclass C:\n\ttext = 'naïve 你好'\n\n   \nimport os\n// no cut\n" * 200
    file = tmp_path / "long.py"
    file.write_bytes(lines.encode())
    tokenizer = train_bpe([lines], 400)
    (document,) = documents.fingerprint([file], "x")
    monkeypatch.setattr(documents, "CHUNK_CHARS", 500)
    pieces = list(documents.text_chunks(document))
    read = lines.replace("\r\n", "\n")
    assert len(pieces) > 10 and "".join(p.text for p in pieces) == read
    assert [p.ends_document for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [t for p in pieces for t in tokenizer.encode(p.text)] == tokenizer.encode(read)
    ((joined, starts),) = documents.batches(pieces, can_cut=False)
    assert joined == [documents.TextChunk(read, True)] and starts
    limited = documents.read_chunks([document, document], len(read.encode()) + 9)
    assert list(documents.batches(limited, can_cut=False)) == [([*joined, documents.TextChunk(read[:9], False)], True)]


def test_windows_line_endings_and_byte_order_marks_are_normalized_and_counted(prepare, text, tmp_path, monkeypatch):
    plain = prepare()[0]
    assert "line endings" not in prepare()[1]
    special = "a\ufeffb\rc"  # inside a text, byte order marks and \r alone are kept
    expected, changed = {}, 0
    for number, file in enumerate(sorted(text.iterdir())):
        content = special + file.read_text()
        expected[file.name] = content
        lines = content.count("\n") if number else 0
        changed += lines
        file.write_bytes(b"\xef\xbb\xbf" * (number < 3) + content.encode().replace(b"\n", b"\r\n" if number else b"\n"))
    (text / "mark.txt").write_bytes(b"\xef\xbb\xbf")  # an empty file
    monkeypatch.setattr(documents, "_READ_SIZE", 7)  # splits \r\n pairs
    for cached in ("preparing", "using cached"):
        data, log = prepare(tokenizer=plain.tokenizer)
        assert cached in log and f"normalized {changed:,} \\r\\n line endings to \\n, dropped 3 byte order marks" in log
    paths = documents.fingerprint(sorted(text.iterdir()), "x")
    stream = [t for d in paths for t in plain.tokenizer.encode(expected[d.path.name], bos=False, eos=True)]
    assert all_tokens(data.train) == stream[: len(data.train) * (T + 1)]
    for size in (1, 2, 3):
        monkeypatch.setattr(documents, "CHUNK_CHARS", size)
        assert ["".join(p.text for p in documents.text_chunks(d)) for d in paths] == [
            expected[d.path.name] for d in paths
        ]


def test_tokenizer_without_eos_is_an_error(prepare, tmp_path):
    files = dict(train_bpe(["text"], 260)._files)
    files = {"tokenizer.json": files["tokenizer.json"], "tokenizer_config.json": b'{"model_max_length": 8}'}
    tokenizer = Tokenizer(files, "--tokenizer_dir nowhere")
    assert tokenizer.eos_id is None
    with pytest.raises(UserError, match="--tokenizer_dir nowhere: has no end-of-document token"):
        prepare(tokenizer=tokenizer)


def test_too_short_text_reports_the_required_tokens(prepare, text):
    for file in sorted(text.iterdir())[1:]:
        file.unlink()
    (text / "part00.txt").write_text("the model")
    with pytest.raises(UserError, match=r"--data.train_data_path .*text: \d+ training tokens, but one row needs 33"):
        prepare(val_fraction=0.0)
    (text / "part00.txt").write_text("the model reads " * 100)
    with pytest.raises(UserError, match=r"--data.val_fraction 0.01: \d held-out tokens, but one row needs 33"):
        prepare(val_fraction=0.01)


def test_text_that_is_not_utf8_is_named(prepare, text):
    (text / "picture.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(UserError, match=r"picture.png is not UTF-8 text") as error:
        prepare()
    assert str(error.value).startswith("--data.train_data_path ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing", "no such file or folder"), ("*.nothing", "no file matches"), ("empty", "has no files")],
)
@pytest.mark.parametrize("option", ["train_data_path", "val_data_path"])
def test_missing_or_empty_text_is_an_error(prepare, tmp_path, option, path, message):
    (tmp_path / "empty").mkdir()
    value = str(tmp_path / path)
    with pytest.raises(UserError) as error:
        prepare(**{option: value})
    assert str(error.value).startswith(f"--data.{option} {value}: ") and message in str(error.value)


def test_pipe_is_not_a_text_file(prepare, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UserError, match=f"--data.train_data_path {path}: not a regular file"):
            prepare(train_data_path=str(path))


def test_empty_files_are_skipped(prepare, text, tmp_path):
    full = prepare()[0]
    (text / "empty.txt").touch()
    (text / ".hidden").write_bytes(b"\xff")
    data, log = prepare()
    assert "using cached" in log and data.content_key == full.content_key  # empty files are not documents
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "a.txt").touch()
    with pytest.raises(UserError, match="void: contains no text"):
        prepare(train_data_path=str(tmp_path / "void"))


def test_text_can_be_a_file_folder_or_glob(prepare, text):
    (text / "sub").mkdir()
    shutil.move(text / "part11.txt", text / "sub")
    folder = prepare()[0].content_key
    assert prepare(train_data_path=f"{text}/**/*.txt")[0].content_key == folder
    one = prepare(train_data_path=f"{text}/part00.txt")[0].content_key
    assert prepare(train_data_path=f"{text}/*00.txt")[0].content_key == one != folder


def test_overlapping_validation_text_is_an_error(prepare, text):
    with pytest.raises(UserError, match=r"--data.val_data_path .*part00.txt is also training text"):
        prepare(val_data_path=str(text / "part00.txt"))


def test_preparation_prints_nothing(prepare, capfd):
    prepare()
    assert capfd.readouterr() == ("", "")


def test_python_stdlib_is_prepared(tmp_path, monkeypatch):
    """Prepare some files of the default data; file selection is tested in test_modules."""
    from toolkit.data.text import python_stdlib

    some = [p for p in python_stdlib.find_sources() if p.parent.name in ("json", "email")]
    monkeypatch.setattr(python_stdlib, "find_sources", lambda: some)
    module = PythonStdlib(vocab_size=512, cache_dir=str(tmp_path))
    lines = []
    data = module.prepare(tokenizer=None, max_seq_length=64, report=lines.append)
    assert all_tokens(data.train) == expected_stream(some, data.tokenizer)[: len(data.train) * 65]
    assert data.tokenizer.vocab_size == 512
    assert module.prepare(tokenizer=None, max_seq_length=64, report=lines.append).content_key == data.content_key
    assert "preparing" in lines[0] and "using cached" in lines[-1]
