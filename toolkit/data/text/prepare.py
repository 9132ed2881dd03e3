"""Prepare text files, cached by content: documents -> tokenizer -> token store -> manifest.

    <cache_dir>/<module>-<first 16 of the key>/tokens/         all tokens, see toolkit.data.tokens.store
                                              tokenizer/
                                              manifest.json   key, tokenizer fingerprint and splits
                                              checksums.json  checksums of all files above
                                              content_keys/   a content key per block size, added on use

Folders are published atomically with a rename (S5). The key excludes paths and dates: moved or copied text is a cache
hit, and changed text a miss. All block sizes share the same tokens.
"""

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.base import AddBos, PreparedData, Report, Values, Vocabulary
from toolkit.data.cache import (
    ANNOUNCE_BYTES,
    choose_cache_dir,
    hash_inputs,
    load_or_prepare,
    read_manifest,
    throttle,
    write_manifest,
)
from toolkit.data.text.documents import (
    Document,
    DocumentEnds,
    added_bos,
    batches,
    choose_ends,
    describe_changes,
    fingerprint,
    read_chunks,
    tokenize,
    train_tokenizer,
)
from toolkit.data.tokenizer import Tokenizer, collect_characters
from toolkit.data.tokens.store import BlockDataset, TokenWriter, open_splits, token_dtype
from toolkit.errors import UserError
from toolkit.io.atomic import write_atomic

CODE_VERSION = 3  # increment if the same text and options produce different rows


@dataclass(frozen=True)
class TextSources:
    """Text files and preparation options.

    Args:
        train: Training text files. If ``val`` is None, the end of the text is held out.
        train_option: The option that set ``train``, such as ``--data.train_data_path corpus``.
        val: Validation text files, or None.
        val_option: The option that set ``val`` or the held-out fraction.
        val_fraction: Fraction of ``train`` tokens to hold out; 0 with ``val``.
        module: Prefix of the cache folder name.
        vocab_size: Vocabulary size of the BPE tokenizer to train if there is no tokenizer; or "characters".
        text_fraction: Fraction of the ``train`` text to use, from the start.
        add_bos: The option ``--data.add_bos``.
    """

    train: list[Path]
    train_option: str
    val: list[Path] | None
    val_option: str
    val_fraction: float
    module: str
    vocab_size: Vocabulary
    text_fraction: float
    add_bos: AddBos
    cache_dir: str | None


def prepare_text(
    sources: TextSources, tokenizer: Tokenizer | None, max_seq_length: int, report: Report
) -> PreparedData:
    """Load prepared rows from the cache, or prepare them."""
    start = time.perf_counter()
    train = fingerprint(sources.train, sources.train_option)
    val = [] if sources.val is None else fingerprint(sources.val, sources.val_option)
    texts = train + val
    if changes := describe_changes(texts):
        report(f"Data: {changes}")
    ends = choose_ends(sources.add_bos, tokenizer, (d.tail.decode(errors="ignore") for d in texts), report)
    inputs: Values = {
        "code": CODE_VERSION,
        "train": [d.sha256 for d in train],
        "val": None if sources.val is None else [d.sha256 for d in val],
        "tokenizer": ["trained", sources.vocab_size] if tokenizer is None else tokenizer.fingerprint,
        "val_fraction": sources.val_fraction,
    }
    if sources.text_fraction < 1:
        inputs["text_share"] = sources.text_fraction
    if ends:
        inputs["ends"] = ends
    key = hash_inputs(inputs)
    folder = choose_cache_dir(sources.cache_dir) / f"{sources.module}-{key[:16]}"

    def make(temporary: Path) -> None:
        active = tokenizer or _train_tokenizer(sources, train, val, report)
        active.save(temporary / "tokenizer")
        facts = _write_tokens(temporary, sources, (train, val), active, ends, report)
        write_manifest(temporary, {"key": key, "tokenizer": active.fingerprint, **facts})

    prepared, is_cached = load_or_prepare(
        folder,
        f"{len(texts):,} documents, {sum(document.size for document in texts) / 1e6:.1f} MB",
        lambda: _open(folder, key, tokenizer, max_seq_length + 1, report),
        make,
        report,
    )
    _require_block(prepared.train, sources.train_option, "training tokens")
    _require_block(prepared.val, sources.val_option, "held-out tokens")
    prepared.added_bos = added_bos(ends, prepared.tokenizer)
    how = f"using cached {folder}:" if is_cached else "prepared"
    report(f"Data: {how} {prepared.summary} ({time.perf_counter() - start:.1f} s)")
    return prepared


def _require_block(rows: Any, option: str, what: str) -> None:
    if rows is not None and not len(rows):
        raise UserError(
            f"{option}: {rows.n_tokens:,} {what}, but one row needs {rows.block_size:,} (--train.max_seq_length + 1);"
            " reduce --train.max_seq_length, provide more text, or change the held-out share"
        )


