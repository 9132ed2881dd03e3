"""Chunks of LitData datasets from storage: their rows, order and cache, what is refused, and runs that are killed."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from fsspec.implementations.local import LocalFileSystem
from helpers.cases import check_each, slow_except
from helpers.compare_runs import assert_same_weights
from helpers.damage import edit_json, flip
from helpers.groups import losses, read_until
from helpers.hub_stub import Hub
from helpers.processes import start

from toolkit.cli import main
from toolkit.data import LitData
from toolkit.data.base import sample_order
from toolkit.data.streamed.chunk_segments import ChunkSegments
from toolkit.data.streamed.stream_reader import stop_workers
from toolkit.data.tokens.token_store import TokenWriter
from toolkit.errors import UserError
from toolkit.io.storage import StorageError

T, VOCABULARY = 16, 300
PER_CHUNK = 410  # 24 rows, and a rest


def write_chunks(folder: Path, seed: int, n_tokens: int, per_chunk: int = PER_CHUNK) -> np.ndarray:
    """Write a folder of chunks as LitData's; return the tokens."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, n_tokens).astype(np.uint16)
    writer = TokenWriter(folder / "writing", np.uint16, tokens_per_chunk=per_chunk)
    writer.add(tokens)
    writer.finish()
    for file in (folder / "writing" / "tokens").iterdir():
        shutil.move(file, folder / file.name)
    shutil.rmtree(folder / "writing")
    return tokens


def compress(folder: Path, name: str = "zstd") -> None:
    """Compress the chunks, as litdata.optimize(compression="zstd", compression_level="chunk") does; "zstd:3" too."""
    index = json.loads((folder / "index.json").read_text())
    index["config"]["compression"] = name
    for chunk in index["chunks"]:
        file = folder / chunk["filename"]
        chunk["filename"] = f"{file.stem}.{name}.bin"
        (folder / chunk["filename"]).write_bytes(pyarrow.compress(file.read_bytes(), "zstd", asbytes=True))
        file.unlink()
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "crc32.npy").unlink()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with train/ and val/, and their tokens."""
    folder = tmp_path_factory.mktemp("dataset")
    return folder, {
        name: write_chunks(folder / name, seed, n) for name, seed, n in (("train", 1, 4000), ("val", 2, 900))
    }


def prepared_from(url: object, cache: Path, lines: list[str] | None = None, **options):
    data = LitData(str(url), cache_dir=str(cache), **options)
    report = (lambda line: None) if lines is None else lines.append
    return data.prepare(tokenizer=None, max_seq_length=T, report=report)


def stream_of(prepared):
    return prepared.train.segments.reader.stream


def rows_of_chunks(tokens: np.ndarray) -> list[tuple[int, ...]]:
    """The rows that do not span chunks, sorted."""
    chunks = (tokens[i : i + PER_CHUNK] for i in range(0, len(tokens), PER_CHUNK))
    blocks = (chunk[i : i + T + 1] for chunk in chunks for i in range(0, len(chunk) - T, T + 1))
    return sorted(tuple(block.tolist()) for block in blocks)


def read_epoch(prepared, seed: int = 0) -> list[tuple[int, ...]]:
    rows, order = prepared.train, sample_order(prepared.train, seed, {})
    return [tokens_of(rows[int(i)]) for i in order.ids(np.arange(rows.epoch_rows))]


def tokens_of(row) -> tuple[int, ...]:
    return *row["input_ids"].tolist(), int(row["labels"][-1])


def test_s5_epoch_has_every_row_once_and_copies_have_one_key(dataset, tmp_path):
    folder, tokens = dataset
    first = prepared_from(f"file://{folder}", tmp_path / "a")
    epoch = read_epoch(first)
    assert sorted(epoch) == rows_of_chunks(tokens["train"]) != epoch
    block = first.val[len(first.val) - 1]["input_ids"].tolist()
    assert len(first.val) == len(rows_of_chunks(tokens["val"]))
    assert first.vocab_size is None  # only the first chunk was read
    assert any(tuple(block) == row[:-1] for row in rows_of_chunks(tokens["val"]))
    moved, packed = tmp_path / "moved", tmp_path / "packed"
    shutil.copytree(folder, moved)
    shutil.copytree(folder, packed)
    compress(packed / "train", "zstd:3")
    again = prepared_from(f"file://{moved}", tmp_path / "b")  # as on another machine
    assert again.content_key == first.content_key and read_epoch(again) == epoch
    lines = []
    local = prepared_from(packed, tmp_path / "c", lines)  # decompressed into the cache; its validation chunks too
    assert read_epoch(local) == epoch and local.content_key != first.content_key
    assert [line.count("not verified") for line in lines] == [1, 0]
    both = prepared_from(f"file://{tmp_path}/[mp]*ed", tmp_path / "d")
    assert sorted(read_epoch(both)) == sorted(2 * epoch) and len(both.val) == 2 * len(first.val)
    for opened in (first, again, local, both):
        for rows in (opened.train, opened.val):
            stop_workers(rows.segments.reader.stream.folder)


@pytest.mark.parametrize("is_listed", slow_except([True], [True, False]))
def test_s5_other_tokens_under_an_equal_index_have_another_key(tmp_path, monkeypatch, is_listed):
    """LitData's own chunks have no checksums, and equal lengths give an equal index. Storage may refuse to list."""

    def refuse(*args, **options):
        raise PermissionError

    opened = []
    for seed in (1, 2):
        for name in ("train", "val"):
            write_chunks(tmp_path / f"{seed}" / name, seed, 500)
            (tmp_path / f"{seed}" / name / "crc32.npy").unlink()
        if not is_listed:
            monkeypatch.setattr(LocalFileSystem, "find", refuse)
        opened.append(prepared_from(f"file://{tmp_path}/{seed}", tmp_path / "cache"))
        stop_workers(stream_of(opened[-1]).folder)
        stop_workers(opened[-1].val.segments.reader.stream.folder)
    assert opened[0].content_key != opened[1].content_key
    assert stream_of(opened[0]).folder != stream_of(opened[1]).folder


