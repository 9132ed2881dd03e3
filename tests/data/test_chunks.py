import json
import pickle
import random

import numpy as np
import pytest
import torch

from toolkit.data.tokens import chunks
from toolkit.data.tokens.chunks import TokenRows, write_chunks

BLOCK = 17


@pytest.fixture(params=[np.uint16, np.int32])
def written(request, tmp_path, monkeypatch):
    """Return (tokens, folder) of 1,000 tokens in chunks of 5 blocks."""
    monkeypatch.setattr(chunks, "_TOKENS_PER_CHUNK", 5 * BLOCK + 3)
    tokens = np.random.default_rng(0).integers(0, 60_000, 1000).astype(request.param)
    assert write_chunks(tokens, tmp_path / "c", BLOCK) == 1000 % BLOCK
    return tokens, tmp_path / "c"


def edit_index(folder, edit):
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    (folder / "index.json").write_text(json.dumps(index))


def test_rows_equal_the_written_tokens(written):
    tokens, folder = written
    rows = TokenRows(folder, BLOCK)
    assert len(rows) == 1000 // BLOCK and rows.tail_tokens == 0
    assert len(list(folder.glob("*.bin"))) == 12
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    for i in order:
        block = torch.from_numpy(tokens[i * BLOCK : (i + 1) * BLOCK].astype(np.int64))
        row = rows[i]
        assert torch.equal(row["input_ids"], block[:-1]) and torch.equal(row["labels"], block[1:])
        assert row["input_ids"].dtype == torch.int64
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[outside]


def test_litdata_reads_the_same_rows(written):
    from litdata import StreamingDataset, TokensLoader

    _, folder = written
    rows = TokenRows(folder, BLOCK)
    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=BLOCK))
    assert len(dataset) == len(rows)
    for i in range(len(rows)):
        assert dataset[i][:-1].tolist() == rows[i]["input_ids"].tolist()


def test_litdata_optimize_output_is_readable(tmp_path):
    """litdata.optimize writes several items and a tail per chunk."""
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    documents = [np.arange(n, dtype=np.int64) + 100 * n for n in (30, 50, 20, 40)]
    writer = BinaryWriter(str(tmp_path), chunk_size=80, item_loader=TokensLoader())
    for i, document in enumerate(documents):
        writer[i] = torch.from_numpy(document)
    writer.done()
    writer.merge()
    rows = TokenRows(tmp_path, BLOCK)
    assert rows.tail_tokens == 80 % BLOCK + 60 % BLOCK
    in_chunks = [np.concatenate(documents[:2]), np.concatenate(documents[2:])]
    expected = [c[i : i + BLOCK].tolist() for c in in_chunks for i in range(0, len(c) - BLOCK + 1, BLOCK)]
    assert [
        [*row["input_ids"].tolist(), row["labels"][-1].item()] for row in map(rows.__getitem__, range(7))
    ] == expected
    assert len(rows) == 7


def test_number_of_open_files_is_bounded(written, monkeypatch):
    monkeypatch.setattr(chunks, "_OPEN_CHUNKS", 3)
    _, folder = written
    rows = TokenRows(folder, BLOCK)
    for i in range(len(rows)):
        rows[i]
    assert len(rows._open) == 3
    assert rows[0]["input_ids"].tolist() == TokenRows(folder, BLOCK)[0]["input_ids"].tolist()


def test_rows_are_picklable(written):
    rows = TokenRows(written[1], BLOCK)
    rows[0]
    copy = pickle.loads(pickle.dumps(rows))
    assert copy._open == {} and torch.equal(copy[5]["labels"], rows[5]["labels"])


HOSTILE = ["../secret.bin", "/etc/passwd", "a/b.bin", "..\\secret.bin", "..", "", "C:x.bin", "x\0.bin", None, 3]