# ---- reading


def _open(folder: Path, key: str, tokenizer: Tokenizer | None, block_size: int, report: Report) -> PreparedData:
    """Read a prepared folder. Raises one of DAMAGE_ERRORS if damaged."""
    manifest = read_manifest(folder, key)
    if tokenizer is None:
        tokenizer = Tokenizer.load(folder / "tokenizer", flag="the cached tokenizer")
    if tokenizer.fingerprint != manifest.get("tokenizer"):
        raise ValueError("the tokenizer was changed")
    train, val = open_splits(folder, manifest, block_size)
    return PreparedData(train, val, tokenizer, _content_key(train, val, report), _summary(train, val, tokenizer))


def _content_key(train: BlockDataset, val: BlockDataset | None, report: Report) -> str:
    """Return the hex SHA-256 of split sizes and tokens. Reads all tokens once per block size."""
    store, key_file = train.store, train.store.folder / "content_keys" / str(train.block_size)
    with suppress(OSError):
        if len(key := key_file.read_text(encoding="utf-8")) == 2 * hashlib.sha256().digest_size:
            return key
    if (size := store.n_tokens * store.dtype.itemsize) >= ANNOUNCE_BYTES:
        report(f"Data: hashing {size / 1e9:,.1f} GB in {store.folder}, once for this --train.max_seq_length")
    n_val = 0 if val is None else val.n_tokens
    digest = hashlib.sha256(f"{train.block_size} {train.n_tokens} {n_val} {store.dtype}".encode())
    for rows in (train, val):
        for block in () if rows is None else store.array.blocks(rows.start, rows.start + rows.n_tokens):
            digest.update(block.data)
    with suppress(OSError):  # not writable: the cache belongs to another user
        write_atomic(key_file, digest.hexdigest().encode())
    return digest.hexdigest()


def _summary(train: BlockDataset, val: BlockDataset | None, tokenizer: Tokenizer) -> str:
    def describe(split: str, rows: BlockDataset | None) -> str:
        if rows is None:
            return f"no {split} rows"
        leftover = f", {rows.tail_tokens:,} tokens left over" if rows.tail_tokens else ""
        return f"{len(rows):,} {split} rows{leftover}"

    n_tokens = train.n_tokens + (0 if val is None else val.n_tokens)
    size = f"{n_tokens / 1e6:.2f} M tokens, vocabulary size {tokenizer.vocab_size:,}"
    return f"{size} in blocks of {train.block_size:,}: {describe('train', train)}; {describe('val', val)}"


# ---- writing


def _train_tokenizer(sources: TextSources, train: list[Document], val: list[Document], report: Report) -> Tokenizer:
    if sources.vocab_size == "characters":
        # Include the held-out text; otherwise its new characters would be unknown.
        tokenizer = collect_characters(chunk.text for chunk in read_chunks(train + val))
        report(f"Data: the text has {tokenizer.vocab_size - 2:,} different characters, each one token")
        return tokenizer
    # Exclude the end of the text, which is held out.
    share = sources.text_fraction * (1 - sources.val_fraction) * sum(d.size for d in train)
    return train_tokenizer(read_chunks(train), int(share), sources.vocab_size, report)


def _write_tokens(
    folder: Path,
    sources: TextSources,
    texts: tuple[list[Document], list[Document]],
    tokenizer: Tokenizer,
    ends: DocumentEnds,
    report: Report,
) -> Values:
    """Tokenize and write the documents. Return what the manifest says about the tokens."""
    writer, sizes = TokenWriter(folder, token_dtype(tokenizer.vocab_size)), list[int]()
    for documents in texts:
        total, done, report_progress, limit = sum(d.size for d in documents), 0, throttle(report), None
        if sources.text_fraction < 1 and documents is texts[0]:
            total = limit = max(4, round(sources.text_fraction * total))  # bytes; a UTF-8 character has up to 4
        chunks = read_chunks(documents, limit)
        for batch, ids in tokenize(batches(chunks, tokenizer.splits_at_newlines()), tokenizer, ends):
            writer.add(ids)
            done += sum(len(chunk.text) for chunk in batch)
            report_progress(f"Data: tokenized {done / 1e6:,.0f} of about {total / 1e6:,.0f} MB")
        sizes.append(writer.n_tokens)
    writer.finish()
    n_train, n_all = sizes
    held_out = int(n_train * sources.val_fraction)
    val = [n_train - held_out, n_train] if sources.val_fraction else None
    splits = {"train": [0, n_train - held_out], "val": val if sources.val is None else [n_train, n_all]}
    return {"largest_token": writer.largest_token, "splits": splits}
