"""Documents: UTF-8 text files, in an order that depends on nothing but their contents."""

from __future__ import annotations

import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.errors import UserError

_READ = 1 << 20
PIECE = 1 << 18  # characters that are encoded at once
BATCH = 1 << 22  # characters that are encoded in parallel


@dataclass(frozen=True)
class Document:
    r"""A text file.

    Args:
        sha256: Of its content, in hex.
        size: Bytes of its text, as :func:`pieces` reads it.
        path: The file.
        option: How the user named it.
        crlf: Line ends that are \r\n in the file and \n in the text.
        has_bom: Whether the file begins with a byte order mark, which is no part of the text.
    """

    sha256: str
    size: int
    path: Path
    option: str
    crlf: int
    has_bom: bool


class Piece(NamedTuple):
    """Part of a document, or the whole."""

    text: str
    ends_document: bool


def fingerprint(paths: list[Path], option: str) -> list[Document]:
    """Hash files and sort them by their hash: a shuffled order that is a pure function of the contents.

    Empty files are left out: they are no documents.

    Raises:
        UserError: naming ``option``, if a file cannot be read or none has text.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading let other threads run
        hashed = list(pool.map(lambda path: _hash(path, option), paths))
    documents = sorted((d for d in hashed if d.size), key=lambda d: (d.sha256, d.path))
    if not documents:
        raise UserError(f"{option}: holds no text; give files that are not empty")
    return documents


def _hash(path: Path, option: str) -> Document:
    digest, size, crlf, last = hashlib.sha256(), 0, 0, b""
    try:
        with open(path, "rb") as file:
            has_bom = file.read(len(BOM_UTF8)) == BOM_UTF8
            file.seek(0)
            while block := file.read(_READ):
                digest.update(block)
                size += len(block)
                crlf += block.count(b"\r\n") + (last == b"\r" and block[:1] == b"\n")
                last = block[-1:]
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}") from error
    return Document(digest.hexdigest(), size - crlf - has_bom * len(BOM_UTF8), path, option, crlf, has_bom)


def describe_changes(documents: list[Document]) -> str | None:
    """One line about line ends and byte order marks that are read in another way than they are written."""
    crlf, marks = sum(d.crlf for d in documents), sum(d.has_bom for d in documents)
    parts = [f"read {crlf:,} line ends \\r\\n as \\n"] if crlf else []
    parts += [f"left out {marks:,} byte order mark{'s' if marks > 1 else ''}"] if marks else []
    return ", ".join(parts) or None


def pieces(document: Document, size: int | None = PIECE) -> Iterator[Piece]:
    r"""Read a document in pieces of about ``size`` characters; None reads it whole.

    Line ends are \n, also where the file has \r\n, and a byte order mark at the beginning is left out.

    It is cut only between a line that ends in a visible character and one that begins with a letter: there the
    tokenizers that :meth:`Tokenizer.splits_at_newlines` finds cut as well.

    Raises:
        UserError: if it is not UTF-8.
    """
    try:
        with open(document.path, encoding="utf-8-sig", newline="") as file:
            rest = held = ""
            while block := file.read(size or -1):
                block = held + block
                held = "\r" if block.endswith("\r") else ""  # its \n may come with the next block
                rest += block[: len(block) - len(held)].replace("\r\n", "\n")
                if size and (cut := _last_line_end(rest, len(rest) - size)):
                    yield Piece(rest[:cut], False)
                    rest = rest[cut:]
            yield Piece(rest + held, True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{document.option}: {document.path} is not UTF-8 text ({error.reason} at byte {error.start});"
            " convert it, or leave it out with a glob such as 'folder/**/*.txt'"
        ) from error
    except OSError as error:
        raise UserError(f"{document.option}: {document.path} cannot be read: {error.strerror}") from error


def _last_line_end(text: str, start: int) -> int:
    """Where the last line that may be cut off ends, looking no further back than ``start``; 0 if there is none."""
    end = len(text) - 1
    while (end := text.rfind("\n", max(start, 1), end)) > 0:
        if text[end + 1].isalpha() and not text[end - 1].isspace():
            return end + 1
    return 0


def batches(documents: list[Document], cut: bool) -> Iterator[list[Piece]]:
    """The pieces of all documents in lists of about BATCH characters; ``cut=False`` leaves documents whole."""
    batch, size = [], 0
    for document in documents:
        for piece in pieces(document, PIECE if cut else None):
            batch.append(piece)
            size += len(piece.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def sample(documents: list[Document], limit: int) -> Iterator[str]:
    """The first ``limit`` characters of the stream of documents, as texts."""
    for document in documents:
        for piece in pieces(document):
            if limit <= 0:
                return
            yield piece.text[:limit]
            limit -= len(piece.text)
