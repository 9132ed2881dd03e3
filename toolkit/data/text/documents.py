"""Read and tokenize documents (UTF-8 text files) in an order that depends only on the file contents."""

import hashlib
import os
import time
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from toolkit.data.base import AUTO, AddBos, AddedBos, Report, file_errors, require
from toolkit.data.cache import throttle
from toolkit.data.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from toolkit.data.tokenizer_limits import is_parallel, one_thread_per_call
from toolkit.data.tokens.token_store import TokenWriter
from toolkit.errors import UserError, count_of
from toolkit.io.processes import count_cores

_READ_SIZE = 1 << 20
_BPE_SAMPLE = 8_000_000  # characters for tokenizer training
CHUNK_CHARS = 1 << 18  # approximate characters per chunk
BATCH = 1 << 18  # approximate characters per batch, which one thread tokenizes

# What documents have: "bos": bos and eos; "eos": eos; "": eos, twice if the text ends with it, as in toolkit 0.1.0.
# "eos" is used only if it gives other tokens than "", so that other caches keep their keys.
# A stream looks at few documents: "later" is "eos" with the key of "", if none of these documents ends with eos.
DocumentEnds = Literal["bos", "eos", "later", ""]
TAIL = 64  # length of a document's end that shows whether it ends with eos


@dataclass(frozen=True)
class Document:
    r"""A text file.

    Args:
        sha256: Hex SHA-256 of the file contents.
        size: Text size in bytes, after normalization by :func:`text_chunks`.
        option: The option that set the path.
        crlf: Number of \r\n line endings, which are normalized to \n.
        has_bom: Whether the file starts with a byte order mark, which is dropped.
        tail: The last bytes.
    """

    sha256: str
    size: int
    path: Path
    option: str
    crlf: int
    has_bom: bool
    tail: bytes


class TextChunk(NamedTuple):
    """A chunk of a document, or the complete document."""

    text: str
    ends_document: bool


Tokenized = tuple[list[TextChunk], np.ndarray]


def fingerprint(paths: list[Path], option: str) -> list[Document]:
    """Hash files and sort them by hash, which shuffles them as a pure function of the contents.

    Empty files are skipped.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading release the GIL
        hashed = list(pool.map(lambda path: _hash(path, option), paths))
    documents = sorted((d for d in hashed if d.size), key=lambda d: (d.sha256, d.path))
    if not documents:
        raise UserError(f"{option}: contains no text; provide non-empty files")
    return documents


def _hash(path: Path, option: str) -> Document:
    digest, size, crlf, tail = hashlib.sha256(), 0, 0, b""
    with file_errors(option, path), open(path, "rb") as file:
        has_bom = file.read(len(BOM_UTF8)) == BOM_UTF8
        file.seek(0)
        while block := file.read(_READ_SIZE):
            digest.update(block)
            size += len(block)
            crlf += block.count(b"\r\n") + (tail[-1:] == b"\r" and block[:1] == b"\n")
            tail = (tail + block)[-TAIL:]
    return Document(digest.hexdigest(), size - crlf - has_bom * len(BOM_UTF8), path, option, crlf, has_bom, tail)


def text_bytes(documents: list[Document]) -> int:
    return sum(document.size for document in documents)


def describe_changes(documents: list[Document]) -> str | None:
    """Describe normalized line endings and dropped byte order marks, or return None."""
    crlf, boms = sum(d.crlf for d in documents), sum(d.has_bom for d in documents)
    parts = [f"normalized {crlf:,} \\r\\n line endings to \\n"] if crlf else []
    parts += [f"dropped {count_of(boms, 'byte order mark')}"] if boms else []
    return ", ".join(parts) or None


def text_chunks(document: Document) -> Iterator[TextChunk]:
    r"""Read a document in chunks; see :func:`cut_text`.

    A leading byte order mark is dropped.
    """
    with (
        file_errors(document.option, document.path, "convert it, or exclude it with a glob such as 'folder/**/*.txt'"),
        open(document.path, encoding="utf-8-sig", newline="") as file,
    ):
        yield from cut_text(file)


def cut_text(file: IO[str]) -> Iterator[TextChunk]:
    r"""Read a document in chunks of about CHUNK_CHARS characters.

    \r\n line endings become \n. Text is cut only after a newline that follows a visible character and precedes a
    letter. If :meth:`Tokenizer.splits_at_newlines` is true, such cuts do not change the token ids.
    """
    rest, carry = "", ""
    while block := file.read(CHUNK_CHARS):
        block = carry + block
        carry = "\r" if block.endswith("\r") else ""  # its \n may be in the next block
        rest += block[: len(block) - len(carry)].replace("\r\n", "\n")
        if cut := _last_line_end(rest, len(rest) - CHUNK_CHARS):
            yield TextChunk(rest[:cut], False)
            rest = rest[cut:]
    yield TextChunk(rest + carry, True)


def _last_line_end(text: str, start: int) -> int:
    """Return the last valid cut position at or after ``start``; 0 if there is none."""
    end = len(text) - 1
    while (end := text.rfind("\n", max(start, 1), end)) > 0:
        if text[end + 1].isalpha() and not text[end - 1].isspace():
            return end + 1
    return 0


def read_chunks(documents: list[Document], limit: int | None = None) -> Iterator[TextChunk]:
    """Yield the chunks of documents, at most ``limit`` bytes of text."""
    for document in documents:
        for chunk in text_chunks(document):
            if limit is not None:
                text = chunk.text.encode()
                if len(text) > limit:
                    chunk = TextChunk(text[:limit].decode(errors="ignore"), False)
                limit -= min(len(text), limit)
            yield chunk
            if limit == 0:
                return


def batches(chunks: Iterable[TextChunk], can_cut: bool) -> Iterator[tuple[list[TextChunk], bool]]:
    """Group chunks into batches of about BATCH characters. Unless ``can_cut``, join the chunks of each document.

    Yield each batch, and whether it begins with the beginning of a document.
    """
    batch, size, held, starts = list[TextChunk](), 0, list[str](), True
    for chunk in chunks:
        size += len(chunk.text)
        held.append(chunk.text)
        if can_cut or chunk.ends_document:
            batch.append(TextChunk("".join(held), chunk.ends_document))
            held = []
            if size >= BATCH:
                yield batch, starts
                batch, size, starts = [], 0, chunk.ends_document
    if held:  # the limit is within a document
        batch.append(TextChunk("".join(held), False))
    if batch:
        yield batch, starts


def added_bos(ends: DocumentEnds, tokenizer: Any) -> AddedBos | None:
    return AddedBos(tokenizer.bos_id, tokenizer.eos_id) if ends == "bos" else None


def choose_ends(add_bos: AddBos, tokenizer: Tokenizer | None, tails: Iterable[str], report: Report) -> DocumentEnds:
    """Return how documents begin and end, by ``--data.add_bos`` and the last characters of some documents."""
    if tokenizer is not None and tokenizer.eos_id is None:
        raise UserError(f"{tokenizer.name}: has no end-of-document token; {tokenizer.missing_hint('eos')}")
    names = {"eos_token": END_OF_TEXT} if tokenizer is None else tokenizer.special_tokens
    adds_bos = tokenizer is not None and tokenizer.adds_bos
    if add_bos is None:
        if adds_bos:
            report("Data: documents begin without bos, as in toolkit 0.1.0 (--data.add_bos null)")
        return ""
    if add_bos is True or (add_bos == AUTO and adds_bos):
        hint = "set --tokenizer_dir" if tokenizer is None else tokenizer.missing_hint("bos")
        require("bos_token" in names, "add_bos", "true", f"the tokenizer has no bos token; {hint}")
        how = f"begins with {names['bos_token']} and ends with {names['eos_token']}"
        report(f"Data: each document {how} (--data.add_bos {str(add_bos).lower()})")
        return "bos"
    return "eos" if any(tail.rstrip().endswith(names["eos_token"]) for tail in tails) else ""


def train_tokenizer(chunks: Iterable[TextChunk], n_characters: int, vocab_size: int, report: Report) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the first ``n_characters`` characters, at most 8 million."""
    start = time.perf_counter()

    def first_characters() -> Iterator[str]:
        n_left = min(n_characters, _BPE_SAMPLE)
        for chunk in chunks:
            if n_left <= 0:
                return
            yield chunk.text[:n_left]
            n_left -= len(chunk.text)

    tokenizer = train_bpe(first_characters(), vocab_size)
    note = "" if tokenizer.vocab_size == vocab_size else f" (too little text for {vocab_size:,})"
    seconds = time.perf_counter() - start
    report(f"Data: trained a byte-level BPE with {tokenizer.vocab_size:,} tokens{note} ({seconds:.1f} s)")
    return tokenizer


