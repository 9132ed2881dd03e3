"""Text files to rows of tokens on disk, once: documents -> tokenizer -> chunks -> manifest, keyed by content.

    <cache_dir>/<module>-<first 16 of the key>/{train,val}/   LitData chunks of whole blocks
                                              tokenizer/
                                              manifest.json   what is there, and what it was made from
                                              checksums.json  of all of these files

A folder appears whole or not at all: it is made under another name and renamed (S5). Paths and dates of the
sources are no part of the key, so moved or copied text is found again, and changed text never is.
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

from toolkit.data import documents
from toolkit.data.base import PreparedData
from toolkit.data.cache import DAMAGE, HEARTBEAT, MANIFEST, choose_cache_dir, clean_up, publish, unfinished, verify
from toolkit.data.chunks import TokenRows, write_chunks
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import UserError

Report = Callable[[str], None]
CODE_VERSION = 2  # raise it when the same text and options would give other rows
_BPE_SAMPLE = 8_000_000  # characters that a tokenizer is trained on


@dataclass(frozen=True)
class TextSources:
    """Text and the options for its preparation.

    Args:
        module: The data module, for names and messages.
        train: Training text, and held-out text too if ``val`` is None.
        val: Held-out text of its own.
        train_option: How the user named the training text, such as ``--data.train_data_path corpus``.
        val_option: The same for ``val``, or the option that sets the held-out share.
        val_fraction: Share of the tokens of ``train`` to hold out; 0 where ``val`` is given.
        vocab_size: Size of the BPE that is trained where no tokenizer is given.
        cache_dir: Where the prepared data goes.
    """

    module: str
    train: list[Path]
    val: list[Path] | None
    train_option: str
    val_option: str
    val_fraction: float
    vocab_size: int
    cache_dir: str | None


def prepare_text(
    sources: TextSources, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report
) -> PreparedData:
    """Find the rows of ``sources`` in the cache or make them.

    Raises:
        UserError: if text, tokenizer or cache folder are unusable.
    """
    start = time.perf_counter()
    if tokenizer is not None and tokenizer.eos_id is None:
        raise UserError(f"{tokenizer.name}: has no end-of-document token; name an eos_token in tokenizer_config.json")
    train = documents.fingerprint(sources.train, sources.train_option)
    val = None if sources.val is None else documents.fingerprint(sources.val, sources.val_option)
    if changes := documents.describe_changes(train + (val or [])):
        report(f"Data: {changes}")
    key = _key(sources, train, val, tokenizer, max_seq_length)
    cache_dir = choose_cache_dir(sources.cache_dir)
    folder = cache_dir / f"{sources.module}-{key[:16]}"
    try:
        prepared, reason = _find(folder, key, tokenizer, max_seq_length, report)
        if prepared is not None:
            report(f"Data: using cached {folder}: {prepared.summary} ({time.perf_counter() - start:.1f} s)")
            return prepared
        texts = train + (val or [])
        size = sum(document.size for document in texts) / 1e6
        report(f"Data: preparing {folder} ({reason}): {len(texts):,} documents, {size:.1f} MB")
        clean_up(cache_dir)
        _make(folder, key, sources, (train, val), tokenizer, max_seq_length, report)
    except OSError as error:
        raise UserError(f"--data.cache_dir {cache_dir}: cannot be used: {error.strerror or error}") from error
    prepared = _open(folder, key, tokenizer, max_seq_length)
    report(f"Data: prepared {prepared.summary} ({time.perf_counter() - start:.1f} s)")
    return prepared


def _find(
    folder: Path, key: str, tokenizer: Tokenizer | None, max_seq_length: int, report: Report
) -> tuple[PreparedData | None, str]:
    """What lies ready in the cache, or the reason why nothing does."""
    if not folder.exists():
        return None, "not prepared yet"
    try:
        verify(folder, report)
        return _open(folder, key, tokenizer, max_seq_length), ""
    except DAMAGE as error:
        return None, f"what is there is damaged ({error!s})"


def _key(
    sources: TextSources,
    train: list[documents.Document],
    val: list[documents.Document] | None,
    tokenizer: Tokenizer | None,
    max_seq_length: int,
) -> str:
    facts = {
        "code": CODE_VERSION,
        "train": [d.sha256 for d in train],
        "val": None if val is None else [d.sha256 for d in val],
        "tokenizer": ["trained", sources.vocab_size] if tokenizer is None else tokenizer.fingerprint,
        "block_size": max_seq_length + 1,
        "val_fraction": sources.val_fraction,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _open(folder: Path, key: str, tokenizer: Tokenizer | None, max_seq_length: int) -> PreparedData:
    """Read a prepared folder. Raises one of DAMAGE if it is not whole."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("key") != key:
        raise ValueError(f"{MANIFEST} belongs to other data")
    if tokenizer is None:
        tokenizer = Tokenizer.load(folder / "tokenizer", flag="the cached tokenizer")
    if tokenizer.fingerprint != manifest.get("tokenizer"):
        raise ValueError("the tokenizer was changed")
    rows: dict[str, TokenRows | None] = {"train": None, "val": None}
    for split in rows:
        facts = manifest[split]
        if facts is not None:
            found = rows[split] = TokenRows(folder / split, max_seq_length + 1)
            if len(found) != facts["rows"]:
                raise ValueError(f"{split} holds {len(found):,} rows instead of {facts['rows']:,}")
    train = rows["train"]
    if train is None:
        raise ValueError(f"{MANIFEST} names no training rows")
    return PreparedData(
        train=train,
        val=rows["val"],
        tokenizer=tokenizer,
        content_key=manifest["content_key"],
        summary=_summary(manifest),
    )


