"""Open LitData chunks that are downloaded or decompressed while a run trains."""

from __future__ import annotations

import glob
import hashlib
from typing import Any, NamedTuple

from toolkit.data.base import Report, TokenDataset, Values
from toolkit.data.cache import CRC_FILE, DAMAGE_ERRORS, MANIFEST, choose_cache_dir, hash_inputs
from toolkit.data.sft.readers import require_pyarrow
from toolkit.data.streamed.chunk_segments import ChunkSegments
from toolkit.data.streamed.hub_files import open_url
from toolkit.data.streamed.open_text import require_budget
from toolkit.data.streamed.stream import Stream
from toolkit.data.streamed.stream_reader import StreamReader
from toolkit.data.streamed.streamed_rows import RowSpans, SegmentRows, StreamedRows
from toolkit.data.tokenizer import ENDS_FILE, Tokenizer
from toolkit.data.tokens.chunks import INDEX
from toolkit.data.tokens.token_store import SPLITS, TOKENS, TokenStore
from toolkit.errors import UserError, count_of
from toolkit.io.atomic import write_atomic
from toolkit.io.safe_parse import MAX_BYTES, parse_json
from toolkit.io.source_files import find_files, listing_hash
from toolkit.io.storage import is_url, open_storage, storage_errors
from toolkit.io.tempfiles import sweep

_TOKENIZER_FILES = (  # by name, as some storage cannot be listed
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json", ENDS_FILE,
)  # fmt: skip


class ChunkRows(NamedTuple):
    """The rows of downloaded chunks.

    Args:
        content: Identifies the content, for the content key.
        largest: The largest token id; of chunks that others wrote, in the first chunk.
        is_largest_known: Whether all chunks were read for ``largest``.
        summary: Log line.
    """

    train: TokenDataset
    val: TokenDataset | None
    content: bytes
    largest: int
    is_largest_known: bool
    summary: str


def find_folders(value: str) -> list[str]:
    """Return the folders of a path or glob, local or remote, sorted. A path without a pattern is returned as it is."""
    value = value.rstrip("/")
    if not glob.has_magic(value):
        return [_pin(value) if value.startswith("hf://") else value]
    where = f"--data.data_path {value}"
    with storage_errors(where, value):
        fs, path = open_storage(value)
        names = [name for name, info in fs.glob(path, detail=True).items() if info["type"] == "directory"]
        folders = [fs.unstrip_protocol(name) if is_url(value) else name for name in names]
    if not folders:
        raise UserError(f"{where}: no folder matches; check the pattern")
    return sorted(folders)