@pytest.mark.parametrize("name", HOSTILE)
def test_s4_index_cannot_point_outside_its_folder(written, name):
    _, folder = written
    (folder.parent / "secret.bin").write_bytes((folder / "chunk-0-0.bin").read_bytes())
    edit_index(folder, lambda index: index["chunks"][0].update(filename=name))
    with pytest.raises(ValueError, match="only plain file names"):
        TokenRows(folder, BLOCK)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: i["config"].update(data_format=["pickle"]), "not a supported token format"),
        (lambda i: i["config"].update(data_format=["no_header_tensor:0"]), "not integers"),
        (lambda i: i["config"].update(data_format=["no_header_tensor:99"]), "not a supported token format"),
        (lambda i: i["config"].update(data_format=None), "not a supported token format"),
        (lambda i: i["config"].update(compression="zstd"), "compressed"),
        (lambda i: i["chunks"][0].update(dim=None), "token chunks"),
        (lambda i: i["chunks"][0].update(dim=-5), "token chunks"),
        (lambda i: i["chunks"][0].update(dim=10**9), "truncated"),
        (lambda i: i["chunks"][0].update(filename="chunk-9-9.bin"), "is missing"),
        (lambda i: i.pop("chunks"), "token chunks"),
        (lambda i: i.pop("config"), "not an index"),
    ],
)
def test_invalid_index_is_an_error(written, edit, message):
    _, folder = written
    edit_index(folder, edit)
    with pytest.raises(ValueError, match=message):
        TokenRows(folder, BLOCK)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_non_index_file_is_an_error(written, content):
    _, folder = written
    (folder / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match="not an index"):
        TokenRows(folder, BLOCK)


def test_truncated_chunk_is_named(written):
    _, folder = written
    chunk = folder / "chunk-0-3.bin"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"chunk-0-3.bin is truncated"):
        TokenRows(folder, BLOCK)


def test_size_does_not_depend_on_the_number_of_ranks(written, monkeypatch):
    """StreamingDataset divides its length by the world size; these rows are global."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    tokens, folder = written
    assert len(TokenRows(folder, BLOCK)) == 1000 // BLOCK
    write_chunks(tokens, folder.parent / "again", BLOCK)  # writing does not wait for other ranks
    assert len(TokenRows(folder.parent / "again", BLOCK)) == 1000 // BLOCK


def overwrite(folder, chunk: int, token: int, value: int) -> None:
    """Set one token of one chunk in its file."""
    rows = TokenRows(folder, BLOCK)
    path = folder / rows._files[chunk]
    tokens = np.memmap(path, rows.dtype, "r+", rows._offsets[chunk], (rows._sizes[chunk],))
    tokens[token] = value
    tokens.flush()


@pytest.mark.parametrize("chunk", [0, 5, 11])
def test_s5_overwritten_token_in_any_chunk_is_detected(written, chunk):
    tokens, folder = written
    before = TokenRows(folder, BLOCK).survey()
    assert before == TokenRows(folder, BLOCK).survey() and before[1] == tokens[: 1000 // BLOCK * BLOCK].max()
    overwrite(folder, chunk, 7, 65_000)
    digest, largest = TokenRows(folder, BLOCK).survey()
    assert digest != before[0] and largest == 65_000


def test_large_data_is_sampled_including_chunk_ends(written, monkeypatch):
    monkeypatch.setattr(chunks, "_READ_ALL_BYTES", 0)
    monkeypatch.setattr(chunks, "_SAMPLE", 3)
    _, folder = written
    seen = [len(part) for part in TokenRows(folder, BLOCK)._samples()]
    assert set(seen) == {3} and len(seen) == 12 * chunks._SAMPLES
    for chunk in range(12):
        for token in (0, -1):
            before = TokenRows(folder, BLOCK).survey()[0]
            overwrite(folder, chunk, token, 65_000 + chunk % 2)
            digest, largest = TokenRows(folder, BLOCK).survey()
            assert digest != before and largest == 65_000 + (chunk > 0)
