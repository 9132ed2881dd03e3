"""Open streamed text: prepare the tokenizer, the first segment and the validation rows."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.data.base import PreparedData, Report, TokenDataset, trained_vocabulary
from toolkit.data.cache import choose_cache_dir, hash_inputs, throttle
from toolkit.data.sft.readers import require_pyarrow
from toolkit.data.streamed import segments
from toolkit.data.streamed.source import SegmentCounts, TextSegments, segment_texts
from toolkit.data.streamed.stream import SOURCE, Stream
from toolkit.data.streamed.stream_reader import SegmentRequest, StreamReader, folder_bytes, stop_workers
from toolkit.data.streamed.streamed_rows import RowSpans, SegmentRows, StreamedRows, describe_broken
from toolkit.data.text.documents import TAIL, added_bos, choose_ends, train_tokenizer
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import DataError, UserError, count_of
from toolkit.io.locks import file_lock
from toolkit.io.source_files import SourceFiles, listing_hash
from toolkit.io.storage import StorageError, is_url
from toolkit.io.tempfiles import sweep

_FIRST_DOCUMENTS = 64  # to look at, for the key
_OLD_RULE = "-0.1.0"  # at the end of a folder's name; not in keys, which have to stay
_MIN_SEGMENTS = 5  # in the cache budget: held-out, previous, current, next, and the one being written


@dataclass(frozen=True)
class TextSource:
    """Listed files and options of a data module.

    Args:
        options: The data module, a :class:`toolkit.data.HuggingFaceText`.
        where: Option and value that error messages name.
        files: Training files.
        val_files: Validation files. If None, validation rows are held out from the first segment.
    """

    options: Any
    where: str
    files: SourceFiles
    val_files: SourceFiles | None

    @property
    def val_where(self) -> str:
        """Option and value of ``val_files``, for error messages."""
        name = "val_path" if self.options.val_split is None else "val_split"
        return f"--data.{name} {getattr(self.options, name)}"


def open_text(text: TextSource, tokenizer: Tokenizer | None, max_seq_length: int, report: Report) -> PreparedData:
    """Prepare the first segment, and return the training and validation rows."""
    start = time.perf_counter()
    if both := sorted({file.url for file in text.files} & {file.url for file in text.val_files or []}):
        raise UserError(f"{text.val_where}: {both[0]} is also training text; exclude it there")
    cache_dir = choose_cache_dir(text.options.cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        sweep(cache_dir)
        source = _source(text, text.files, tokenizer, report)
        stream = _open_stream(cache_dir, source, tokenizer, trained_vocabulary(text.options), report)
        prepared = _prepare_rows(text, stream, max_seq_length + 1, report)
    except StorageError as error:
        raise UserError(f"{text.where}: {error}") from error
    except OSError as error:
        raise UserError(f"--data.cache_dir {cache_dir}: cannot be used: {error.strerror or error}") from error
    report(f"Data: {prepared.summary} ({time.perf_counter() - start:.1f} s)")
    return prepared


def _source(text: TextSource, files: SourceFiles, tokenizer: Tokenizer | None, report: Report) -> TextSegments:
    """Check the files, and choose the ends of documents by the first ones."""
    options, column = text.options, text.options.text_column
    if any(file.kind == "parquet" or file.compression == ".zst" for file in files):
        require_pyarrow()
    source = TextSegments(files, column, segments.SEGMENT_BYTES, listing_hash(files))
    local = (i for i, file in enumerate(files) if file.kind == "parquet" and not is_url(file.url))
    footers = (segments.Part(i, 0, sys.maxsize) for i in local)  # empty parts: read only the footer
    tails = list[str]()
    for part in (source.segments[0][0], *footers):
        try:
            chunks = islice(segments.read_part(files[part.file], part, column), _FIRST_DOCUMENTS)
            tails.extend(chunk.text[-TAIL:] for chunk in chunks if chunk.ends_document)
        except segments.ColumnError as error:
            raise UserError(f"--data.text_column {column}: {files[part.file].name}: {error}") from error
        except segments.BrokenFileError as error:
            if not options.skips_broken:  # before a tokenizer is trained
                raise UserError(f"--data: {describe_broken({files[part.file].name: str(error)})}") from error
    ends = choose_ends(options.add_bos, tokenizer, tails, report)
    return replace(source, ends=ends or ("" if options.add_bos is None else "later"))


def _open_stream(
    cache_dir: Path, source: TextSegments, tokenizer: Tokenizer | None, vocab_size: int, report: Report
) -> Stream:
    """Open or create the stream. Without a tokenizer, train one on the first segment."""
    key = source.key(["trained", vocab_size] if tokenizer is None else tokenizer.fingerprint)
    folder = cache_dir / f"streamed-{key[:16]}"
    # "later" has the key of "", as most of its tokens are the same, but a folder has one rule: toolkit
    # 0.1.0's folders keep their rule until a run with "later" takes them over, with the segments that are prepared.
    saved = folder / SOURCE
    if not (source.ends or (saved.exists() and "ends" not in json.loads(saved.read_bytes()))):
        folder = folder.with_name(folder.name + _OLD_RULE)
    (folder / "locks").mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "locks" / "tokenizer"):
        if tokenizer is None and (folder / SOURCE).exists():
            tokenizer = Stream.load(folder).tokenizer
        elif tokenizer is None:
            tokenizer = train_tokenizer(segment_texts(source, 0, {}), sys.maxsize, vocab_size, report)
        stream = Stream(folder, source, tokenizer)
        stream.save()
    return stream


def _prepare_rows(text: TextSource, stream: Stream, block_size: int, report: Report) -> PreparedData:
    source, tokenizer, skips = stream.source, stream.tokenizer, text.options.skips_broken
    assert isinstance(source, TextSegments) and tokenizer is not None
    if not skips and (n := stream.discard_broken()):
        report(f"Data: reading the files of {count_of(n, 'segment')} again that could not be read before")
    first, counts = _prepare_first(stream, block_size, skips, text.where, report)
    n_rows = counts.tokens // block_size
    max_bytes = require_budget(text.options.max_cache_gb, stream, first)
    reader = StreamReader(stream, text.options.prepare_workers, max_bytes, report)
    rows, held_out, val = SegmentRows(reader, block_size), 0, None
    if text.val_files is not None:
        val = _val_rows(text, stream, text.val_files, block_size, report)
    elif text.options.val_rows and n_rows > 1:
        held_out = min(text.options.val_rows, max(1, n_rows // 10))
        val = RowSpans(rows, [(first, n_rows - held_out, n_rows)])
    val_content = None if val is None else [val.segments.reader.stream.folder.name.removesuffix(_OLD_RULE), val.spans]
    content = [source.key(tokenizer.fingerprint), block_size, val_content]
    size = sum(file.size for file in source.files) / 1e6
    return PreparedData(
        train=StreamedRows(rows, first, n_rows - held_out, {first: held_out} if held_out else {}, skips),
        val=val,
        tokenizer=tokenizer,
        added_bos=added_bos(source.ends, tokenizer),
        content_key=hash_inputs(content),
        summary=(
            f"{count_of(len(source.files), 'file')}, {size:,.1f} MB in {count_of(len(source.segments), 'segment')}, "
            f"tokenized while they are read; the first has {n_rows:,} rows of {block_size - 1:,} tokens, "
            f"{'no rows' if val is None else f'{len(val):,} rows'} to validate on"
        ),
    )


def _prepare_each(stream: Stream, skips: bool, where: str, report: Report) -> Iterator[tuple[int, SegmentCounts]]:
    """Tokenize segments on all cores, one after the other. Yield their numbers and counts."""
    for number in range(len(stream.source.segments)):
        if stream.ready(number) is None:
            report(f"Data: tokenizing segment {number:,} into {stream.folder}")
        counts = stream.prepare(number, report)
        if counts.broken and not skips:
            raise UserError(f"{where}: {describe_broken(counts.broken)}")
        yield number, counts


def _prepare_first(
    stream: Stream, block_size: int, skips: bool, where: str, report: Report
) -> tuple[int, SegmentCounts]:
    """Tokenize segments until one has a full row. Return that segment's number and counts."""
    total = 0
    for number, counts in _prepare_each(stream, skips, where, report):
        if counts.tokens >= block_size:
            return number, counts
        total += counts.tokens
        for name, reason in counts.broken.items():
            report(f"Data: skipped the rest of {name}: {reason}")
    raise UserError(
        f"{where}: {total:,} tokens, but one row needs {block_size:,} (--train.max_seq_length + 1); reduce "
        "--train.max_seq_length, or provide more text"
    )