def write_text(
    writer: TokenWriter,
    documents: list[Document],
    tokenizer: Tokenizer,
    ends: DocumentEnds,
    report: Report,
    limit: int | None = None,
) -> None:
    """Tokenize and write documents, at most ``limit`` bytes of text."""
    total, done, report_progress = limit or text_bytes(documents), 0, throttle(report)
    for batch, ids in tokenize(read_chunks(documents, limit), tokenizer, ends):
        writer.add(ids)
        done += sum(len(chunk.text) for chunk in batch)
        report_progress(f"Data: tokenized {done / 1e6:,.0f} of about {total / 1e6:,.0f} MB")


def tokenize(chunks: Iterable[TextChunk], tokenizer: Tokenizer, ends: DocumentEnds = "") -> Iterator[Tokenized]:
    """Yield batches of chunks and their token ids, (n,) int64. The first begins a document; eos follows complete ones.

    If the tokenizers library may use all cores, a thread pool tokenizes batches, to overlap with reading, conversion
    and writing. Without this overlap, the library's threads are about as fast.
    """
    assert tokenizer.eos_id is not None  # checked by the callers
    eos = tokenizer.special_tokens["eos_token"]

    def _without_line_end(chunk: TextChunk) -> str:
        """Return the text, without white space after an eos that ends the document."""
        text = chunk.text.rstrip()
        return text if ends and chunk.ends_document and text.endswith(eos) else chunk.text

    def encode(chunks: list[TextChunk], starts: bool) -> Tokenized:
        ids: list[int] = []
        encoded = tokenizer.encode_batch([_without_line_end(chunk) for chunk in chunks], bos=False)
        for chunk, part in zip(chunks, encoded, strict=True):
            before, after = tokenizer.missing_ends(part if ends else [], starts and ends == "bos", chunk.ends_document)
            ids += before + part + after
            starts = chunk.ends_document
        return chunks, np.asarray(ids, np.int64)

    jobs = batches(chunks, tokenizer.splits_at_newlines())
    if not is_parallel():
        yield from starmap(encode, jobs)
        return
    # as many as the library would start; a job may have only some of the cores
    threads = count_cores()
    running = deque[Future[Tokenized]]()
    with one_thread_per_call(), ThreadPoolExecutor(threads) as pool:
        for job in jobs:
            running.append(pool.submit(encode, *job))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
