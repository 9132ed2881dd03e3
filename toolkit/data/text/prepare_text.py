"""Prepare text files, cached by content: documents -> tokenizer -> token store -> manifest.

    <cache_dir>/<module>-<first 16 of the key>/tokens/         all tokens, see toolkit.data.tokens.token_store
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
from pathlib import Path
from typing import Any

from toolkit.data.base import (
    PreparedData,
    Report,
    TextPaths,
    Values,
    Vocabulary,
    cache_prefix,
    held_out_fraction,
    trained_vocabulary,
)
from toolkit.data.cache import (
    ANNOUNCE_BYTES,
    choose_cache_dir,
    hash_inputs,
    load_or_prepare,
    read_manifest,
    require_preparation,
    write_manifest,
)
from toolkit.data.text.documents import (
    added_bos,
    choose_ends,
    describe_changes,
    fingerprint,
    read_chunks,
    text_bytes,
    train_tokenizer,
    write_text,
)
from toolkit.data.tokenizer import Tokenizer, collect_characters
from toolkit.data.tokens.token_store import BlockDataset, TokenWriter, open_splits, token_dtype
from toolkit.errors import UserError
from toolkit.io.atomic import write_atomic

CODE_VERSION = 3  # increment if the same text and options produce different rows


def prepare_text(
    options: Any, paths: TextPaths, tokenizer: Tokenizer | None, max_seq_length: int, report: Report
) -> PreparedData:
    """Load prepared rows from the cache, or prepare them. ``options`` is the data module, a ``FileText``."""
    start = time.perf_counter()
    if sum(path.stat().st_size for path in (*paths.train, *(paths.val or ())) if path.is_file()) >= ANNOUNCE_BYTES:
        require_preparation()  # hashing takes longer than a plan should
    train = fingerprint(paths.train, paths.train_option)
    val = None if paths.val is None else fingerprint(paths.val, paths.val_option)
    texts = train + (val or [])
    if changes := describe_changes(texts):
        report(f"Data: {changes}")
    ends = choose_ends(options.add_bos, tokenizer, (d.tail.decode(errors="ignore") for d in texts), report)
    vocab_size: Vocabulary = trained_vocabulary(options)
    share, held_out = options.text_fraction, held_out_fraction(options.val_fraction, val)
    inputs: Values = {
        "code": CODE_VERSION,
        "train": [d.sha256 for d in train],
        "val": None if val is None else [d.sha256 for d in val],
        "tokenizer": ["trained", vocab_size] if tokenizer is None else tokenizer.fingerprint,
        "val_fraction": held_out,
    }
    if share < 1:
        inputs["text_share"] = share
    if ends:
        inputs["ends"] = ends
    key = hash_inputs(inputs)
    folder = choose_cache_dir(options.cache_dir) / f"{cache_prefix(options)}-{key[:16]}"

    def make(temporary: Path) -> None:
        active, n_bytes = tokenizer, text_bytes(train)
        if active is None and vocab_size == "characters":
            # Include the held-out text; otherwise its new characters would be unknown.
            active = collect_characters(chunk.text for chunk in read_chunks(texts))
            report(f"Data: the text has {active.vocab_size - 2:,} different characters, each one token")
        elif active is None:  # exclude the end of the text, which is held out
            active = train_tokenizer(read_chunks(train), int(share * (1 - held_out) * n_bytes), int(vocab_size), report)
        active.save(temporary / "tokenizer")
        writer = TokenWriter(temporary, token_dtype(active.vocab_size))
        # bytes; a UTF-8 character has up to 4
        write_text(writer, train, active, ends, report, max(4, round(share * n_bytes)) if share < 1 else None)
        n_train = writer.n_tokens
        write_text(writer, val or [], active, ends, report)
        n_all, n_held_out = writer.finish(), int(n_train * held_out)
        val_tokens = [n_train - n_held_out, n_train] if held_out else None
        splits = {"train": [0, n_train - n_held_out], "val": val_tokens if val is None else [n_train, n_all]}
        facts = {"tokenizer": active.fingerprint, "largest_token": writer.largest_token, "splits": splits}
        write_manifest(temporary, {"key": key, **facts})

    prepared, is_cached = load_or_prepare(
        folder,
        f"{len(texts):,} documents, {text_bytes(texts) / 1e6:.1f} MB",
        lambda: _open(folder, key, tokenizer, max_seq_length + 1, options.stride, report),
        make,
        report,
    )
    _require_block(prepared.train, paths.train_option, "training tokens")
    _require_block(prepared.val, paths.val_option or f"--data.val_fraction {held_out}", "held-out tokens")
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


def _open(
    folder: Path, key: str, tokenizer: Tokenizer | None, block_size: int, stride: int | None, report: Report
) -> PreparedData:
    """Read a prepared folder. Raises one of DAMAGE_ERRORS if damaged."""
    manifest = read_manifest(folder, key)
    if tokenizer is None:
        tokenizer = Tokenizer.load(folder / "tokenizer", "the cached tokenizer", is_own=True)
    if tokenizer.fingerprint != manifest.get("tokenizer"):
        raise ValueError("the tokenizer was changed")
    train, val = open_splits(folder, manifest, block_size, stride)
    content_key = _content_key(train, val, report)
    if stride is not None:
        content_key = hash_inputs({"tokens": content_key, "stride": stride})
    return PreparedData(train, val, tokenizer, content_key, _summary(train, val, tokenizer))


def _content_key(train: BlockDataset, val: BlockDataset | None, report: Report) -> str:
    """Return the hex SHA-256 of split sizes and tokens. Reads all tokens once per block size."""
    store, key_file = train.store, train.store.folder / "content_keys" / str(train.block_size)
    with suppress(OSError):
        if len(key := key_file.read_text(encoding="utf-8")) == 2 * hashlib.sha256().digest_size:
            return key
    if (size := store.n_tokens * store.dtype.itemsize) >= ANNOUNCE_BYTES:
        require_preparation()
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
