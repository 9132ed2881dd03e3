"""The token store: rows across chunks, the loss mask, LitData's reader and writer, and damage (S4, S5, S7)."""

import pickle
import random
import re

import numpy as np
import pytest
import torch
from helpers.cases import check_each
from helpers.damage import edit_json, flip

from toolkit.data.tokens import chunks, token_store
from toolkit.data.tokens.token_store import BlockDataset, ChunkBlockDataset, TokenStore, TokenWriter
from toolkit.errors import DataError

BLOCK = 17
CHUNK = 5 * BLOCK + 3  # no multiple of the block, and not of a piece


@pytest.fixture(params=[np.uint16, np.int32])
def written(request, tmp_path, monkeypatch):
    """Return (tokens, folder) of 1,000 tokens in 12 chunks."""
    monkeypatch.setattr(chunks, "PIECE", 50)
    monkeypatch.setattr(token_store, "PIECE", 50)
    tokens = np.random.default_rng(0).integers(0, 60_000, 1000).astype(request.param)
    assert write(tokens, tmp_path / "s") == 1000
    return tokens, tmp_path / "s"


def write(tokens, folder, per_chunk=CHUNK) -> int:
    """Write tokens in parts of unequal size."""
    writer = TokenWriter(folder, tokens.dtype, tokens_per_chunk=per_chunk)
    for part in np.split(tokens, [0, 1, 7, 300, 301, len(tokens) - 1]):
        writer.add(part)
    return writer.finish()


def blocks_of(rows) -> list[list[int]]:
    return [[*row["input_ids"].tolist(), row["labels"][-1].item()] for row in map(rows.__getitem__, range(len(rows)))]


def test_rows_of_any_length_and_range_equal_the_written_tokens(written):
    """Rows span chunks; the store does not depend on their length."""
    tokens, folder = written
    assert len(list((folder / "tokens").glob("*.bin"))) == 12
    for block_size, start, stop in ((BLOCK, 0, None), (BLOCK, 700, 985), (200, 3, 1000), (5, 990, 994)):
        rows = BlockDataset(TokenStore(folder), block_size, start, stop)
        expected = tokens[start:stop].astype(np.int64)
        n = len(expected) // block_size
        assert len(rows) == n and rows.tail_tokens == len(expected) - n * block_size
        for i in random.Random(0).sample(range(n), n):
            block = torch.from_numpy(expected[i * block_size : (i + 1) * block_size])
            assert torch.equal(rows[i]["input_ids"], block[:-1]) and torch.equal(rows[i]["labels"], block[1:])
            assert rows[i]["input_ids"].dtype == torch.int64
        for outside in (-1, n):
            with pytest.raises(IndexError):
                rows[outside]
    assert TokenStore(folder).tokens(85, 85).size == 0
    for start, stop in ((0, 1001), (-1, 5), (900, 800)):
        with pytest.raises(ValueError, match="has no tokens"):
            BlockDataset(TokenStore(folder), BLOCK, start, stop)


def test_litdata_reads_the_same_tokens(written):
    from litdata import StreamingDataset, TokensLoader

    tokens, folder = written
    dataset = StreamingDataset(str(folder / "tokens"), item_loader=TokensLoader(block_size=8))  # 8 divides the chunks
    assert [dataset[i].tolist() for i in range(len(dataset))] == tokens.reshape(-1, 8).tolist()


def test_files_equal_those_of_litdatas_writer(written, tmp_path):
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    tokens, folder = written
    writer = BinaryWriter(str(tmp_path / "litdata"), chunk_size=CHUNK, item_loader=TokensLoader())
    for i, start in enumerate(range(0, len(tokens), CHUNK)):
        writer[i] = torch.from_numpy(tokens[start : start + CHUNK])
    writer.done()
    (tmp_path / "litdata" / f"{writer.rank}.index.json").rename(tmp_path / "litdata" / "index.json")
    expected = {file.name: file.read_bytes() for file in (tmp_path / "litdata").iterdir()}
    assert len(expected) == 13
    found = {file.name: file.read_bytes() for file in (folder / "tokens").iterdir() if file.name != "crc32.npy"}
    assert found.keys() == expected.keys() and [n for n in found if found[n] != expected[n]] == []


def test_integer_types_are_numbered_as_in_litdata():
    from litdata.constants import _NUMPY_DTYPES_MAPPING, _TORCH_DTYPES_MAPPING

    numpy_types = {n: dtype.name for n, dtype in _NUMPY_DTYPES_MAPPING.items() if dtype.kind in "iu"}
    torch_types = {n: str(dtype).removeprefix("torch.") for n, dtype in _TORCH_DTYPES_MAPPING.items()}
    assert numpy_types == chunks._NUMPY_TYPES
    assert {n: name for n, name in torch_types.items() if "int" in name} == chunks._TENSOR_TYPES