def _summary(manifest: dict[str, Any]) -> str:
    def split(name: str) -> str:
        facts = manifest[name]
        if facts is None:
            return f"no {name} rows"
        left = f", {facts['tail_tokens']:,} tokens left over" if facts["tail_tokens"] else ""
        return f"{facts['rows']:,} {name} rows{left}"

    size = f"{manifest['tokens'] / 1e6:.2f} M tokens of a vocabulary of {manifest['vocab_size']:,}"
    return f"{size} in blocks of {manifest['block_size']:,}: {split('train')}; {split('val')}"


def _make(
    folder: Path,
    key: str,
    sources: TextSources,
    texts: tuple[list[documents.Document], list[documents.Document] | None],
    tokenizer: Tokenizer | None,
    max_seq_length: int,
    report: Report,
) -> None:
    """Build the data in a temporary folder beside ``folder``, then rename it."""
    with unfinished(folder) as temporary:
        used = tokenizer or _train_tokenizer(sources, texts[0], report)
        used.save(temporary / "tokenizer")
        manifest = {"version": CODE_VERSION, "key": key, "tokenizer": used.fingerprint}
        manifest |= _write_splits(temporary, sources, texts, used, max_seq_length, report)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        publish(temporary, folder, lambda: _find(folder, key, tokenizer, max_seq_length, report)[0] is not None)


def _train_tokenizer(sources: TextSources, train: list[documents.Document], report: Report) -> Tokenizer:
    start = time.perf_counter()
    # From the front of the stream: the held-out text is at its end.
    share = (1 - sources.val_fraction) * sum(d.size for d in train)
    tokenizer = train_bpe(documents.sample(train, min(_BPE_SAMPLE, int(share))), sources.vocab_size)
    less = "" if tokenizer.vocab_size == sources.vocab_size else f" (the text gives no {sources.vocab_size:,})"
    seconds = time.perf_counter() - start
    report(f"Data: trained a byte-level BPE with {tokenizer.vocab_size:,} tokens{less} ({seconds:.1f} s)")
    return tokenizer


def _write_splits(
    temporary: Path,
    sources: TextSources,
    texts: tuple[list[documents.Document], list[documents.Document] | None],
    tokenizer: Tokenizer,
    max_seq_length: int,
    report: Report,
) -> dict[str, Any]:
    """Write the chunks of both splits and return what the manifest says about them."""
    stream, own_val = temporary / "train.tokens", temporary / "val.tokens"
    tokens = _write_tokens(stream, texts[0], tokenizer, report)
    if texts[1] is not None:
        val = _write_tokens(own_val, texts[1], tokenizer, report)
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
        content.update(part)
        tail = write_chunks(part, temporary / split, block_size)
        splits[split] = {"tokens": len(part), "rows": len(part) // block_size, "tail_tokens": tail}
    total = len(tokens) + len(val)
    del tokens, val, part
    stream.unlink()
    own_val.unlink(missing_ok=True)
    facts = {"content_key": content.hexdigest(), "block_size": block_size, "vocab_size": tokenizer.vocab_size}
    return {**facts, "tokens": total, **splits}


def _require_block(tokens: np.ndarray, option: str, what: str, max_seq_length: int) -> None:
    if len(tokens) <= max_seq_length:
        raise UserError(
            f"{option}: {len(tokens):,} {what}, but one row needs {max_seq_length + 1:,} (--train.max_seq_length + 1);"
            " give shorter rows, more text or another held-out share"
        )


def _write_tokens(path: Path, texts: list[documents.Document], tokenizer: Tokenizer, report: Report) -> np.ndarray:
    """Encode documents to a file of plain tokens, an end-of-document token after each; return it as a memory map.

    Through a file, because the tokens of a large corpus do not fit into memory.
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
