"""Read rows from JSON, JSON Lines, CSV and Parquet files. Rows are streamed, except from JSON files. Errors name the
line or row."""

import csv
import hashlib
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.base import file_errors
from toolkit.data.sft.messages import unique_keys
from toolkit.errors import UserError, join_first, one_line, require_package
from toolkit.io.safe_parse import MAX_ROW, bounded_lines

VAL_NAMES = ("val", "validation", "test")
JSON_KINDS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl"}
CSV_KINDS = {".csv": "csv"}
PARQUET_KINDS = {".parquet": "parquet"}
_MAX_JSON = 2**30
_PARQUET_BATCH = 64  # rows per batch; each may repeat the largest value in the file
KINDS = JSON_KINDS | CSV_KINDS | PARQUET_KINDS
ClassNames = dict[str, list[str]]
"""The names of the labels 0, 1, ... by column."""


@dataclass(frozen=True)
class RowFile:
    """A file of rows.

    Args:
        kind: File format, one of the values of KINDS.
        option: The option that set the path, such as ``--data.json_path faq.jsonl``.
        split: The split to read from a JSON file with several splits.
    """

    path: Path
    kind: str
    option: str
    split: str | None = None

    @property
    def name(self) -> str:
        return str(self.path) if self.split is None else f"{self.path} {self.split}"

    @property
    def unit(self) -> str:
        return "line" if self.kind in ("jsonl", "csv") else "row"

    def fingerprint(self) -> str:
        from toolkit.data.text.documents import fingerprint

        (document,) = fingerprint([self.path], self.option)
        return f"{self.kind} {self.split} {document.sha256}"

    def rows(self) -> Iterator[tuple[int, Any]]:
        read = {"jsonl": _json_lines, "csv": _csv_lines, "parquet": _parquet_rows}.get(self.kind, self._json_rows)
        is_empty = True
        with _name_file(self.path, self.option):
            for row in read(self.path):
                yield row
                is_empty = False
        if is_empty:
            raise UserError(f"{self.option}: {self.name} contains no rows; give data with rows")

    def class_names(self) -> ClassNames:
        """Return the names of labels in a Parquet file of datasets."""
        if self.kind != "parquet":
            return {}
        require_pyarrow()
        from pyarrow import parquet

        metadata = parquet.read_schema(self.path).metadata or {}
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            return _find_class_names(json.loads(metadata[b"huggingface"])["info"]["features"])
        return {}

    def _json_rows(self, path: Path) -> Iterator[tuple[int, Any]]:
        value = _read_json(path)
        return enumerate(value if self.split is None else value[self.split], 1)