@pytest.mark.parametrize(("reader", "other"), [("b", "a"), pytest.param("a", "b", marks=pytest.mark.slow)])
def test_runs_with_two_urls_of_equal_chunks_each_read_their_own(dataset, tmp_path, reader, other):
    """Also chunks that the other one's worker could download, or that a worker has to be started for."""
    opened = {}
    for name in "ab":
        shutil.copytree(dataset[0], tmp_path / name)
        opened[name] = prepared_from(f"file://{tmp_path}/{name}", tmp_path / "cache")
    assert opened["a"].content_key == opened["b"].content_key
    if reader == "a":
        stop_workers(stream_of(opened["a"]).folder)
    for file in (tmp_path / other / "train").glob("chunk-*"):
        file.unlink()
    assert sorted(read_epoch(opened[reader])) == rows_of_chunks(dataset[1]["train"])
    for rows in (opened["a"].train, opened["a"].val):
        stop_workers(rows.segments.reader.stream.folder)


def test_folder_of_prepare_data_keeps_its_splits_on_storage(tmp_path, capsys, refusal):
    (tmp_path / "text.txt").write_text("abcdefgh" * 900)
    data = ["--data", "TextFiles", "--data.train_data_path", str(tmp_path / "text.txt"), "--max_seq_length", str(T)]
    data += ["--data.vocab_size", "characters", "--data.cache_dir", str(tmp_path / "cache")]
    words = ["prepare_data", *data, "--out_dir", str(tmp_path / "out")]
    assert main(words) == 0
    module = LitData(str(tmp_path / "out"))
    here = module.prepare(tokenizer=None, max_seq_length=T, report=lambda line: None)
    there = prepared_from(f"file://{tmp_path}/out", tmp_path / "b", lines := [])
    assert there.tokenizer.files == here.tokenizer.files and f"tokenizer of the data, file://{tmp_path}/out" in lines[0]
    assert there.train.epoch_rows == len(here.train) and abs(len(there.val) - len(here.val)) <= 1
    assert sorted(read_epoch(there)) == sorted(map(tokens_of, map(here.train.__getitem__, range(len(here.train)))))
    stop_workers(stream_of(there).folder)
    assert main(words) == 2 and "already has files" in capsys.readouterr().err
    assert "is not a folder that can be written" in refusal(*words[:-1], tmp_path / "text.txt" / "x")
    again = ["--data", "LitData", "--data.data_path", f"file://{tmp_path}/out", "--max_seq_length", str(T)]
    again += ["--data.cache_dir", str(tmp_path / "b"), "--out_dir", str(tmp_path / "again")]
    assert "is for text" in refusal("prepare_data", *again)
    assert main([*words[:-1], "s3://user:secret@bucket/x"]) == 2 and "secret" not in capsys.readouterr().err