def open_chunks(options: Any, folders: list[str], block_size: int, report: Report) -> ChunkRows:
    """Open the rows of a :class:`toolkit.data.LitData` whose chunks are downloaded or decompressed while a run trains.

    Rows do not span chunks. In a folder that prepare_data wrote, the splits share chunks: a row with tokens of both is
    in neither.

    Raises:
        UserError: The storage fails, an index is invalid, or a split has no row.
    """
    where = f"--data.data_path {options.data_path}"
    try:
        train, val, splits, facts = _open_splits(options, where, folders, report)
        train_spans = train.require_rows(where, splits["train"], block_size)
        val_spans = [] if val is None else val.require_rows(where, splits["val"], block_size)
        (segment, _, n_rows), *_ = train_spans
        train.wait(segment)
        if val is not None:  # a mistake in either shows before the first step
            val.wait(val_spans[0][0])
        first = train.stream.segment_folder(segment)
        largest = int(facts["largest_token"]) if facts else TokenStore(first).array.survey()[1]
        train.reader.max_bytes = require_budget(options.max_cache_gb, train.stream, segment)
    except DAMAGE_ERRORS as error:
        raise error if isinstance(error, UserError) else UserError(f"{where}: {error}") from error
    rows, n_train = SegmentRows(train.reader, block_size), sum(stop - start for _, start, stop in train_spans)
    sizes = [size // block_size for size in train.source.sizes]
    held_out = {number: sizes[number] - stop for number, _, stop in train_spans if stop < sizes[number]}
    val_rows, keys = None, [train.key]
    if val is not None:
        val_rows = RowSpans(rows if val is train else SegmentRows(val.reader, block_size), val_spans)
        keys.append(val.key)
    numbers = [number for number, _, _ in train_spans]
    return ChunkRows(
        StreamedRows(rows, segment, n_rows, held_out, numbers=numbers, epoch_rows=n_train),
        val_rows,
        hash_inputs([splits, facts, *keys]).encode(),
        largest,
        bool(facts),
        f"{n_train:,} train rows of {block_size - 1:,} tokens in {count_of(len(numbers), 'chunk')}, read ahead of the "
        f"run; {'no val rows' if val_rows is None else f'{len(val_rows):,} val rows'}",
    )


def read_tokenizer(folder: str, where: str, report: Report) -> Tokenizer | None:
    """Return the tokenizer that prepare_data has written with the tokens; None if there is none."""
    url = f"{folder}/tokenizer"
    files = {name: content for name in _TOKENIZER_FILES if (content := _fetch(where, f"{url}/{name}", required=False))}
    if not files:
        return None
    report(f"Data: checkpoints get the tokenizer of the data, {url}")
    try:
        return Tokenizer(files, url)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _open_splits(
    options: Any, where: str, folders: list[str], report: Report
) -> tuple[_Chunks, _Chunks | None, Values, Values]:
    """Return the chunks of both splits, their token ranges, and the manifest, which is empty if there is none.

    A prepared text has both splits in the same chunks, and their ranges in the manifest; all others a folder per split.
    """
    names = tuple(options.split_names or ("",))
    manifest = None
    if names == SPLITS and len(folders) == 1:
        manifest = _fetch(where, f"{folders[0]}/{MANIFEST}", required=False)
    facts = {} if manifest is None else parse_json(manifest)
    if "splits" in facts:
        chunks = _Chunks(options, where, [f"{folders[0]}/{TOKENS}"], report)
        return chunks, chunks if facts["splits"]["val"] else None, facts["splits"], facts
    urls = ([f"{folder}/{name}".rstrip("/") for folder in folders] for name in names)
    train, *rest = [_Chunks(options, where, split, report) for split in urls]
    val = rest[0] if rest else None
    return train, val, {"train": train.all_tokens, "val": val and val.all_tokens}, facts


class _Chunks:
    """The stream of one or more folders of chunks, cached by the content of their indexes."""

    def __init__(self, options: Any, where: str, urls: list[str], report: Report) -> None:
        fetched = [(_fetch(where, f"{url}/{INDEX}"), _fetch(where, f"{url}/{CRC_FILE}", False)) for url in urls]
        key = hash_inputs(
            [
                [
                    hashlib.sha256(index or b"").hexdigest(),
                    hashlib.sha256(crc).hexdigest() if crc else _version(url, where),
                ]
                for url, (index, crc) in zip(urls, fetched, strict=True)
            ]
        )
        cache_dir = choose_cache_dir(options.cache_dir)
        folder = cache_dir / f"chunks-{key[:16]}"
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            sweep(cache_dir)
            for i, pair in enumerate(fetched):
                for name, content in zip((INDEX, CRC_FILE), pair, strict=True):
                    path = folder / "chunks" / str(i) / name
                    if content is not None:
                        write_atomic(path, content)
            self.source = ChunkSegments(folder / "chunks", urls)
            if any(index.compression for index in self.source.indexes):
                require_pyarrow()
            self.stream = Stream(folder, self.source, None)
            self.stream.save()
        except OSError as error:
            raise UserError(f"--data.cache_dir {cache_dir}: cannot be used: {error.strerror or error}") from error
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        if not self.source.is_verified:
            report(f"Data: {urls[0]}: not verified: it has no checksums ({CRC_FILE})")
        self.reader = StreamReader(self.stream, 1, None, report)
        self.key, self.all_tokens = key, [0, sum(self.source.sizes)]

    def wait(self, segment: int) -> None:
        """Wait until a chunk is in the cache."""
        self.reader.wait(segment, [segment], [])

    def require_rows(self, where: str, tokens: list[int], block_size: int) -> list[tuple[int, int, int]]:
        """Return (segment, first row, end row) of the rows whose tokens are all in [start, stop), at least one."""
        spans, begin = list[tuple[int, int, int]](), 0
        for segment, size in enumerate(self.source.sizes):
            start = max(0, -(-(tokens[0] - begin) // block_size))
            end = (min(size, tokens[1] - begin)) // block_size
            if start < end:
                spans.append((segment, start, end))
            begin += size
        if not spans:
            raise UserError(
                f"{where}: no chunk in {self.source.urls[0]} has a row of {block_size:,} tokens "
                "(--train.max_seq_length + 1); provide more text or reduce --train.max_seq_length"
            )
        return spans


def _version(url: str, where: str) -> list[str]:
    """Identify chunks without checksums: by the storage's versions of the files, else by the URL."""
    if url.startswith(("http://", "https://")):  # cannot be listed
        return [url]
    try:
        files = find_files(url, where)
    except UserError:  # reading may be allowed, and listing not
        return [url]
    has_versions = all(file.version for file in files) or not is_url(url)
    return [listing_hash(files), *([] if has_versions else [url])]


def _pin(url: str) -> str:
    """Return the URL of a folder on the hub at its current commit."""
    repository, folder = open_url(url, f"--data.data_path {url}")
    return f"hf://datasets/{repository.repo_id}@{repository.commit}/{folder}".rstrip("/")


def _fetch(where: str, url: str, required: bool = True) -> bytes | None:
    """Return the content of a file. Return None for a missing one that is not required."""
    hint = " (see --data.split_names; or an upload is unfinished)" if required and url.endswith(INDEX) else ""
    with storage_errors(f"{where}: {url}{hint}" if is_url(url) else where, url):
        fs, path = open_storage(url)
        try:
            with fs.open(path, "rb") as file:
                content = file.read(MAX_BYTES["JSON"] + 1)
        except (FileNotFoundError, PermissionError):  # S3 denies a missing file to those who may not list
            if required:
                raise
            return None
        if len(content) > MAX_BYTES["JSON"]:
            raise UserError(f"{where}: {url}: larger than {MAX_BYTES['JSON']:,} bytes, the maximum for an index")
        return content