@dataclass(frozen=True)
class HubRows:
    """A dataset split loaded with the ``datasets`` library."""

    dataset: Any
    name: str
    unit: str = "row"

    def fingerprint(self) -> str:
        """Hash the row contents. The library's fingerprint includes paths and dates."""
        digest = hashlib.sha256()
        digest.update(repr(self.class_names() or "").encode())
        for row in self.dataset:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def rows(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(map(drop_nulls, self.dataset), 1)

    def class_names(self) -> ClassNames:
        return _find_class_names(self.dataset.features.to_dict())


def _find_class_names(features: dict[str, Any]) -> ClassNames:
    """Return the names of columns of ClassLabel, or of lists of it, from the features of datasets."""
    found = {}
    for column, feature in features.items():
        item: Any = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        if isinstance(item, dict) and item.get("_type") == "ClassLabel":
            found[column] = list(map(str, item["names"]))
    return found


RowSource = RowFile | HubRows
"""A source of rows numbered from 1. Messages show ``name`` and ``unit`` ("line" or "row")."""


@dataclass(frozen=True)
class Splits:
    """Sources of training and validation rows. ``notes`` are log lines."""

    train: Sequence[RowSource]
    val: Sequence[RowSource] | None = None
    notes: tuple[str, ...] = ()

    def first_row(self) -> Any:
        return next((row for source in self.train for _, row in source.rows()), None)


def describe_row(source: RowSource, number: int) -> str:
    """Return a row's location, such as ``data/faq.jsonl line 17``."""
    return f"{source.name} {source.unit} {number:,}"


@contextmanager
def _name_file(path: Path, option: str) -> Iterator[None]:
    """Turn errors of reading a file into a UserError with its path. A ValueError begins with the line."""
    with file_errors(option, path):
        try:
            yield
        except (UserError, UnicodeDecodeError):
            raise
        except ValueError as error:
            raise UserError(f"{path} {one_line(error)}") from error


# ---- finding


def find_splits(value: str | None, flag: str, kinds: dict[str, str]) -> Splits:
    """Resolve the path ``value`` of an option: a file, or a folder with train and val files.

    Args:
        value: The path; None if it is not set. A folder has ``train`` and ``val`` (or validation, or test) files,
            possibly sharded, such as ``train-00000-of-00002.parquet``.
        flag: The option, such as ``--data.json_path``.
        kinds: File format by suffix.
    """
    if not value:
        raise UserError(f"{flag}: must be given")
    option, path = f"{flag} {value}", Path(value).expanduser()
    if path.is_dir():
        return _find_in_folder(path, option, kinds)
    if not path.is_file():
        raise UserError(f"{option}: {'not a regular file' if path.exists() else 'no such file or folder'}")
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        name = {"csv": "CSV", "parquet": "Parquet"}.get(other := KINDS.get(path.suffix.lower(), ""), "JSON")
        hint = f"; use --data {name} --data.{name.lower()}_path {value}" if other else "; plain text: --data TextFiles"
        raise UserError(f"{option}: must end in {' or '.join(kinds)}{hint}")
    return splits_of_file(path, kind, option)


def _find_in_folder(folder: Path, option: str, kinds: dict[str, str]) -> Splits:
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    found = {
        split: [p for p in paths if p.suffix in kinds and (p.stem == split or p.stem.startswith(f"{split}-"))]
        for split in ("train", *VAL_NAMES)
    }
    if not found["train"]:
        raise UserError(f"{option}: the folder has no {' or '.join(f'train{suffix}' for suffix in kinds)}")
    held_out = next((split for split in VAL_NAMES if found[split]), None)
    sources, read = dict[str, list[RowSource]](), list[Path]()
    for split in filter(None, ("train", held_out)):
        read += found[split]
        # a mix of formats, or of shards and an unsharded file, may have the same rows
        if len(names := {(path.stem == split, path.suffix): path.name for path in found[split]}) > 1:
            which = " and ".join(names.values())
            raise UserError(f"{option}: the folder has {which}, which may be duplicates; remove one of them")
        parts = [splits_of_file(path, kinds[path.suffix], option) for path in found[split]]
        if any(part.val for part in parts):
            raise UserError(f"{option}: {split}.json contains splits itself; pass the file directly, or a list of rows")
        sources[split] = [source for part in parts for source in part.train]
    unread = [path.name for path in paths if path.suffix.lower() in KINDS and path not in read]
    val = f", {held_out} is the validation split" if held_out else "; name the validation split val"
    note = f"{folder}: not read: {join_first(unread)} (train is the training split{val})"
    return Splits(sources["train"], sources.get(held_out or ""), (note,) if unread else ())


def splits_of_file(path: Path, kind: str, option: str) -> Splits:
    """Return the splits in a file. A ``.json`` file contains a list, an object of lists, or JSON Lines."""
    if kind != "json":
        return Splits([RowFile(path, kind, option)])
    with _name_file(path, option):
        with open(path, encoding="utf-8-sig") as file:
            first = next((line for line in iter(lambda: file.readline(MAX_ROW), "") if line.strip()), "{}").strip()
        if first.startswith("["):
            return Splits([RowFile(path, "json", option)])
        with suppress(ValueError, RecursionError):
            line = json.loads(first)
            if isinstance(line, dict) and "train" not in line:
                return Splits([RowFile(path, "jsonl", option)])
        value = _read_json(path)
    splits = {name: value[name] for name in ("train", *VAL_NAMES) if isinstance(value, dict) and name in value}
    if "train" not in splits or not all(isinstance(rows, list) for rows in splits.values()):
        raise UserError(f'{option}: {path} must contain a list of rows, or {{"train": [...], "val": [...]}}')
    train, *held_out = (RowFile(path, "json", option, split) for split in splits)
    notes = tuple(
        f"{path}: {file.split} is not read: {held_out[0].split} is the validation split" for file in held_out[1:]
    )
    return Splits([train], held_out[:1] or None, notes)


# ---- reading


def _read_json(path: Path) -> Any:
    if path.stat().st_size > _MAX_JSON:
        raise UserError(f"{path}: more than {_MAX_JSON:,} bytes, which are read at once; write a row per line (.jsonl)")
    return _parse_json(path.read_text(encoding="utf-8-sig"))


def _parse_json(text: str, line: int | None = None) -> Any:
    """Parse a file, or one line. Raise ValueError with the line if it is invalid."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        line, reason = (line or 1) + error.lineno - 1, f"{error.msg} at column {error.colno}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # too many digits, a duplicate key
        reason = str(error)
    raise ValueError(f"{f'line {line:,}:' if line else 'is'} invalid JSON: {reason}")


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(bounded_lines(file), 1):
            line = line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
            if line in (b"[", b"{"):
                raise ValueError(
                    f"line {number:,}: invalid JSON: a file with one value over many lines must end in .json"
                )
            try:
                text = line.decode("utf-8", "surrogatepass")  # to_record reports surrogates
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number:,}: is not UTF-8 text; convert the file") from error
            if text:
                yield number, _parse_json(text, number)


def _csv_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield rows as dicts keyed by column. Empty cells are empty strings. Line endings in cells become ``\\n``."""
    csv.field_size_limit(MAX_ROW)
    number = 1  # first line of the row; quoted cells may span lines
    try:
        with open(path, encoding="utf-8-sig") as file:
            reader = csv.reader(bounded_lines(file), strict=True)
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise csv.Error(f"duplicate column {Counter(names).most_common(1)[0][0]}; rename one")
            if len(names) == 1 and (sign := re.search(r"[;\t|]", names[0])):
                raise csv.Error(f"columns are separated by {sign[0]!r}; separate them by commas")
            number = reader.line_num + 1
            for cells in reader:
                if cells and len(cells) != len(names):
                    raise csv.Error(f"{len(cells)} cells, but the header has {len(names)}; quote cells with commas")
                if cells:  # not an empty line
                    yield number, dict(zip(names, cells, strict=True))
                number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number:,}: invalid CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    require_pyarrow()
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_PARQUET_BATCH)
            yield from enumerate((drop_nulls(row) for batch in batches for row in batch.to_pylist()), 1)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: is not a valid Parquet file: {one_line(error)}; copy it again") from error


def require_pyarrow() -> None:
    require_package("--data: Parquet and zstd", "pyarrow", "17")


def drop_nulls(value: Any) -> Any:
    """Remove null fields recursively. Arrow fills fields that a row does not have with nulls."""
    if isinstance(value, dict):
        return {name: drop_nulls(field) for name, field in value.items() if field is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value