def test_bad_chunks_are_one_line_and_never_used(dataset, tmp_path, monkeypatch):
    folder, _ = dataset
    monkeypatch.setattr("toolkit.io.storage.RETRY_DELAYS", ())

    def write(change) -> None:
        copy, out = tmp_path / "copy", tmp_path / "out"
        for path in (copy, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "train", copy / "0")
        out.mkdir()
        change(copy / "0")
        index = tmp_path / "index"
        shutil.rmtree(index, ignore_errors=True)
        (index / "0").mkdir(parents=True)
        for name in ("index.json", "crc32.npy"):
            if (copy / "0" / name).exists():
                shutil.copy(copy / "0" / name, index / "0")
        with pytest.raises(StorageError) as error:
            ChunkSegments(index, [f"file://{copy}/0"]).write(1, out, None, print)
        assert "\n" not in str(error.value)
        raise error.value

    def retype(chunks: Path, code: int) -> None:
        edit_json(chunks / "index.json", lambda i: i["config"].update(data_format=[f"no_header_tensor:{code}"]))

    def unzip(chunks: Path) -> None:
        compress(chunks)
        (chunks / "chunk-0-1.zstd.bin").write_bytes(b"no zstd")

    cases = [
        (lambda chunks: (chunks / "chunk-0-1.bin").unlink(), "is missing, but index.json lists it"),
        (lambda chunks: os.truncate(chunks / "chunk-0-1.bin", 500), "has 500 bytes, but index.json says"),
        (lambda chunks: retype(chunks, 16), "has 832 bytes, but index.json says 1,652"),
        (lambda chunks: retype(chunks, 11), "has 832 bytes, but index.json says 422"),
        (lambda f: flip(f / "chunk-0-1.bin", -1), "checksum mismatch"),
        (unzip, "is damaged"),
    ]
    for change, message in cases:
        with pytest.raises(StorageError, match=message):
            write(change)


def test_mistakes_are_one_line(dataset, tmp_path, monkeypatch):
    folder, _ = dataset
    (tmp_path / "x" / "train").mkdir(parents=True)
    (tmp_path / "x" / "train" / "index.json").write_text('{"chunks": [], "config": {"data_format": ["pickle"]}}')
    url = f"file://{folder}"
    for name in ("train", "val"):
        write_chunks(tmp_path / "small" / name, 3, 300)
    shutil.copytree(folder, tmp_path / "packed")
    compress(tmp_path / "packed" / "train")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        for path in (tmp_path / "packed", f"file://{tmp_path}/packed"):
            _raises(lambda path=path: prepared_from(path, tmp_path / "c"), "zstd: needs pyarrow; run: pip install")
    small = prepared_from(f"file://{tmp_path}/small", tmp_path / "cache", max_cache_gb=3e-6)  # bytes of three chunks
    assert "in 1 chunk," in small.summary
    for rows in (small.train, small.val):
        stop_workers(rows.segments.reader.stream.folder)

    def prepare(data_path: object, **options) -> None:
        prepared_from(data_path, tmp_path / "cache", **options)

    check_each(
        lambda value, options, message: _raises(lambda: prepare(value, **options), message),
        [
            (f"file://{tmp_path}/none", {}, r"train/index.json \(see --data.split_names.*: no such file"),
            (f"file://{tmp_path}/x", {}, "/x: the data format .* is not of integers"),
            (f"file://{tmp_path}/none*", {}, "no folder matches"),
            (url, {"split_names": ("train", "test")}, r"test/index.json \(see --data.split_names.*: no such file"),
            ("s3://key:secret@bucket/x", {}, "contains credentials"),
            ("abc://x", {}, "unknown kind of storage"),
            (url, {"max_cache_gb": 1e-6}, "a run needs 5 chunks at a time"),
            (f"file://{tmp_path}/small", {"max_cache_gb": 1e-7}, "a run needs 1 chunk at a time"),
            (folder, {"max_cache_gb": 1.0}, "has no effect"),
        ],
    )
    assert main(["pretrain", "--data", "LitData", "--data.data_path", "s3://key:secret@bucket/x"]) == 2


