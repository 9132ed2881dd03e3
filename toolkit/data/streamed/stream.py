"""Cache of tokenized segments. The first process that needs a segment writes it atomically.

<cache_dir>/streamed-<first 16 hex digits of the key>/
    source.json             the listed files, for other processes
    tokenizer/
    counts/000000.json      token count and broken files of segment 0; kept on eviction
    units/000000/           tokens of segment 0, with a manifest and checksums
    locks/  readers/        file locks, and the requests of reader processes
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.data.base import Report
from toolkit.data.cache import (
    DAMAGE_ERRORS,
    MANIFEST,
    hash_inputs,
    publish,
    read_checksums,
    require_intact,
    staging_folder,
    throttle,
)
from toolkit.data.streamed.files import SourceFile
from toolkit.data.streamed.segments import BrokenFileError, Part, plan_segments, read_part
from toolkit.data.text.documents import DocumentEnds, TextChunk, tokenize
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.store import TokenStore, TokenWriter, token_dtype
from toolkit.errors import DataError
from toolkit.io.atomic import sync_tree, write_json
from toolkit.io.locks import file_lock
from toolkit.io.tempfiles import sweep, temporary_path

CopyId = tuple[int, int]  # inode and mtime (ns) of a segment folder; identifies one copy

CODE_VERSION = 1  # increment if the same files and options give different tokens
SOURCE = "source.json"
_EXPANSION = {".gz": 3, ".zst": 4, "parquet": 2}  # approximate text bytes per file byte


@dataclass(frozen=True)
class SegmentCounts:
    """Token, document and byte counts of a segment.

    Args:
        broken: Maps each broken file's name to the reason. Documents before the damage are in the segment.
    """

    tokens: int
    documents: int
    text_bytes: int
    broken: dict[str, str]


@dataclass(frozen=True)
class Source:
    """Files to tokenize, with the options that determine their documents.

    Args:
        files: Files in segment order.
        segment_bytes: Target segment size in bytes.
        identity: Result of :func:`~toolkit.data.streamed.files.listing_hash`.
        ends: How documents begin and end.
    """

    files: list[SourceFile]
    column: str
    segment_bytes: int
    identity: str
    ends: DocumentEnds = ""

    @cached_property
    def segments(self) -> list[tuple[Part, ...]]:
        return plan_segments(self.files, self.segment_bytes)

    def key(self, tokenizer: list[Any] | str) -> str:
        """Return the cache key: the hex SHA-256 of everything that determines the tokens."""
        ends = filter(None, [self.ends.replace("later", "")])
        return hash_inputs([CODE_VERSION, self.identity, self.column, self.segment_bytes, tokenizer, *ends])

    def text_bytes(self, number: int) -> int:
        """Estimate the text size of a segment in bytes, from file sizes only."""
        parts = ((self.files[part.file], part.total) for part in self.segments[number])
        return sum(_EXPANSION.get(file.compression or file.kind, 1) * file.size // total for file, total in parts)


class Stream:
    """A source with a tokenizer and a cache folder of tokenized segments."""

    def __init__(self, folder: Path, source: Source, tokenizer: Tokenizer) -> None:
        self.folder, self.source, self.tokenizer = folder, source, tokenizer
        for name in ("", "counts", "units", "locks", "readers"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            sweep(folder / name)

    def save(self) -> None:
        """Write the source and tokenizer for :meth:`load`. The source of toolkit 0.1.0 stays as it is for its rule."""
        with file_lock(self.folder / "locks" / "source"):
            exists = (self.folder / SOURCE).exists()
            if not exists:
                tokenizer = self.folder / "tokenizer"
                temporary = temporary_path(tokenizer)
                self.tokenizer.save(temporary)
                sync_tree(temporary)  # the source, which says that it is complete, must not survive without it
                shutil.rmtree(tokenizer, ignore_errors=True)
                temporary.rename(tokenizer)
            if self.source.ends or not exists:
                values = asdict(self.source)
                write_json(self.folder / SOURCE, values | {"unit_bytes": values.pop("segment_bytes")})

    @classmethod
    def load(cls, folder: Path) -> Stream:
        """Open a stream from a folder written by :meth:`save`."""
        values = json.loads((folder / SOURCE).read_bytes())
        values["files"] = [SourceFile(**file) for file in values["files"]]
        values["segment_bytes"] = values.pop("unit_bytes")
        return cls(folder, Source(**values), Tokenizer.load(folder / "tokenizer", flag="the cached tokenizer"))

    def segment_folder(self, number: int) -> Path:
        return self.folder / "units" / f"{number:06d}"

    def counts(self, number: int) -> SegmentCounts | None:
        """Return the saved counts of a segment, or None. Counts survive eviction."""
        with contextlib.suppress(*DAMAGE_ERRORS):
            return SegmentCounts(**json.loads(self._counts_file(number).read_bytes()))
        return None

    def ready(self, number: int) -> SegmentCounts | None:
        """Return the counts of a segment if it can be read now, else None."""
        counts = self.counts(number)
        return counts if counts is not None and (not counts.tokens or self.segment_folder(number).is_dir()) else None

    def prepare(self, number: int, report: Report = lambda line: None, wait: bool = True) -> SegmentCounts | None:
        """Tokenize a segment unless it is in the cache.

        Args:
            wait: Whether to wait if another process is tokenizing the segment.

        Returns:
            The counts, or None if another process is tokenizing the segment and ``wait`` is false.

        Raises:
            StorageError: A file cannot be read.
            OSError: The cache folder cannot be written.
        """
        with file_lock(self._lock_file(number), wait) as lock:
            if lock is None:
                return None
            if (counts := self.ready(number)) is not None:
                return counts
            folder = self.segment_folder(number)
            with staging_folder(folder) as temporary:
                counts = self._tokenize(number, temporary, report)
                write_json(temporary / MANIFEST, asdict(counts))
                if counts.tokens:
                    publish(temporary, folder, lambda: _is_intact(folder))
            write_json(self._counts_file(number), asdict(counts))
            return counts

    def open(self, number: int) -> TokenStore | None:
        """Open the tokens of a segment. Return None if they are missing or damaged; remove damaged ones."""
        copy = self.copy_of(number)
        try:
            return TokenStore(self.segment_folder(number))
        except DAMAGE_ERRORS:
            self.remove_damaged(number, copy)
        return None

    def copy_of(self, number: int) -> CopyId | None:
        """Identify the cached copy of a segment. Return None if the segment is not cached."""
        with contextlib.suppress(OSError):
            status = self.segment_folder(number).stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def remove_damaged(self, number: int, copy: CopyId | None) -> None:
        """Evict a segment if the cached copy is still the damaged one; another process may have replaced it."""
        with contextlib.suppress(OSError), file_lock(self._lock_file(number)):  # one process at a time
            if self.copy_of(number) == copy:
                self.evict(number)
        if copy is not None and self.copy_of(number) == copy:
            raise DataError(f"{self.segment_folder(number)}: is damaged and cannot be removed; delete this folder")

    def evict(self, number: int) -> None:
        """Delete the tokens of a segment, but keep the counts."""
        folder = self.segment_folder(number)
        with contextlib.suppress(OSError):
            gone = temporary_path(folder)
            os.rename(folder, gone)  # atomic, also for readers
            shutil.rmtree(gone, ignore_errors=True)

    def discard_broken(self) -> int:
        """Remove segments with broken files, to read them again. Return the number of segments."""
        broken = [n for n in self.prepared() if (counts := self.counts(n)) is not None and counts.broken]
        for number in broken:
            self._counts_file(number).unlink(missing_ok=True)
            self.evict(number)
        return len(broken)

    def prepared(self) -> list[int]:
        names = sorted(path.stem for path in (self.folder / "counts").glob("*.json"))
        return [int(name) for name in names if name.isdigit()]

    def error_file(self, number: int) -> Path:
        """Return the path where a tokenize worker reports an error for a segment."""
        return self.folder / "readers" / f"unit-{number:06d}.error"

    def _lock_file(self, number: int) -> Path:
        return self.folder / "locks" / f"unit-{number:06d}"

    def _counts_file(self, number: int) -> Path:
        return self.folder / "counts" / f"{number:06d}.json"

    def _tokenize(self, number: int, folder: Path, report: Report) -> SegmentCounts:
        writer, broken = TokenWriter(folder, token_dtype(self.tokenizer.vocab_size)), dict[str, str]()
        documents = size = 0
        report_progress = throttle(report)
        for chunks, ids in tokenize(segment_texts(self.source, number, broken), self.tokenizer, self.source.ends):
            writer.add(ids)
            documents += sum(chunk.ends_document for chunk in chunks)
            size += sum(len(chunk.text.encode()) for chunk in chunks)
            report_progress(f"Data: tokenized {size / 1e6:,.0f} MB of text of segment {number:,}")
        return SegmentCounts(writer.finish(), documents, size, broken)


def segment_texts(source: Source, number: int, broken: dict[str, str]) -> Iterator[TextChunk]:
    """Yield the documents of a segment. Add damaged files to ``broken`` as {name: reason}.

    Raises:
        StorageError: The storage fails.
    """
    for part in source.segments[number]:
        file, is_open = source.files[part.file], False
        try:
            for chunk in read_part(file, part, source.column):
                is_open = not chunk.ends_document
                yield chunk
        except BrokenFileError as error:
            broken[file.name] = str(error)
            if is_open:
                yield TextChunk("", True)


def _is_intact(folder: Path) -> bool:
    with contextlib.suppress(*DAMAGE_ERRORS):
        require_intact(folder, read_checksums(folder))
        return True
    return False