def require_budget(max_cache_gb: float | None, stream: Stream, first: int) -> int | None:
    if max_cache_gb is None:
        return None
    source = stream.source
    n_segments = min(_MIN_SEGMENTS, len(source.segments))
    size = folder_bytes(stream.segment_folder(first))
    largest = max(map(source.expected_bytes, range(len(source.segments)))) / max(1, source.expected_bytes(first))
    needed = n_segments * size * max(1.0, largest)
    if max_cache_gb * 1e9 < needed:
        raise UserError(
            f"--data.max_cache_gb {max_cache_gb:g}: a run needs {count_of(n_segments, source.noun)} at a time, about "
            f"{needed / 1e9:.2g} GB; set at least that"
        )
    return int(max_cache_gb * 1e9)


def _val_rows(text: TextSource, train: Stream, files: SourceFiles, block_size: int, report: Report) -> RowSpans:
    """Tokenize validation segments until there are ``val_rows`` rows."""
    source = _source(text, files, train.tokenizer, lambda line: None)
    stream = _open_stream(train.folder.parent, source, train.tokenizer, 0, report)
    spans, n_left = list[tuple[int, int, int]](), text.options.val_rows
    for number, counts in _prepare_each(stream, text.options.skips_broken, text.val_where, report):
        if rows := min(n_left, counts.tokens // block_size):
            spans.append((number, 0, rows))
            n_left -= rows
        if not n_left:
            break
    if not spans:
        raise UserError(f"{text.val_where}: has no row of {block_size:,} tokens; provide more text")
    return RowSpans(SegmentRows(StreamReader(stream, 1, None, report), block_size), spans)


def prepare_all(rows: TokenDataset, workers: int, part: tuple[int, int], report: Report) -> None:
    """Tokenize the segments of a part in ``workers`` processes. ``part`` is (number from 1, total)."""
    assert isinstance(rows, StreamedRows)
    stream = rows.segments.reader.stream
    numbers = range(part[0] - 1, len(stream.source.segments), part[1])
    unprepared = [number for number in numbers if stream.ready(number) is None]
    reader, total, size = StreamReader(stream, workers, None, report), len(unprepared), 0
    start, report_progress, speed = time.perf_counter(), throttle(report), ""
    for number in unprepared:
        stream.error_file(number).unlink(missing_ok=True)
    try:
        while unprepared:
            window = unprepared[: 4 * workers]
            reader.request(SegmentRequest(ahead=window))
            for number in window:
                if (counts := stream.ready(number)) is not None:
                    if counts.broken and not rows.skips_broken:
                        raise UserError(describe_broken(counts.broken))
                    unprepared.remove(number)
                    reader.reset_starts()
                    size += counts.text_bytes
                elif stream.error_file(number).exists():
                    raise UserError(stream.error_file(number).read_text(encoding="utf-8"))
            speed = f", {size / 1e6 / (time.perf_counter() - start):.1f} MB of text per second"
            report_progress(f"Data: {total - len(unprepared):,} of {total:,} segments{speed}")
            time.sleep(0.1)
    except DataError as error:
        raise UserError(str(error)) from error
    finally:
        reader.close()
        stop_workers(stream.folder)
    used = folder_bytes(stream.folder / "units")
    report(f"Data: {count_of(len(numbers), 'segment')} prepared in {stream.folder}, {used / 1e9:.2f} GB{speed}")