def _raises(call, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value) and "secret" not in str(error.value)


# ---- with an S3 server


@pytest.fixture(scope="module")
def server(dataset):
    """A server with the dataset at s3://bucket/data; the training chunks are compressed at s3://bucket/packed."""
    folder, _ = dataset
    from helpers import s3

    with s3.serve() as server:
        for file in folder.rglob("*.*"):
            server.client.upload_file(str(file), s3.BUCKET, f"data/{file.relative_to(folder)}")
        yield server


CHECK = """
import sys
from toolkit.data import LitData
data = LitData(sys.argv[1], cache_dir=sys.argv[2]).prepare(tokenizer=None, max_seq_length=16)
data.train[0]
print("litdata" in sys.modules)
"""


@pytest.mark.slow
def test_token_beyond_the_model_in_a_later_chunk_stops_the_run(tmp_path):
    """Only the first chunk is read before the run."""
    for name in ("train", "val"):
        write_chunks(tmp_path / "data" / name, 1, 4000)
    file = tmp_path / "data" / "train" / "chunk-0-5.bin"
    (tmp_path / "data" / "train" / "crc32.npy").unlink()
    content = np.frombuffer(bytearray(file.read_bytes()), np.uint16)
    content[50] = 5000
    file.write_bytes(content.tobytes())
    process = start(*flags_for(tmp_path, "out", **{"data.data_path": f"file://{tmp_path}/data"}))
    _, errors = process.communicate()
    assert process.returncode == 3 and "have token id 5,000, which is not in the model's vocabulary" in errors, errors


@pytest.mark.slow
def test_litdata_is_imported_by_the_worker_only(dataset, server, tmp_path):
    for path in (str(dataset[0]), "s3://bucket/data"):
        words = [sys.executable, "-c", CHECK.replace(", cache_dir=sys.argv[2]", "") if "://" not in path else CHECK]
        done = subprocess.run(
            [*words, path, str(tmp_path)], env=os.environ | server.environ, capture_output=True, text=True
        )
        assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def flags_for(tmp_path: Path, out: str, **more) -> list[str]:
    flags = {"data.data_path": "s3://bucket/data", "data.cache_dir": tmp_path / f"cache-{out.partition('-')[0]}"}
    flags |= {"train.global_batch_size": 8, "train.micro_batch_size": 2, "train.max_seq_length": T}
    flags |= {"train.max_steps": 60, "train.save_interval": 5, "out_dir": tmp_path / out, "resume": "auto"}
    flags |= {"eval.interval": 20, "accelerator": "cpu", "model_config.vocab_size": VOCABULARY} | more
    words = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return ["-m", "toolkit", "pretrain", "pico-llama", "--data", "LitData", *words]


def run(tmp_path: Path, out: str, environ: dict[str, str], **more) -> None:
    done = start(*flags_for(tmp_path, out, **more), **environ)
    _, errors = done.communicate()
    assert done.returncode == 0, errors


@pytest.mark.slow
def test_n3_streamed_chunks_are_one_curve_and_downloaded_once(server, tmp_path):
    """Also with faults of the storage; about five epochs."""
    curves = {}
    for devices in (1, 2, 4):
        before = dict(server.faults.requests)
        server.faults = type(server.faults)(error_500=0.1, cut_request=0.05, cut_response=0.05, seed=devices)
        run(tmp_path, f"run-{devices}", server.environ, devices=devices, **{
            "train.micro_batch_size": 2, "data.cache_dir": tmp_path / f"cache-{devices}"
        })  # fmt: skip
        curves[devices] = losses(tmp_path / f"run-{devices}")
        assert server.faults.done["error_500"] + server.faults.done["cut_response"] > 0, before
    for devices in (2, 4):
        np.testing.assert_allclose(curves[devices], curves[1], rtol=1e-5)
    for name, more, most in (("counted", {}, 1), ("bounded", {"data.max_cache_gb": 9e-6}, 3)):  # in 2.04 epochs
        server.faults = type(server.faults)()
        run(tmp_path, name, server.environ, devices=2, **more)
        chunks = {path: n for path, n in server.faults.paths.items() if path.endswith(".bin")}
        assert max(chunks.values()) <= most and len(chunks) == 10 + 3, chunks
        assert losses(tmp_path / name) == curves[2]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "workers"), [(1, 0), (1, 2), (2, 0)])
