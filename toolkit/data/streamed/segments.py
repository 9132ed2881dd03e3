"""Split input files into segments of about SEGMENT_BYTES. Segments are tokenized and shuffled one by one.

Planning uses file names and sizes only; no file is read.
"""

import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from toolkit.data.sft.messages import unique_keys
from toolkit.data.text.documents import TextChunk, cut_text
from toolkit.errors import UserError, causes_of, join_first, one_line
from toolkit.io.safe_parse import MAX_ROW, bounded_lines
from toolkit.io.source_files import RetryingFile, SourceFile
from toolkit.io.storage import StorageError

SEGMENT_BYTES = 32 << 20
_BUFFER = 4 << 20  # bytes per read
_PARQUET_ROWS = 256  # per batch


class Part(NamedTuple):
    """Part ``number`` of ``total`` of file number ``file``."""

    file: int
    number: int
    total: int


class BrokenFileError(Exception):
    """The content of a file cannot be read."""


class ColumnError(BrokenFileError):
    """The text column is missing or does not contain text."""


def plan_segments(files: Sequence[SourceFile], segment_bytes: int) -> list[tuple[Part, ...]]:
    """Return the parts of each segment, in file order.

    A Parquet or uncompressed JSONL file of s bytes is cut into ceil(s / segment_bytes) segments. Other files cannot be
    read from the middle. Consecutive files smaller than a segment are grouped.
    """
    segments: list[tuple[Part, ...]] = []
    group: list[Part] = []
    grouped = 0
    for number, file in enumerate(files):
        can_cut = file.kind != "text" and not file.compression
        count = -(-file.size // segment_bytes) if can_cut else 1
        if group and grouped + file.size > segment_bytes:
            segments.append(tuple(group))
            group, grouped = [], 0
        if count > 1:
            segments += [(Part(number, index, count),) for index in range(count)]
        else:
            group.append(Part(number, 0, 1))
            grouped += file.size
    return [*segments, tuple(group)] if group else segments


def read_part(file: SourceFile, part: Part, column: str) -> Iterator[TextChunk]:
    """Yield the non-empty documents of a file part.

    Raises:
        BrokenFileError: The content is damaged.
        ColumnError: ``column`` is missing or does not contain text.
        StorageError: The storage fails.
    """
    with RetryingFile(file) as raw:
        try:
            if file.kind == "parquet":
                yield from _parquet(raw, part, column)
            elif file.kind == "jsonl":
                yield from _json_lines(raw, file, part, column)
            else:
                yield from _text(_decompressed(raw, file))
        except (BrokenFileError, StorageError):
            raise
        except UnicodeDecodeError as error:
            raise BrokenFileError(f"is not UTF-8 text ({error.reason})") from error
        except UserError as error:
            raise BrokenFileError(str(error)) from error
        except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow raises OSError or ValueError
            for cause in causes_of(error):
                if isinstance(cause, StorageError):
                    raise cause from error
            raise BrokenFileError(one_line(error)[:200]) from error


def _parquet(raw: RetryingFile, part: Part, column: str) -> Iterator[TextChunk]:
    from pyarrow import PythonFile, parquet, types

    with parquet.ParquetFile(PythonFile(raw, mode="r"), pre_buffer=True) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise ColumnError(f"has no column {column!r}; its columns are {join_first(schema.names, 20)}")
        kind = schema.field(column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view"):
            raise ColumnError(f"column {column!r} is of type {kind}, not text")
        groups = file.metadata.num_row_groups
        row_groups = range(groups * part.number // part.total, groups * (part.number + 1) // part.total)
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=row_groups, columns=[column]):
            for text in filter(None, batch.column(0).to_pylist()):
                if len(text) > MAX_ROW:
                    raise BrokenFileError(f"column {column!r} has a row of more than {MAX_ROW:,} characters")
                yield TextChunk(text, True)


def _json_lines(raw: RetryingFile, file: SourceFile, part: Part, column: str) -> Iterator[TextChunk]:
    start, stop = file.size * part.number // part.total, file.size * (part.number + 1) // part.total
    stream = _decompressed(raw, file)
    if start:  # a line belongs to the part in which it starts
        stream.seek(start - 1)
        while not (rest := stream.readline(_BUFFER)).endswith(b"\n") and rest:
            start += len(rest)
        start += len(rest) - 1
    for line in bounded_lines(stream, start):
        if start >= stop and not file.compression:
            return
        content = line.removeprefix(BOM_UTF8).strip()
        if content and (text := _text_of(content, column, start)):
            yield TextChunk(text, True)
        start += len(line)


def _text_of(line: bytes, column: str, start: int) -> str | None:
    try:
        row = json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"byte {start:,}: is not a line of JSON ({one_line(error)[:100]})") from error
    if not isinstance(row, dict):
        raise BrokenFileError(f"byte {start:,}: is not a JSON object; write one object with text per line")
    if column not in row:
        raise ColumnError(f"byte {start:,}: has no column {column!r}; its columns are {join_first(list(row), 20)}")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise ColumnError(f"byte {start:,}: column {column!r} is of type {type(text).__name__}, not text")
    if text and not text.isascii():
        text.encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
    return text


def _text(stream: IO[bytes]) -> Iterator[TextChunk]:
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as file:
        yield from cut_text(file)


def _decompressed(raw: RetryingFile, file: SourceFile) -> IO[bytes]:
    buffered: Any = io.BufferedReader(raw, _BUFFER)
    if file.compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=buffered), _BUFFER)  # type: ignore[return-value,type-var]
    if file.compression == ".zst":
        from pyarrow import CompressedInputStream

        return io.BufferedReader(CompressedInputStream(buffered, "zstd"), _BUFFER)
    return buffered
