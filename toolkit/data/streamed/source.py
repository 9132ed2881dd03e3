"""What a stream caches: segments, each written as a token store. Text is tokenized into them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.data.base import Report, Values
from toolkit.data.cache import hash_inputs, throttle
from toolkit.data.streamed.segments import BrokenFileError, Part, plan_segments, read_part
from toolkit.data.text.documents import DocumentEnds, TextChunk, tokenize
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.token_store import TokenWriter, token_dtype
from toolkit.io.source_files import SourceFile

CODE_VERSION = 1  # increment if the same files and options give different tokens
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


class Source(ABC):
    """Segments that a stream caches, each a token store.

    Attributes:
        origin: Where the same segments are read from, if that may differ: a prefix of names of files in the cache.
        noun: What users call a segment.
    """

    origin, noun = "", "segment"

    @property
    @abstractmethod
    def segments(self) -> Sequence[Any]:
        """The segments, in the order of their numbers."""

    @abstractmethod
    def expected_bytes(self, number: int) -> int:
        """Estimate the size of a segment in bytes; the ratio to the size on disk is about the same for all."""

    @abstractmethod
    def names(self, number: int) -> list[str]:
        """Return the names of the files of a segment, for messages."""

    @abstractmethod
    def write(self, number: int, folder: Path, tokenizer: Tokenizer | None, report: Report) -> SegmentCounts:
        """Write a segment to an empty folder with a :class:`~toolkit.data.tokens.token_store.TokenWriter`.

        Return its counts.

        Raises:
            StorageError: The storage fails.
        """

    @abstractmethod
    def to_json(self) -> Values:
        """Return what another process needs to write segments."""


@dataclass(frozen=True)
class TextSegments(Source):
    """Files to tokenize, with the options that determine their documents.

    Args:
        files: Files in segment order.
        segment_bytes: Target segment size in bytes.
        identity: Result of :func:`~toolkit.io.source_files.listing_hash`.
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

    def expected_bytes(self, number: int) -> int:
        """Estimate the text of a segment, from file sizes only."""
        parts = ((self.files[part.file], part.total) for part in self.segments[number])
        return sum(_EXPANSION.get(file.compression or file.kind, 1) * file.size // total for file, total in parts)

    def names(self, number: int) -> list[str]:
        return [self.files[part.file].name for part in self.segments[number]]

    def write(self, number: int, folder: Path, tokenizer: Tokenizer | None, report: Report) -> SegmentCounts:
        assert tokenizer is not None
        writer, broken = TokenWriter(folder, token_dtype(tokenizer.vocab_size)), dict[str, str]()
        documents = size = 0
        report_progress = throttle(report)
        for chunks, ids in tokenize(segment_texts(self, number, broken), tokenizer, self.ends):
            writer.add(ids)
            documents += sum(chunk.ends_document for chunk in chunks)
            size += sum(len(chunk.text.encode()) for chunk in chunks)
            report_progress(f"Data: tokenized {size / 1e6:,.0f} MB of text of segment {number:,}")
        return SegmentCounts(writer.finish(), documents, size, broken)

    def to_json(self) -> Values:
        values = asdict(self)
        return values | {"unit_bytes": values.pop("segment_bytes")}


def segment_texts(source: TextSegments, number: int, broken: dict[str, str]) -> Iterator[TextChunk]:
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