def test_litdata_optimize_output_is_readable(tmp_path):
    """litdata.optimize writes several items and a tail per chunk; rows do not span chunks, as in LitData."""
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    documents = [np.arange(n, dtype=np.int64) + 100 * n for n in (30, 50, 20, 40)]
    writer = BinaryWriter(str(tmp_path), chunk_size=80, item_loader=TokensLoader())
    for i, document in enumerate(documents):
        writer[i] = torch.from_numpy(document)
    writer.done()
    writer.merge()
    rows = ChunkBlockDataset(TokenStore(tmp_path), BLOCK)
    assert len(rows) == 7 and rows.tail_tokens == 80 % BLOCK + 60 % BLOCK
    in_chunks = [np.concatenate(documents[:2]), np.concatenate(documents[2:])]
    assert blocks_of(rows) == [
        c[i : i + BLOCK].tolist() for c in in_chunks for i in range(0, len(c) - BLOCK + 1, BLOCK)
    ]


def test_loss_mask_has_a_value_for_each_token(tmp_path):
    rng = np.random.default_rng(0)
    samples = [(rng.integers(0, 300, n), rng.random(n) < 0.5) for n in (3, 0, 40, 1, 90)]
    writer = TokenWriter(tmp_path, np.uint16, with_loss_mask=True, tokens_per_chunk=32)
    for ids, mask in samples:
        writer.add(ids.tolist(), mask.tolist())
    assert writer.finish() == 134 and writer.largest_token == max(ids.max(initial=0) for ids, _ in samples)
    found = TokenStore(tmp_path)
    for start, stop in ((0, 134), (30, 70), (43, 44)):
        ids, mask = (np.concatenate(parts)[start:stop] for parts in zip(*samples, strict=True))
        assert np.array_equal(found.tokens(start, stop), ids) and np.array_equal(found.loss_mask(start, stop), mask)
    assert found.loss_mask(0, 3).dtype == np.bool_


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    for ids, mask in (([1, 65_536], None), ([-1], None), ([1, 2], [True])):
        with pytest.raises((AssertionError, ValueError)):
            TokenWriter(tmp_path, np.uint16).add(ids, mask)
    assert TokenWriter(tmp_path / "empty", np.uint16).finish() == 0


def test_number_of_open_files_is_bounded_and_a_store_is_picklable(written, monkeypatch):
    monkeypatch.setattr(chunks, "_OPEN_CHUNKS", 3)
    monkeypatch.setattr(chunks, "_arrays", type(chunks._arrays)())  # other tests' may still be open
    rows = BlockDataset(TokenStore(written[1]), BLOCK)
    expected = blocks_of(rows)
    assert len(rows.store.array._open) == 3
    copy = pickle.loads(pickle.dumps(rows))
    assert copy.store.array._open == {} and blocks_of(copy) == expected
    assert len(rows.store.array._open) + len(copy.store.array._open) == 3, "the limit applies to the process"


