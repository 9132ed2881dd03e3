"""Streamed text: segments, the order of rows, broken files, and the processes that prepare segments."""

import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from helpers.cases import check_each
from helpers.compare_runs import assert_same_weights
from helpers.corpus import WORDS
from helpers.groups import losses, read_until
from helpers.processes import start
from pyarrow import parquet

from toolkit.cli import main
from toolkit.data import HuggingFaceText
from toolkit.data.base import row_count, sample_order
from toolkit.data.streamed import segments
from toolkit.data.streamed import source as source_module
from toolkit.data.streamed import stream as stream_module
from toolkit.data.streamed.segments import plan_segments, read_part
from toolkit.data.streamed.stream_reader import SegmentRequest, StreamReader, folder_bytes, stop_workers
from toolkit.data.streamed.streamed_rows import ROW_BITS
from toolkit.data.streamed.tokenize_worker import make_room
from toolkit.errors import DataError, UserError
from toolkit.io.safe_parse import MAX_ROW
from toolkit.io.source_files import list_path

T = 16


def documents(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}.{i} é " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for i in range(count)]


def lines(texts: list[str], column: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, column: text}) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A file of each format, and small ones; about 60 kB."""
    folder = tmp_path_factory.mktemp("text")
    table = pyarrow.table({"id": range(90), "text": documents(90, 0)})
    parquet.write_table(table, folder / "a.parquet", row_group_size=10)
    (folder / "b.jsonl").write_bytes(lines(documents(90, 1)))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines(documents(30, 2))))
    (folder / "d.jsonl.zst").write_bytes(pyarrow.compress(lines(documents(30, 3)), "zstd", asbytes=True))
    for i in range(5):
        (folder / f"e{i}.txt").write_text(documents(1, 4 + i)[0])
    (folder / "f.txt.gz").write_bytes(gzip.compress(documents(1, 9)[0].encode()))
    return folder


ALL_TEXTS = sorted(text for seed, count in ((0, 90), (1, 90), (2, 30), (3, 30)) for text in documents(count, seed))
ALL_TEXTS += sorted(documents(1, seed)[0] for seed in range(4, 10))


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4000)


def opened(path, cache: Path, **options):
    data = HuggingFaceText(path=str(path), cache_dir=str(cache), vocab_size=300, **options)
    return data.prepare(tokenizer=None, max_seq_length=T, report=lambda line: None)


def stream_of(prepared):
    return prepared.train.segments.reader.stream


def prepare_segments(prepared) -> dict[int, int]:
    """Prepare all segments in this process; return their tokens."""
    stream = stream_of(prepared)
    return {number: stream.prepare(number).tokens for number in range(len(stream.source.segments))}


@pytest.mark.parametrize("segment_bytes", [200, 3000, 10**6])
def test_segments_have_every_document_once(folder, segment_bytes):
    files = list_path(str(folder), "path")
    found = []
    for segment in plan_segments(files, segment_bytes):
        for part in segment:
            assert len(segment) == 1 or part.total == 1  # parts of a large file are separate segments
            found += [piece.text for piece in read_part(files[part.file], part, "text")]
    assert sorted(found) == sorted(ALL_TEXTS)


def test_line_at_a_cut_is_read_once(tmp_path):
    texts = [f"{i:90}" for i in range(40)]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    (file,) = list_path(str(tmp_path / "a.jsonl"), "path")
    parts = [part for segment in plan_segments([file], file.size // 10) for part in segment]
    assert len(parts) == 10 and [p.text for part in parts for p in read_part(file, part, "text")] == texts


def test_n3_stream_order_has_every_row_once_per_epoch_and_seeks(folder, tmp_path):
    prepared = opened(folder, tmp_path, val_rows=3)
    tokens = prepare_segments(prepared)
    assert row_count(prepared.train) is None and len(prepared.val) == 3
    rows = {(n << ROW_BITS) | row for n, count in tokens.items() for row in range(count // (T + 1))}
    first = tokens[0] // (T + 1)
    rows -= {first - 1 - i for i in range(3)}  # held out
    size, order = len(rows), sample_order(prepared.train, 3, {})
    epochs = [order.ids(np.arange(e * size, (e + 1) * size)) for e in range(3)]
    assert all(set(ids.tolist()) == rows and len(ids) == size for ids in epochs)
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])
    assert set((epochs[0][: first - 3] >> ROW_BITS).tolist()) == {
        0
    }  # the segment that is prepared before the first step
    stream = np.concatenate(epochs)
    for begin in (0, 1, first - 4, first - 3, size - 1, size, size + 7, 2 * size):
        state = json.loads(json.dumps(order.state(begin)))
        resumed = sample_order(prepared.train, 3, state)
        assert resumed.state(begin) == state
        for step in range(begin, begin + 40, 8):  # as a run reads
            positions = np.arange(step, step + 8)
            assert np.array_equal(resumed.ids(positions), stream[positions])


@pytest.mark.slow
def test_resume_in_a_clean_cache_reads_only_what_comes_next(folder, tmp_path):
    prepared = opened(folder, tmp_path / "first")
    n_segments = len(prepare_segments(prepared))
    order = sample_order(prepared.train, 3, {})
    order.ids(np.arange(600))
    passed = list(dict.fromkeys((order.ids(np.arange(600)) >> ROW_BITS).tolist()))
    assert len(passed) > 4
    begin = order._starts[-1] + 1
    clean = opened(folder, tmp_path / "clean")
    assert clean.content_key == prepared.content_key
    resumed = sample_order(clean.train, 3, order.state(begin))
    ids = resumed.ids(np.arange(begin, begin + 2))
    stop_workers(stream_of(clean).folder)
    assert np.array_equal(ids, order.ids(np.arange(begin, begin + 2)))
    row = clean.train[int(ids[0])]
    assert row["input_ids"].tolist() == prepared.train[int(ids[0])]["input_ids"].tolist() and len(row["labels"]) == T
    consumed = set(passed[1:-1])  # segment 0 has the rows to validate on
    assert consumed and not consumed & set(stream_of(clean).prepared()) and n_segments > len(passed)


@pytest.mark.slow
def test_segment_that_was_evicted_or_damaged_is_prepared_again(folder, tmp_path):
    prepared = opened(folder, tmp_path)
    prepare_segments(prepared)
    stream, row_id = stream_of(prepared), 3 << ROW_BITS
    expected = prepared.train[row_id]["input_ids"].tolist()
    for damage in ("evicted", "damaged", "without checksums"):
        if damage == "evicted":
            stream.evict(3)
        elif damage == "without checksums":  # as after a power cut
            (stream.segment_folder(3) / "tokens" / "crc32.npy").write_bytes(b"")
        else:
            chunk = next((stream.segment_folder(3) / "tokens").glob("*.bin"))
            content = chunk.read_bytes()
            chunk.write_bytes(content[:-400] + bytes(byte ^ 255 for byte in content[-400:]))
        prepared.train.segments._open.clear()
        assert prepared.train[row_id]["input_ids"].tolist() == expected, damage
    stop_workers(stream.folder)
    shutil.rmtree(stream.folder)
    prepared.train.segments._open.clear()
    with pytest.raises(DataError, match="No such file or directory.*; was it deleted"):
        prepared.train[4 << ROW_BITS]


def test_reader_leaves_the_copy_that_another_one_has_prepared(folder, tmp_path, monkeypatch):
    prepared = opened(folder, tmp_path)
    prepare_segments(prepared)
    stream, row_id = stream_of(prepared), 3 << ROW_BITS
    chunk = next((stream.segment_folder(3) / "tokens").glob("*.bin"))

    def damage():
        chunk.write_bytes(bytes(chunk.stat().st_size))
        prepared.train.segments._open.clear()

    damage()
    prepared.train.segments._store(3)  # the damaged copy is open
    stream.evict(3)
    stream.prepare(3)
    fresh = stream.copy_of(3)
    store, _ = prepared.train.segments._open[3]
    monkeypatch.setattr(store.array, "checksums", store.array.checksums + 1)  # as the damaged one would be
    prepared.train[row_id]
    assert stream.copy_of(3) == fresh
    damage()
    monkeypatch.setattr(stream_module.os, "rename", lambda *paths: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(DataError, match="units/000003: is damaged and cannot be removed; delete this folder"):
        prepared.train[row_id]
    (stream.segment_folder(3) / "tokens" / "index.json").unlink()
    with pytest.raises(DataError, match="units/000003: is damaged and cannot be removed"):
        stream.open(3)


def test_resume_within_a_segment_of_other_rows_is_refused(folder, tmp_path):
    prepared = opened(folder, tmp_path)
    prepare_segments(prepared)
    order, stream = sample_order(prepared.train, 3, {}), stream_of(prepared)
    order.ids(np.arange(600))
    begin, (_, segment, count) = order._starts[-1], order._reached[-1]
    within, before = order.state(begin + 1), order.state(begin)
    assert within == before | {"rows": count}
    counts = stream.counts(segment).__dict__ | {"tokens": stream.counts(segment).tokens + T + 1}
    stream._counts_file(segment).write_text(json.dumps(counts))  # a file was repaired
    names = rf"\w+\.\S+: has {within['rows'] + 1} rows now, but {within['rows']} when the checkpoint was saved; restore"
    with pytest.raises(DataError, match=names):
        sample_order(prepared.train, 3, within).ids(np.array([begin + 1]))
    sample_order(prepared.train, 3, before).ids(np.array([begin]))  # also of a run before rows were saved


def test_line_beyond_the_bound_is_refused_with_its_place(tmp_path):
    content = lines(["short"]) + b"x" * (MAX_ROW + 9)
    (tmp_path / "a.jsonl.zst").write_bytes(pyarrow.compress(content, "zstd", asbytes=True))
    (tmp_path / "b.jsonl").write_bytes(content)
    for file in list_path(str(tmp_path), "path"):
        with pytest.raises(segments.BrokenFileError, match="byte 27: line longer than 67,108,864 bytes"):
            list(read_part(file, segments.Part(0, 0, 1), "text"))
    assert list(read_part(file, segments.Part(0, 1, 2), "text")) == []  # the line begins in the part before
    parquet.write_table(pyarrow.table({"text": ["short", "x" * (MAX_ROW + 9)]}), tmp_path / "a.parquet")
    (file,) = list_path(str(tmp_path / "a.parquet"), "path")
    with pytest.raises(segments.BrokenFileError, match="'text' has a row of more than 67,108,864 characters"):
        list(read_part(file, segments.Part(0, 0, 1), "text"))


def test_broken_file_is_an_error_or_skipped(folder, tmp_path):
    source = tmp_path / "text"
    shutil.copytree(folder, source)
    whole = (source / "c.jsonl.gz").read_bytes()
    (source / "c.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (source / "b.jsonl").write_bytes((source / "b.jsonl").read_bytes().replace(b"{", b"(", 91)[:-40])
    lines = []
    for choice in ("error", "skip", "error"):
        data = HuggingFaceText(path=str(source), cache_dir=str(tmp_path), vocab_size=300, on_bad_shard=choice)
        prepared = data.prepare(tokenizer=None, max_seq_length=T, report=lines.append)
        prepare_segments(prepared)
        order = sample_order(prepared.train, 3, {})
        if choice == "error":
            with pytest.raises(DataError, match=r"(b.jsonl|c.jsonl.gz): .*--data.on_bad_shard skip"):
                order.ids(np.arange(5000))
        else:
            first = order.ids(np.arange(900))
            assert np.array_equal(first, sample_order(prepared.train, 3, {}).ids(np.arange(900)))
            assert sum("skipped the rest of b.jsonl: byte " in line for line in lines) == 1 + 1  # by both orders
            assert sum("skipped the rest of c.jsonl.gz" in line for line in lines) == 2
            assert "(2 in total)" in "".join(lines)


def test_damaged_parquet_is_an_error_before_a_tokenizer_is_trained(folder, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name in ("a.parquet", "b.parquet"):
        shutil.copy(folder / "a.parquet", tmp_path / "text" / name)
    os.truncate(tmp_path / "text" / "b.parquet", 200)
    monkeypatch.setattr("toolkit.data.streamed.open_text.train_tokenizer", lambda *_: pytest.fail("trains a tokenizer"))
    data = HuggingFaceText(path=str(tmp_path / "text"), cache_dir=str(tmp_path), vocab_size=300)
    with pytest.raises(UserError, match="b.parquet: "):
        data.prepare(tokenizer=None, max_seq_length=T, report=print)


def test_invalid_input_is_one_line(folder, tmp_path, monkeypatch):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "short.txt").write_text("word")
    (tmp_path / "list.json").write_text('[{"text": "x"}]')
    (tmp_path / "none").mkdir()
    parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    cases = [
        (
            {"path": folder, "text_column": "content"},
            "--data.text_column content: a.parquet: .*its columns are id, text",
        ),
        (
            {"path": folder / "b.jsonl", "text_column": "content"},
            "text_column content: b.jsonl: .*columns are id, text",
        ),
        ({"path": tmp_path / "numbers.parquet"}, "--data.text_column text: .*of type int64, not text"),
        ({"path": tmp_path / "nothing*.parquet"}, "--data.path .*: no file matches"),
        ({"path": tmp_path / "missing"}, "--data.path .*: no such file or folder; check the path"),
        ({"path": tmp_path / "none"}, "the folder has no file of a supported format"),
        ({"path": tmp_path / "empty.jsonl"}, "contains no text"),
        ({"path": tmp_path / "table.csv"}, "table.csv: must end in .parquet, .jsonl or .txt"),
        ({"path": tmp_path / "short.txt"}, "5 tokens, but one row needs 17"),
        ({"path": tmp_path / "list.json"}, "list.json: byte 0: is not a JSON object"),
        ({"path": folder, "max_cache_gb": 1e-6}, "--data.max_cache_gb 1e-06: a run needs 5 segments at a time"),
        ({"path": folder, "val_path": folder / "b.jsonl"}, "--data.val_path .*b.jsonl is also training text"),
        ({"path": "unknown://bucket/x.txt"}, "unknown kind of storage"),
        ({"path": "https://user:secret@host/x.txt"}, "--data.path https://...: contains credentials"),
        ({"path": "simplecache::https://user:secret@host/x.txt"}, "contains credentials"),
        ({"path": "https://host/x.txt?X-Amz-Signature=secret"}, "contains credentials"),
        ({"path": "https://host/x.txt?raw=1&bearer=secret"}, "contains credentials or a query"),
        ({}, "--data.repo_id None: give either --data.repo_id or --data.path"),
        ({"path": "x", "repo_id": "y/z"}, "give either --data.repo_id or --data.path"),
        ({"path": "x", "subset": "y"}, "--data.subset y: has no effect with --data.path; remove it"),
        ({"path": "x", "val_rows": -1}, "--data.val_rows -1"),
        ({"path": "x", "val_path": "y", "val_rows": 0}, "--data.val_rows 0: must be positive"),
        ({"path": "x", "vocab_size": 256}, "--data.vocab_size 256"),
        ({"path": "x", "prepare_workers": 0}, "--data.prepare_workers 0"),
    ]

    def check(options, message):
        options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
        with pytest.raises(UserError, match=message) as error:
            data = HuggingFaceText(**({"vocab_size": 300, "cache_dir": str(tmp_path / "cache")} | options))
            data.prepare(tokenizer=None, max_seq_length=T, report=lambda line: None)
        assert "\n" not in str(error.value) and "secret" not in str(error.value)

    check_each(check, cases)


def test_changed_text_is_another_cache(folder, tmp_path):
    source = tmp_path / "text"
    shutil.copytree(folder, source)
    key = opened(source, tmp_path).content_key
    moved = source.rename(tmp_path / "moved")
    assert opened(moved, tmp_path).content_key == key
    content = (moved / "b.jsonl").read_bytes()
    (moved / "b.jsonl").write_bytes(content.replace(b"model", b"MODEL", 1))  # of the same size
    assert opened(moved, tmp_path).content_key != key


def test_code_version_is_part_of_the_key(folder, tmp_path, monkeypatch):
    key = opened(folder, tmp_path).content_key
    monkeypatch.setattr(source_module, "CODE_VERSION", 0)
    assert opened(folder, tmp_path).content_key != key


@pytest.mark.slow
def test_parts_prepared_by_several_processes_are_what_a_run_reads(folder, tmp_path, capsys):
    data = ["--data", "HuggingFaceText", "--data.path", str(folder), "--data.vocab_size", "300"]
    data += ["--data.cache_dir", str(tmp_path), "--max_seq_length", str(T)]
    for part in ("2/2", "1/2", "1/2"):  # also what is prepared already
        assert main(["prepare_data", *data, "--workers", "2", "--part", part]) == 0
    printed = capsys.readouterr().out
    assert printed.count("segments prepared in") == 3 and " 0 segments" not in printed, printed
    prepared = opened(folder, tmp_path)
    stream, other = stream_of(prepared), stream_of(opened(folder, tmp_path / "other"))
    for number in range(len(stream.source.segments)):
        assert stream.ready(number) == other.prepare(number)
        tokens = [s.open(number)[0].tokens(0, stream.counts(number).tokens) for s in (stream, other)]
        assert np.array_equal(*tokens)


def test_workers_and_parts_are_refused_where_they_have_no_effect(folder, tmp_path, refusal):
    streamed = ["--data", "HuggingFaceText", "--data.path", str(folder)]
    for flags, message in (
        (["--workers", "2"], "--workers 2: has no effect without --data HuggingFaceText"),
        (["--part", "1/2"], "--part 1/2: has no effect without --data HuggingFaceText"),
        ([*streamed, "--part", "3/2"], "--part 3/2: must be a part and the number of parts"),
        ([*streamed, "--data.max_cache_gb", "1"], "--data.max_cache_gb 1: is not supported by prepare_data"),
    ):
        assert message in refusal("prepare_data", *flags)


def flags_for(folder: Path, tmp_path: Path, out: str, **data) -> list[str]:
    flags = {"path": folder, "vocab_size": 300, "cache_dir": tmp_path / f"cache-{out.partition('-')[0]}"} | data
    words = [part for name, value in flags.items() for part in (f"--data.{name}", str(value))]
    flags = {"global_batch_size": 8, "micro_batch_size": 2, "max_seq_length": T, "max_steps": 80, "save_interval": 5}
    words += [part for name, value in flags.items() for part in (f"--train.{name}", str(value))]
    words += ["--out_dir", str(tmp_path / out), "--resume", "auto", "--eval.interval", "0", "--accelerator", "cpu"]
    return ["pretrain", "pico-llama", "--data", "HuggingFaceText", *words]


def test_process_that_ends_leaves_no_reader(folder, tmp_path):
    stream = stream_of(opened(folder, tmp_path))
    reader = StreamReader(stream, 1, None, print)
    process = multiprocessing.get_context("fork").Process(target=reader.request, args=(SegmentRequest([0]),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert not [file.name for file in (stream.folder / "readers").iterdir() if file.suffix in (".json", ".lock")]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "workers"), [(1, 0), (1, 2), (2, 0)])
def test_s2_streamed_run_killed_at_random_is_bit_equal(folder, tmp_path, devices, workers):
    """Also with a clean cache for each launch, and a disk budget that evicts segments."""
    options = {"num_workers": workers, "max_cache_gb": 1e-4, "prepare_workers": 1 + workers // 2}
    rng, kills = random.Random(devices + workers), 0

    def launch(out):
        words = [*flags_for(folder, tmp_path, out, **options), "--devices", str(devices)]
        return start(str(Path(__file__).parents[1] / "helpers" / "small_segments.py"), *words)

    done = launch("whole")
    _, errors = done.communicate()
    assert done.returncode == 0, errors
    while kills < 3:
        process = launch("killed")
        read_until(process, f"saved {tmp_path}/killed/step-")
        threading.Timer(rng.random() * 2, os.killpg, (process.pid, signal.SIGKILL)).start()
        out, _ = process.communicate()
        if process.returncode == 0:
            break
        kills += 1
        if (tmp_path / "killed" / "final" / "COMPLETE").exists():
            break
        shutil.rmtree(tmp_path / "cache-killed", ignore_errors=kills % 2 == 1)
    last = launch("killed")
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    assert kills and losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert_same_weights(tmp_path / "killed" / "final", tmp_path / "whole" / "final")


def test_budget_evicts_the_oldest_segments_that_nobody_reads(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1500)
    stream = stream_of(prepared := opened(folder, tmp_path))
    full = [number for number, tokens in prepare_segments(prepared).items() if tokens]
    assert len(full) > 12
    for number in full:
        os.utime(stream.segment_folder(number), (number, number))  # the first is the oldest
    first, next_one, missing = full[0], full[3], full[5]
    wanted = [SegmentRequest(keep=[first, next_one], ahead=[full[4], missing])]
    stream.evict(missing)
    budget = folder_bytes(stream.folder / "units") - 3000

    def kept() -> list[int]:
        return [number for number in full if stream.segment_folder(number).exists()]

    assert make_room(stream, wanted, missing, budget) and folder_bytes(stream.folder / "units") <= budget
    newer = [number for number in kept() if number > missing]
    assert kept() == [first, next_one, full[4], *newer] and newer == full[-len(newer) :]
    assert all(stream.counts(number) is not None for number in full)
    # The look-ahead pauses when only wanted segments are left; for a process that waits, segments of the look-ahead go.
    assert not make_room(stream, wanted, missing, 100) and kept() == [first, next_one, full[4]]
    waiting = [*wanted, SegmentRequest(keep=[next_one], ahead=[missing], is_waiting=True)]
    assert make_room(stream, waiting, missing, 100) and kept() == [first, next_one]


@pytest.mark.slow
def test_reading_with_a_budget_stays_below_it(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4000)
    folder, budget = tmp_path / "text.jsonl", 40_000
    folder.write_bytes(lines(documents(600, 1)))
    free, bounded = (
        opened(folder, tmp_path / name, max_cache_gb=gb) for name, gb in (("a", None), ("b", budget / 1e9))
    )
    assert sum(prepare_segments(free).values()) * 2 > budget
    orders = [sample_order(prepared.train, 3, {}) for prepared in (free, bounded)]
    largest = 0
    for begin in range(0, 1500, 10):  # more than an epoch
        ids, of_bounded = (order.ids(np.arange(begin, begin + 10)) for order in orders)
        assert np.array_equal(ids, of_bounded)
        first = [prepared.train[int(ids[0])]["input_ids"].tolist() for prepared in (free, bounded)]
        assert first[0] == first[1]
        largest = max(largest, folder_bytes(stream_of(bounded).folder / "units"))
    stop_workers(stream_of(bounded).folder)
    stop_workers(stream_of(free).folder)
    assert budget / 3 < largest <= budget


def test_a_key_given_twice_is_named():
    with pytest.raises(segments.BrokenFileError, match="byte 7: is not a line of JSON .duplicate key text; remove one"):
        segments._text_of(b'{"text": "a", "text": "b"}', "text", 7)
    assert segments._text_of(b'{"text": "a", "b": {"text": "c"}}', "text", 7) == "a"


def test_repaired_file_is_read_again(tmp_path, monkeypatch):
    """The repair changes neither the size nor what of the file identifies it."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)
    whole = lines(documents(900, 1)) + lines(documents(300, 2)) * 4
    middle = whole.index(b"{", len(whole) // 2)
    (tmp_path / "text.jsonl").write_bytes(whole[:middle] + b"(" + whole[middle + 1 :])
    source = {"path": tmp_path / "text.jsonl", "cache": tmp_path / "cache"}
    for _ in range(2):
        with pytest.raises(UserError, match=f"text.jsonl: byte {middle:,}: is not a line of JSON .*on_bad_shard skip"):
            opened(**source)
    (tmp_path / "text.jsonl").write_bytes(whole)
    prepared = opened(**source)
    assert not stream_of(prepared).counts(0).broken and stream_of(prepared).counts(0).documents == 2100
