"""Prepare text files once, cached by content: documents -> tokenizer -> chunks -> manifest.

    <cache_dir>/<module>-<first 16 of the key>/{train,val}/   LitData chunks of full blocks
                                              tokenizer/
                                              manifest.json   contents and provenance
                                              checksums.json  of all of these files

Folders are published atomically with a rename (S5). The key excludes paths and dates: moved or copied text is a cache
hit, changed text a miss.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.base import PreparedData, Vocabulary
from toolkit.data.cache import HEARTBEAT, MANIFEST, choose_cache_dir, load_or_prepare, read_manifest
from toolkit.data.text import documents
from toolkit.data.tokenizer import Tokenizer, collect_characters, train_bpe
from toolkit.data.tokens.chunks import TokenRows, write_chunks
from toolkit.errors import UserError

Report = Callable[[str], None]
CODE_VERSION = 2  # increment if the same text and options produce different rows
_BPE_SAMPLE = 8_000_000  # characters for tokenizer training


@dataclass(frozen=True)
class TextSources:
    """Text files and preparation options.

    Args:
        module: The data module, for folder names and messages.
        train: Training text; validation rows are held out from it if ``val`` is None.
        val: Separate validation text.
        train_option: The option that named the training text, such as ``--data.train_data_path corpus``.
        val_option: The same for ``val``, or the option that sets the held-out share.
        val_fraction: Share of the ``train`` tokens to hold out; 0 with ``val``.
        vocab_size: Size of the BPE tokenizer to train if none is specified; or characters.
        cache_dir: Cache folder for prepared data.
        text_fraction: Share of the ``train`` tokens to use, from the first on.
    """

    module: str
    train: list[Path]
    val: list[Path] | None
    train_option: str
    val_option: str
    val_fraction: float
    vocab_size: Vocabulary
    cache_dir: str | None
    text_fraction: float = 1.0


def prepare_text(
    sources: TextSources, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report
) -> PreparedData:
    """Load the rows of ``sources`` from the cache, or prepare them.

    Raises:
        UserError: The text, tokenizer or cache folder is invalid.
    """
    start = time.perf_counter()
    if tokenizer is not None and tokenizer.eos_id is None:
        raise UserError(f"{tokenizer.name}: has no end-of-document token; set eos_token in tokenizer_config.json")
    train = documents.fingerprint(sources.train, sources.train_option)
    val = None if sources.val is None else documents.fingerprint(sources.val, sources.val_option)
    texts = train + (val or [])
    if changes := documents.describe_changes(texts):
        report(f"Data: {changes}")
    key = _key(sources, train, val, tokenizer, max_seq_length)
    folder = choose_cache_dir(sources.cache_dir) / f"{sources.module}-{key[:16]}"
    prepared, is_cached = load_or_prepare(
        folder,
        f"{len(texts):,} documents, {sum(document.size for document in texts) / 1e6:.1f} MB",
        lambda: _open(folder, key, tokenizer, max_seq_length),
        lambda temporary: _make(temporary, key, sources, (train, val), tokenizer, max_seq_length, report),
        report,
    )
    how = f"using cached {folder}:" if is_cached else "prepared"
    report(f"Data: {how} {prepared.summary} ({time.perf_counter() - start:.1f} s)")
    return prepared


def _key(
    sources: TextSources,
    train: list[documents.Document],
    val: list[documents.Document] | None,
    tokenizer: Tokenizer | None,
    max_seq_length: int,
) -> str:
    inputs = {
        "code": CODE_VERSION,
        "train": [d.sha256 for d in train],
        "val": None if val is None else [d.sha256 for d in val],
        "tokenizer": ["trained", sources.vocab_size] if tokenizer is None else tokenizer.fingerprint,
        "block_size": max_seq_length + 1,
        "val_fraction": sources.val_fraction,
    }
    if sources.text_fraction < 1:
        inputs["text_fraction"] = sources.text_fraction
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _open(folder: Path, key: str, tokenizer: Tokenizer | None, max_seq_length: int) -> PreparedData:
    """Read a prepared folder. Raises one of DAMAGE_ERRORS if it is damaged."""
    manifest = read_manifest(folder, key)
    if tokenizer is None:
        tokenizer = Tokenizer.load(folder / "tokenizer", flag="the cached tokenizer")
    if tokenizer.fingerprint != manifest.get("tokenizer"):
        raise ValueError("the tokenizer was changed")
    rows: dict[str, TokenRows | None] = {"train": None, "val": None}
    for split in rows:
        entry = manifest[split]
        if entry is not None:
            found = rows[split] = TokenRows(folder / split, max_seq_length + 1)
            if len(found) != entry["rows"]:
                raise ValueError(f"{split} has {len(found):,} rows instead of {entry['rows']:,}")
    train = rows["train"]
    if train is None:
        raise ValueError(f"{MANIFEST} lists no training rows")
    return PreparedData(
        train=train,
        val=rows["val"],
        tokenizer=tokenizer,
        content_key=manifest["content_key"],
        summary=_summary(manifest),
    )


def _summary(manifest: dict[str, Any]) -> str:
    def describe(split: str) -> str:
        entry = manifest[split]
        if entry is None:
            return f"no {split} rows"
        leftover = f", {entry['tail_tokens']:,} tokens left over" if entry["tail_tokens"] else ""
        return f"{entry['rows']:,} {split} rows{leftover}"

    size = f"{manifest['tokens'] / 1e6:.2f} M tokens, vocabulary size {manifest['vocab_size']:,}"
    return f"{size} in blocks of {manifest['block_size']:,}: {describe('train')}; {describe('val')}"


def _make(
    folder: Path,
    key: str,
    sources: TextSources,
    texts: tuple[list[documents.Document], list[documents.Document] | None],
    tokenizer: Tokenizer | None,
    max_seq_length: int,
    report: Report,
) -> None:
    active = tokenizer or _train_tokenizer(sources, texts, report)
    active.save(folder / "tokenizer")
    manifest = {"version": CODE_VERSION, "key": key, "tokenizer": active.fingerprint}
    manifest |= _write_splits(folder, sources, texts, active, max_seq_length, report)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _train_tokenizer(
    sources: TextSources, texts: tuple[list[documents.Document], list[documents.Document] | None], report: Report
) -> Tokenizer:
    train, val = texts
    if sources.vocab_size == "characters":
        # Of the held-out text, too: the model could not read others.
        everything = (piece.text for document in train + (val or []) for piece in documents.pieces(document))
        tokenizer = collect_characters(everything)
        report(f"Data: the text has {tokenizer.vocab_size - 2:,} different characters, each one token")
        return tokenizer
    start = time.perf_counter()
    # Only the front of the stream: the end is held out.
    share = sources.text_fraction * (1 - sources.val_fraction) * sum(d.size for d in train)
    tokenizer = train_bpe(documents.sample(train, min(_BPE_SAMPLE, int(share))), sources.vocab_size)
    note = "" if tokenizer.vocab_size == sources.vocab_size else f" (too little text for {sources.vocab_size:,})"
    seconds = time.perf_counter() - start
    report(f"Data: trained a byte-level BPE with {tokenizer.vocab_size:,} tokens{note} ({seconds:.1f} s)")
    return tokenizer


def _write_splits(
    temporary: Path,
    sources: TextSources,
    texts: tuple[list[documents.Document], list[documents.Document] | None],
    tokenizer: Tokenizer,
    max_seq_length: int,
    report: Report,
) -> dict[str, Any]:
    """Write the chunks of both splits and return their manifest entries."""
    stream, val_stream = temporary / "train.tokens", temporary / "val.tokens"
    tokens = _write_tokens(stream, texts[0], tokenizer, report)
    tokens = tokens[: round(len(tokens) * sources.text_fraction)]
    if texts[1] is not None:
        val = _write_tokens(val_stream, texts[1], tokenizer, report)
    else:
        held_out = int(len(tokens) * sources.val_fraction)
        tokens, val = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
    block_size = max_seq_length + 1
    _require_block(tokens, sources.train_option, "training tokens", max_seq_length)
    has_val = texts[1] is not None or sources.val_fraction > 0
    if has_val:
        _require_block(val, sources.val_option, "held-out tokens", max_seq_length)
    content = hashlib.sha256(f"{block_size} {len(tokens)} {len(val)} {tokens.dtype}".encode())
    splits: dict[str, Any] = {"train": None, "val": None}
    for split, part in (("train", tokens), ("val", val)) if has_val else (("train", tokens),):
        content.update(part.data)
        tail = write_chunks(part, temporary / split, block_size)
        splits[split] = {"tokens": len(part), "rows": len(part) // block_size, "tail_tokens": tail}
    total = len(tokens) + len(val)
    del tokens, val, part
    stream.unlink()
    val_stream.unlink(missing_ok=True)
    entries = {"content_key": content.hexdigest(), "block_size": block_size, "vocab_size": tokenizer.vocab_size}
    return {**entries, "tokens": total, **splits}


def _require_block(tokens: np.ndarray, option: str, what: str, max_seq_length: int) -> None:
    if len(tokens) <= max_seq_length:
        raise UserError(
            f"{option}: {len(tokens):,} {what}, but one row needs {max_seq_length + 1:,} (--train.max_seq_length + 1);"
            " reduce --train.max_seq_length, provide more text, or change the held-out share"
        )


def _write_tokens(path: Path, texts: list[documents.Document], tokenizer: Tokenizer, report: Report) -> np.ndarray:
    """Tokenize documents into a file, an eos token after each, and return it as a memory map.

    The tokens of a large corpus do not fit into memory.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    total, done, last_line = sum(d.size for d in texts), 0, time.perf_counter()
    with open(path, "wb") as out:
        for pieces in documents.batches(texts, cut=tokenizer.splits_at_newlines()):
            encoded = tokenizer.encode_batch([piece.text for piece in pieces], bos=False)
            for ids, piece in zip(encoded, pieces, strict=True):
                np.array([*ids, tokenizer.eos_id] if piece.ends_document else ids, dtype=dtype).tofile(out)
            done += sum(len(piece.text) for piece in pieces)
            if time.perf_counter() - last_line > HEARTBEAT:
                report(f"Data: tokenized {done / 1e6:,.0f} of about {total / 1e6:,.0f} MB")
                last_line = time.perf_counter()
    return np.memmap(path, dtype=dtype, mode="r")
