"""Write prepared tokens to a folder or to object storage, for ``--data LitData``."""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from toolkit.data.base import PreparedData, Report, TokenDataset, Values
from toolkit.data.cache import CRC_FILE, MANIFEST, publish, read_checksums, staging_folder
from toolkit.data.streamed.streamed_rows import RowSpans, StreamedRows
from toolkit.data.tokens.chunks import INDEX, ChunkedArray, read_index
from toolkit.data.tokens.token_store import SPLITS, TOKENS, BlockDataset, TokenWriter
from toolkit.errors import UserError
from toolkit.io.storage import Storage

Files = dict[str, Path | bytes]
"""Content of each file by its name, in the order of writing."""


def require_free(out_dir: str) -> None:
    """Raise UserError unless ``--out_dir`` can be written: a new or empty folder, or storage without data."""
    if "://" not in out_dir:
        path = Path(out_dir).absolute()
        parent = next(parent for parent in path.parents if parent.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise UserError(f"--out_dir {out_dir}: {parent} is not a folder that can be written; choose another")
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    else:
        storage = Storage(out_dir, "--out_dir")
        storage.probe()
        with storage.one_line_errors():
            names = storage.entries()
            is_free = MANIFEST not in names and not names.keys() - {*SPLITS, TOKENS, "tokenizer"}  # else unfinished
    if not is_free:
        raise UserError(f"--out_dir {out_dir}: already has files; choose another, or delete them")


def publish_tokens(prepared: PreparedData, out_dir: str, report: Report) -> None:
    """Write the tokens, their splits and the tokenizer. Chunks of a stream keep their order.

    Raises:
        UserError: The rows are not plain tokens, or ``out_dir`` cannot be written.
    """
    rows = prepared.train
    with tempfile.TemporaryDirectory(prefix="toolkit-") as scratch:
        if isinstance(rows, StreamedRows) and rows.segments.reader.stream.tokenizer is not None:
            files = _files_of_stream(rows, prepared.val, Path(scratch))
        elif isinstance(rows, BlockDataset) and (rows.store.folder / MANIFEST).is_file():
            folder = rows.store.folder
            names = sorted(read_checksums(folder), key=lambda name: name == MANIFEST)
            files = {name: folder / name for name in names}
        else:
            raise UserError(f"--out_dir {out_dir}: is for text, such as TextFiles or HuggingFaceText; remove it")
        size = sum(len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())
        if "://" in out_dir:
            _upload(files, Storage(out_dir, "--out_dir"))
        else:
            _copy(files, Path(out_dir))
    report(f"Data: {size / 1e9:.3g} GB in {out_dir}; read it with --data LitData --data.data_path {out_dir}")


def _copy(files: Files, folder: Path) -> None:
    try:
        with staging_folder(folder) as temporary:
            for name, content in files.items():
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content) if isinstance(content, bytes) else shutil.copyfile(content, target)
            publish(temporary, folder)
    except OSError as error:
        raise UserError(f"--out_dir {folder}: {error.strerror or error}") from error


def _upload(files: Files, storage: Storage) -> None:
    with storage.one_line_errors():
        for name, content in files.items():
            storage.write(name, content) if isinstance(content, bytes) else storage.upload(content, name)


def _files_of_stream(rows: StreamedRows, val: TokenDataset | None, scratch: Path) -> Files:
    """Return the chunks of all segments as one dataset per split, and the tokenizer."""
    stream, files, largest = rows.segments.reader.stream, Files(), 0
    spans = [(number, 0, rows.count(number, stream.prepare(number))) for number in rows.numbers]
    splits = {"train": RowSpans(rows.segments, [span for span in spans if span[2] > 0])}
    if isinstance(val, RowSpans):
        splits["val"] = val
    for split, part in splits.items():
        chunks, checksums, index = list[Values](), [], Values()
        for i, folder in enumerate(_token_folders(part, scratch / split)):
            index = read_index(folder)
            for n, chunk in enumerate(index["chunks"]):
                name = f"chunk-{i}-{n}.bin"
                files[f"{split}/{name}"] = folder / chunk["filename"]
                chunks.append(chunk | {"filename": name})
            checksums.append(np.load(folder / CRC_FILE))
            largest = max(largest, *(int(block.max()) for block in ChunkedArray(folder).blocks()))
        np.save(packed := io.BytesIO(), np.concatenate(checksums))
        files[f"{split}/{CRC_FILE}"] = packed.getvalue()
        files[f"{split}/{INDEX}"] = json.dumps(index | {"chunks": chunks}, sort_keys=True).encode()
    folder = stream.folder / "tokenizer"
    tokenizer = {f"tokenizer/{file.name}": file for file in sorted(folder.iterdir())}
    files[MANIFEST] = json.dumps({"largest_token": largest}).encode()  # last: without it, a folder is not complete
    return tokenizer | files


def _token_folders(part: RowSpans, scratch: Path) -> Iterator[Path]:
    """Yield the folder of the chunks of each span; of a part of a segment, a copy in ``scratch``."""
    stream, block_size = part.segments.reader.stream, part.segments.block_size
    for number, start, stop in part.spans:
        if (opened := stream.open(number)) is None:
            raise UserError(f"{stream.segment_folder(number)}: is missing or damaged; prepare the data again")
        store, _ = opened
        if (start, stop) == (0, store.n_tokens // block_size):
            yield stream.segment_folder(number) / TOKENS
            continue
        writer = TokenWriter(scratch / str(number), store.dtype)
        writer.add(store.tokens(start * block_size, stop * block_size))
        writer.finish()
        yield scratch / str(number) / TOKENS
