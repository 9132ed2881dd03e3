"""Cache of segments: tokenized text, or downloaded chunks. The first process that needs one writes it atomically.

<cache_dir>/streamed-<first 16 hex digits of the key>/      chunks-<...>/ for chunks
    source.json             the source, for other processes; of chunks, one per URL: <hash>-source.json
    tokenizer/              of text
    chunks/                 of chunks: their indexes
    counts/000000.json      token count and broken files of segment 0; kept on eviction
    units/000000/           tokens of segment 0, with a manifest and checksums
    locks/  readers/        file locks, and the requests of reader processes
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from toolkit.data.base import Report
from toolkit.data.cache import DAMAGE_ERRORS, MANIFEST, publish, staging_folder
from toolkit.data.streamed.chunk_segments import ChunkSegments
from toolkit.data.streamed.source import SegmentCounts, Source, TextSegments
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.token_store import TokenStore
from toolkit.errors import DataError
from toolkit.io.atomic import sync_tree, write_json
from toolkit.io.locks import file_lock
from toolkit.io.source_files import SourceFile
from toolkit.io.tempfiles import sweep, temporary_path

CopyId = tuple[int, int]  # inode and mtime (ns) of a segment folder; identifies one copy

SOURCE = "source.json"


class Stream:
    """A source and its cache folder; of text, with the tokenizer."""

    def __init__(self, folder: Path, source: Source, tokenizer: Tokenizer | None) -> None:
        self.folder, self.source, self.tokenizer = folder, source, tokenizer
        for name in ("", "counts", "units", "locks", "readers"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            sweep(folder / name)

    def save(self) -> None:
        """Write the source and tokenizer for :meth:`load`. The source of toolkit 0.1.0 stays as it is for its rule."""
        with file_lock(self.folder / "locks" / "source"):
            exists = (saved := self.folder / f"{self.source.origin}{SOURCE}").exists()
            if not exists and self.tokenizer is not None:
                tokenizer = self.folder / "tokenizer"
                temporary = temporary_path(tokenizer)
                self.tokenizer.save(temporary)
                sync_tree(temporary)  # the source, which says that it is complete, must not survive without it
                shutil.rmtree(tokenizer, ignore_errors=True)
                temporary.rename(tokenizer)
            if not exists or getattr(self.source, "ends", False):
                write_json(saved, self.source.to_json())

    @classmethod
    def load(cls, folder: Path, origin: str = "") -> Stream:
        """Open a stream from a folder written by :meth:`save`, with the source of this :attr:`Source.origin`."""
        values = json.loads((folder / f"{origin}{SOURCE}").read_bytes())
        if "urls" in values:
            return cls(folder, ChunkSegments(folder / "chunks", values["urls"]), None)
        values["files"] = [SourceFile(**file) for file in values["files"]]
        values["segment_bytes"] = values.pop("unit_bytes")
        return cls(
            folder, TextSegments(**values), Tokenizer.load(folder / "tokenizer", "the cached tokenizer", is_own=True)
        )

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

    def prepare(self, number: int, report: Report = lambda line: None, wait: bool = True) -> SegmentCounts:
        """Write a segment unless it is in the cache. Return its counts.

        Args:
            wait: Whether to wait if another process is writing the segment.

        Raises:
            StorageError: A file cannot be read.
            BlockingIOError: Another process is writing the segment, and ``wait`` is false.
            OSError: The cache folder cannot be written.
        """
        with file_lock(self._lock_file(number), wait) as lock:
            if lock is None:
                raise BlockingIOError
            if (counts := self.ready(number)) is not None:
                return counts
            folder = self.segment_folder(number)
            with staging_folder(folder) as temporary:
                counts = self.source.write(number, temporary, self.tokenizer, report)
                write_json(temporary / MANIFEST, asdict(counts))
                if counts.tokens:
                    publish(temporary, folder)
            write_json(self._counts_file(number), asdict(counts))
            return counts

    def open(self, number: int) -> tuple[TokenStore, CopyId | None] | None:
        """Open the tokens of a segment. Return None if they are missing or damaged; remove damaged ones."""
        copy = self.copy_of(number)  # before opening: a newer copy must not count as the damaged one
        try:
            return TokenStore(self.segment_folder(number)), copy
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
            evicted = temporary_path(folder)
            os.rename(folder, evicted)  # atomic, also for readers
            shutil.rmtree(evicted, ignore_errors=True)

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
        """Return the path where a worker reports an error for a segment."""
        return self.folder / "readers" / f"{self.source.origin}unit-{number:06d}.error"

    def _lock_file(self, number: int) -> Path:
        return self.folder / "locks" / f"unit-{number:06d}"

    def _counts_file(self, number: int) -> Path:
        return self.folder / "counts" / f"{number:06d}.json"