def test_size_does_not_depend_on_the_number_of_ranks(written, monkeypatch):
    """StreamingDataset divides its length by the world size; these rows are global, and no rank waits for another."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    tokens, folder = written
    write(tokens, folder.parent / "again")
    for path in (folder, folder.parent / "again"):
        assert np.array_equal(TokenStore(path).tokens(0, 1000), tokens)


HOSTILE = ["../secret.bin", "/etc/passwd", "a/b.bin", "..\\secret.bin", "..", "", "x\0.bin", None, 3]


def test_s4_index_cannot_point_outside_its_folder(written):
    _, folder = written
    (folder / "secret.bin").write_bytes((folder / "tokens" / "chunk-0-0.bin").read_bytes())
    for name in HOSTILE:
        edit_json(folder / "tokens/index.json", lambda index, name=name: index["chunks"][0].update(filename=name))
        with pytest.raises(ValueError, match="only plain file names"):
            TokenStore(folder)


def test_damaged_index_or_missing_chunk_is_an_error(written):
    _, folder = written
    index = folder / "tokens" / "index.json"
    intact = index.read_text()
    edits = [
        (lambda i: i["config"].update(data_format=["pickle"]), "is not of integers"),
        (lambda i: i["config"].update(data_format=["no_header_tensor:0"]), "is not of integers"),
        (lambda i: i["config"].update(data_format=["no_header_tensor:99"]), "is not of integers"),
        (lambda i: i["config"].update(data_format=None), "is not of integers"),
        (lambda i: i["config"].update(compression="zstd"), "compressed"),
        (lambda i: i["chunks"][0].update(dim=None), "token chunks"),
        (lambda i: i["chunks"][0].update(dim=-5), "token chunks"),
        (lambda i: i["chunks"][0].update(dim=10**9), "truncated"),
        (lambda i: i["chunks"][0].update(filename="chunk-9-9.bin"), "is missing"),
        (lambda i: i.update(chunks=i["chunks"][:3]), "crc32.npy does not belong"),
        (lambda i: i.pop("chunks"), "token chunks"),
        (lambda i: i.pop("config"), "not an index"),
    ]

    def check(edit, message) -> None:
        index.write_text(intact)
        edit_json(folder / "tokens/index.json", edit)
        with pytest.raises(ValueError, match=message):
            TokenStore(folder)

    check_each(check, edits)
    for content in (b"", b"{", b"[]", b"\xff"):
        index.write_bytes(content)
        with pytest.raises(ValueError, match="not an index"):
            TokenStore(folder)


def test_a_negative_token_is_named_with_its_chunk(tmp_path):
    write(np.arange(200, dtype=np.int32), tmp_path)
    chunk = tmp_path / "tokens" / "chunk-0-1.bin"
    content = bytearray(chunk.read_bytes())
    content[-4:] = np.int32(-7).tobytes()
    chunk.write_bytes(content)
    (tmp_path / "tokens" / "crc32.npy").unlink()  # as chunks of others
    for read in (lambda array: array.survey(), lambda array: array.read(0, 200)):
        with pytest.raises(DataError, match=r"chunk-0-1.bin: has a negative token, -7; restore this file"):
            read(TokenStore(tmp_path).array)


def test_s7_damage_is_found_and_named_on_reading(written, monkeypatch):
    """Also where the store is too large to verify before a run, or is damaged in a running one."""
    tokens, folder = written
    chunk = folder / "tokens" / "chunk-0-3.bin"
    content = chunk.read_bytes()

    def damaged(reason: str) -> str:
        rows = BlockDataset(TokenStore(folder), BLOCK)
        good = [rows[i]["input_ids"] for i in (0, 1)]  # of another chunk and piece
        assert np.array_equal(torch.cat(good), np.delete(tokens[: 2 * BLOCK], [BLOCK - 1, 2 * BLOCK - 1]))
        fix = f"delete {folder} and prepare the data again"
        with pytest.raises(DataError, match=re.escape(f"{chunk}: {reason}") + f".*; {fix}") as error:
            rows[20]
        assert "\n" not in str(error.value)

    flip(chunk, -1)
    damaged("checksum mismatch")
    monkeypatch.setattr(chunks, "_STAT_CHUNKS", 2)  # sizes are not looked at before
    chunk.write_bytes(content[:-1])
    damaged("is truncated")
    chunk.unlink()
    chunk.mkdir()
    with pytest.raises(ValueError, match="chunk-0-3.bin is missing"):
        TokenStore(folder)
    rows = BlockDataset(pickle.loads(pickle.dumps(store_before(folder, chunk, content))), BLOCK)
    with pytest.raises(DataError, match="chunk-0-3.bin: cannot be read: No such file"):
        rows[20]


def store_before(folder, chunk, content) -> TokenStore:
    """Open a store whose chunk then disappears."""
    chunk.rmdir()
    chunk.write_bytes(content)
    opened = TokenStore(folder)
    chunk.unlink()
    return opened


def test_truncated_chunk_is_named_before_a_run(written):
    _, folder = written
    chunk = folder / "tokens" / "chunk-0-3.bin"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"chunk-0-3.bin is truncated"):
        TokenStore(folder)


def test_damaged_checksums_are_a_value_error(written):
    """numpy reads the header as Python, and raises tokenize's errors."""
    path = written[1] / "tokens" / "crc32.npy"
    content = path.read_bytes()
    for damaged in (content.replace(b", }", b", "), content.replace(b"(", b"\xff"), content[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="crc32.npy is damaged: "):
            TokenStore(written[1])


@pytest.fixture
def unverified(written):
    """Return the tokens and the chunks, without checksums, as LitData writes them."""
    tokens, folder = written
    (folder / "tokens" / "crc32.npy").unlink()
    return tokens, folder / "tokens"


def change(folder, chunk: int, position: int, value: int) -> None:
    """Set one token of one chunk in its file."""
    array = TokenStore(folder).array
    values = np.memmap(folder / array.files[chunk], array.dtype, "r+", array.headers[chunk])
    values[position] = value
    values.flush()


def test_s5_survey_detects_an_overwritten_token_in_any_chunk(unverified):
    tokens, folder = unverified
    for number, chunk in enumerate((0, 5, 11)):
        before = TokenStore(folder).array.survey()
        assert before == TokenStore(folder).array.survey() and before[1] == tokens.max()
        change(folder, chunk, 7, 65_000 + number)
        tokens[chunk * CHUNK + 7] = 65_000 + number
        digest, largest = TokenStore(folder).array.survey()
        assert digest != before[0] and largest == 65_000 + number


def test_large_data_is_sampled_including_chunk_ends(unverified, monkeypatch):
    monkeypatch.setattr(chunks, "_READ_ALL_BYTES", 0)
    monkeypatch.setattr(chunks, "_SAMPLE", 3)
    _, folder = unverified
    seen = [len(part) for part in TokenStore(folder).array._samples()]
    assert seen == [3] * (11 * chunks._SAMPLES) + [32]  # the last chunk is small, and read
    for chunk in range(12):
        for token in (0, -1):
            before = TokenStore(folder).array.survey()[0]
            change(folder, chunk, token, 65_000 + chunk % 2)
            digest, largest = TokenStore(folder).array.survey()
            assert digest != before and largest == 65_000 + (chunk > 0)
    monkeypatch.setattr(chunks, "_STAT_CHUNKS", 4)  # of many chunks, a bounded number is sampled
    assert len(list(TokenStore(folder).array._samples())) == 3 * chunks._SAMPLES + 1