def test_s2_run_killed_at_random_is_bit_equal(server, tmp_path, devices, workers):
    """Also with an empty cache for each second launch, and a budget that evicts chunks; faults of the storage."""
    rng, kills = random.Random(devices + workers), 0
    more = {"devices": devices, "data.num_workers": workers, "data.max_cache_gb": 9e-6}
    server.faults = type(server.faults)()
    run(tmp_path, "whole", server.environ, **more)
    server.faults = type(server.faults)(error_500=0.1, cut_response=0.1, seed=workers)
    while kills < 4:
        process = start(*flags_for(tmp_path, "killed", **more), **server.environ)
        read_until(process, f"saved {tmp_path}/killed/step-")
        threading.Timer(rng.random() * 2, os.killpg, (process.pid, signal.SIGKILL)).start()
        process.communicate()
        kills += 1
        if (tmp_path / "killed" / "final" / "COMPLETE").exists():
            break
        shutil.rmtree(tmp_path / "cache-killed", ignore_errors=kills % 2 == 1)
    run(tmp_path, "killed", server.environ, **more)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert_same_weights(tmp_path / "killed" / "final", tmp_path / "whole" / "final")


@pytest.mark.slow
def test_a_stub_of_the_hub_and_plain_http_give_the_same_run(dataset, server, tmp_path):
    folder, _ = dataset
    server.faults = type(server.faults)()
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}
    with Hub() as hub:
        hub.add("datasets/acme/chunks", {f"data/{name}": content for name, content in files.items()})
        urls = {"hub": "hf://datasets/acme/chunks/data", "http": f"{hub.url}/datasets/acme/chunks/resolve/main/data"}
        environ = server.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        for name, url in (urls | {"s3": "s3://bucket/data"}).items():
            run(tmp_path, name, environ, **{"data.data_path": url, "train.max_steps": 12})
    assert losses(tmp_path / "hub") == losses(tmp_path / "http") == losses(tmp_path / "s3")


@pytest.mark.slow
def test_storage_that_fails_ends_the_run_with_one_line(dataset, server, tmp_path, small_disk):
    """A chunk that is missing, a key that is wrong, a cache disk that is full."""
    server.faults = type(server.faults)()
    cases = [
        ({}, server.environ | {"AWS_ACCESS_KEY_ID": "wrong"}, "access denied"),
        ({"data.data_path": "s3://nowhere/data"}, server.environ, "no such bucket|no such file"),
    ]
    for more, environ, message in cases:
        process = start(*flags_for(tmp_path, "bad", **more), **environ)
        _, errors = process.communicate()
        assert process.returncode == 2 and len(errors.strip().splitlines()[-1:]) == 1, errors
        assert "Traceback" not in errors and "not-a-real-secret" not in errors
        assert re.search(message, errors), errors
    cache = small_disk("1m") / "cache"
    (cache.parent / "filler").write_bytes(bytes(900_000))
    process = start(*flags_for(tmp_path, "full", **{"data.cache_dir": cache}), **server.environ)
    _, errors = process.communicate()
    assert process.returncode in (2, 3) and "Traceback" not in errors and "No space left" in errors, errors
    server.client.delete_object(Bucket="bucket", Key="data/train/chunk-0-4.bin")
    try:
        process = start(*flags_for(tmp_path, "bad"), **server.environ)
        _, errors = process.communicate()
        assert process.returncode == 3 and "chunk-0-4.bin: is missing, but index.json lists it" in errors, errors
        assert "Traceback" not in errors
    finally:
        file = dataset[0] / "train" / "chunk-0-4.bin"
        server.client.upload_file(str(file), "bucket", "data/train/chunk-0-4.bin")
