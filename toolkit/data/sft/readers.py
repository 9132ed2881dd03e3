"""Read rows from JSON, JSON Lines, CSV and Parquet files. Rows are streamed, except from JSON files. Errors name the
line or row."""

import csv
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr, Protocol

from toolkit.data.sft.messages import unique_keys
from toolkit.errors import UserError, join_first, one_line
from toolkit.io.safe_parse import MAX_ROW, bounded_lines

VAL_NAMES = ("val", "validation", "test")
JSON_KINDS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl"}
CSV_KINDS = {".csv": "csv"}
PARQUET_KINDS = {".parquet": "parquet"}
_MAX_JSON = 2**30
_PARQUET_BATCH = 64  # rows per batch; each may repeat the largest value in the file
KINDS = JSON_KINDS | CSV_KINDS | PARQUET_KINDS


class RowSource(Protocol):
    """A source of rows numbered from 1. Messages show ``name`` and ``unit`` ("line" or "row")."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str: ...

    def fingerprint(self) -> str:
        """Return a hex SHA-256 of the row contents."""
        ...

    def rows(self) -> Iterator[tuple[int, Any]]: ...


@dataclass(frozen=True)
class Splits:
    """Sources of training and validation rows. ``notes`` are log lines."""

    train: Sequence[RowSource]
    val: Sequence[RowSource] | None = None
    notes: tuple[str, ...] = ()


def describe_row(source: RowSource, number: int) -> str:
    """Return a row's location, such as ``data/faq.jsonl line 17``."""
    return f"{source.name} {source.unit} {number:,}"


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
        try:
            for number, row in read(self.path):
                if self.kind != "jsonl" and _count_characters(row) > MAX_ROW:  # JSON lines are limited by bounded_lines
                    where = describe_row(self, number)
                    raise UserError(f"{where}: exceeds {MAX_ROW:,} characters, the maximum for a row")
                yield number, row
                is_empty = False
        except OSError as error:
            raise UserError(f"{self.option}: {self.path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise _not_utf8_error(self.path, error) from error
        except MemoryError as error:
            raise UserError(f"{self.option}: {self.path}: not enough memory to read its rows") from error
        if is_empty:
            raise UserError(f"{self.option}: {self.name} contains no rows; give data with rows")

    def _json_rows(self, path: Path) -> Iterator[tuple[int, Any]]:
        value = _read_json(path)
        return enumerate(value if self.split is None else value[self.split], 1)


# ---- finding


def find_splits(value: str | None, name: str, kinds: dict[str, str]) -> Splits:
    """Resolve ``--data.<name> <value>``: a file, or a folder with train and val files.

    Args:
        value: The path. A folder has ``train`` and ``val`` (or validation, or test) files, possibly sharded, such as
            ``train-00000-of-00002.parquet``.
        kinds: File format by suffix.
    """
    if not value:
        raise UserError(f"--data.{name}: must be given")
    option, path = f"--data.{name} {value}", Path(value).expanduser()
    if path.is_dir():
        return _find_in_folder(path, option, kinds)
    if not path.is_file():
        raise UserError(f"{option}: {'not a regular file' if path.exists() else 'no such file or folder'}")
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"{option}: must end in {' or '.join(kinds)}{_suggest_module(path.suffix.lower())}")
    return _splits_of_json(path, option) if kind == "json" else Splits([RowFile(path, kind, option)])


def _find_in_folder(folder: Path, option: str, kinds: dict[str, str]) -> Splits:
    paths_by_split = {split: _files_of(folder, split, kinds) for split in ("train", *VAL_NAMES)}
    if not paths_by_split["train"]:
        raise UserError(f"{option}: the folder has no {' or '.join(f'train{suffix}' for suffix in kinds)}")

    def files(split: str) -> list[RowFile]:
        paths = _require_same_kind(paths_by_split[split], split, option)
        return [_require_unsplit(RowFile(path, kinds[path.suffix], option)) for path in paths]

    held_out = next((split for split in VAL_NAMES if paths_by_split[split]), None)
    train, val = files("train"), files(held_out) if held_out else None
    read = {file.name for split in ("train", held_out) if split for file in paths_by_split[split]}
    return Splits(train, val, _describe_unread(folder, read, held_out))


def _files_of(folder: Path, split: str, kinds: dict[str, str]) -> list[Path]:
    names = (pattern for suffix in kinds for pattern in (f"{split}{suffix}", f"{split}-*{suffix}"))
    return sorted(path for pattern in names for path in folder.glob(pattern) if path.is_file())


def _require_same_kind(files: list[Path], split: str, option: str) -> list[Path]:
    """Return ``files``. Reject a mix of formats, or of shards and an unsharded file: rows may be duplicates."""
    unsharded = [path for path in files if path.stem == split]
    if len(files) > 1 and (unsharded or len({path.suffix for path in files}) > 1):
        first = unsharded[0] if unsharded else files[0]
        other = next(path for path in files if path != first and (unsharded or path.suffix != first.suffix))
        raise UserError(
            f"{option}: the folder has {first.name} and {other.name}, which may be duplicates; remove one of them"
        )
    return files


def _describe_unread(folder: Path, read: set[str], held_out: str | None) -> tuple[str, ...]:
    files = (path for path in folder.iterdir() if path.suffix.lower() in KINDS and path.is_file())
    names = sorted(path.name for path in files if path.name not in read and not path.name.startswith("."))
    if not names:
        return ()
    val = f", {held_out} is the validation split" if held_out else "; name the validation split val"
    return (f"{folder}: not read: {join_first(names)} (train is the training split{val})",)


def _require_unsplit(file: RowFile) -> RowFile:
    """Reject a ``.json`` file with several splits in a folder of split files."""
    if file.kind != "json":
        return file
    (content,) = _splits_of_json(file.path, file.option).train
    if not isinstance(content, RowFile) or content.split is not None:
        raise UserError(
            f"{file.option}: {file.path} contains splits itself; pass the file directly, or make it a list of rows"
        )
    return content


def _splits_of_json(path: Path, option: str) -> Splits:
    """Return the splits in a ``.json`` file, which contains a list, an object of lists, or JSON Lines."""
    first = _first_line(path, option)
    if not first:
        raise UserError(f"{option}: {path} is empty; give a file with rows")
    if first.startswith("["):
        return Splits([RowFile(path, "json", option)])
    try:
        line = json.loads(first)
        if isinstance(line, dict) and "train" not in line:
            return Splits([RowFile(path, "jsonl", option)])
    except (ValueError, RecursionError):
        pass
    value = _read_json(path)
    if not isinstance(value, dict) or "train" not in value:
        raise UserError(f'{option}: {path} must contain a list of rows, or {{"train": [...], "val": [...]}}')
    held_out = [split for split in VAL_NAMES if split in value]
    for split in ("train", *held_out):
        if not isinstance(value[split], list):
            raise UserError(f'{option}: {path}: "{split}" must be a list of rows')
    notes = tuple(f"{path}: {split} is not read: {held_out[0]} is the validation split" for split in held_out[1:])
    val = [RowFile(path, "json", option, held_out[0])] if held_out else None
    return Splits([RowFile(path, "json", option, "train")], val, notes)


def _first_line(path: Path, option: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            while (line := file.readline(MAX_ROW)) and not line.strip():
                pass
            return line.strip()
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _not_utf8_error(path, error) from error


def _not_utf8_error(path: Path, error: UnicodeDecodeError) -> UserError:
    return UserError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it")


def _suggest_module(suffix: str) -> str:
    modules = {".csv": "CSV --data.csv_path", ".parquet": "Parquet --data.parquet_path"}
    modules |= dict.fromkeys(JSON_KINDS, "JSON --data.json_path")
    return f"; did you mean --data {modules[suffix]}?" if suffix in modules else ""


# ---- reading


def _read_json(path: Path) -> Any:
    if path.stat().st_size > _MAX_JSON:
        raise UserError(f"{path}: more than {_MAX_JSON:,} bytes, which are read at once; write a row per line (.jsonl)")
    return _parse_json(path.read_text(encoding="utf-8-sig"), path)


def _parse_json(text: str, path: Path, line: int | None = None, hint: str = "") -> Any:
    """Parse a file, or one line. The error message for invalid JSON ends with ``hint``."""
    first = line or 1
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        where = f"{path} line {first + error.lineno - 1:,}"
        raise UserError(f"{where}: invalid JSON: {error.msg} at column {error.colno}{hint}") from error
    except (RecursionError, ValueError) as error:  # ValueError: too many digits, a duplicate key
        where = f"{path}" if line is None else f"{path} line {line:,}"
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise UserError(f"{where}: invalid JSON: {reason}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            line = line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
            if not line:
                continue
            try:
                text = line.decode("utf-8", "surrogatepass")  # to_record reports surrogates
            except UnicodeDecodeError as error:
                raise UserError(f"{path} line {number:,}: is not UTF-8 text; convert the file") from error
            hint = "; a file with one JSON value over many lines must end in .json" if text in "[{" else ""
            yield number, _parse_json(text, path, number, hint)


def _lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    try:
        yield from bounded_lines(file)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise UserError(f"{path} {error}") from error


def _csv_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield rows as dicts keyed by column. Empty cells are empty strings. Line endings in cells become ``\\n``."""
    number, before = 1, csv.field_size_limit(MAX_ROW)
    try:
        with open(path, encoding="utf-8-sig") as file:
            reader = csv.DictReader(_lines(file, path), strict=True)
            if duplicates := {name for name, n in Counter(reader.fieldnames or []).items() if n > 1}:
                raise UserError(f"{path} line 1: duplicate column {min(duplicates)}; rename one")
            if (
                reader.fieldnames
                and len(reader.fieldnames) == 1
                and (sign := re.search(r"[;\t|]", reader.fieldnames[0]))
            ):
                raise UserError(f"{path} line 1: columns are separated by {sign[0]!r}; separate them by commas")
            while True:
                number = reader.line_num + 1  # first line of the row; quoted cells may span lines
                row = next(reader, None)
                if row is None:
                    return
                if None in row or None in row.values():
                    difference = "more" if None in row else "fewer"
                    raise UserError(
                        f"{path} line {number:,}: has {difference} cells than the header; quote cells with commas"
                    )
                yield number, row
    except csv.Error as error:
        raise UserError(f"{path} line {number:,}: invalid CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError("--data Parquet: needs pyarrow; run: pip install 'pyarrow>=17'") from error
    try:
        with parquet.ParquetFile(path) as file:
            reject_decompression_bomb(path.stat().st_size, file.metadata, str(path))
            batches = file.iter_batches(batch_size=_PARQUET_BATCH)
            yield from enumerate((drop_nulls(row) for batch in batches for row in batch.to_pylist()), 1)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: is not a valid Parquet file: {one_line(error)}; copy it again") from error


def drop_nulls(value: Any) -> Any:
    """Remove null fields recursively. Arrow fills fields that a row does not have with nulls."""
    if isinstance(value, dict):
        return {name: drop_nulls(field) for name, field in value.items() if field is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def reject_decompression_bomb(size: int, metadata: Any, name: str) -> None:
    """Raise UserError for a likely decompression bomb, such as repeated values or compressed zeros."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    values = sum(chunk.num_values for chunk in chunks)
    expanded = sum(chunk.total_uncompressed_size for chunk in chunks)
    repeated = max((chunk.num_values * chunk.total_uncompressed_size for chunk in chunks), default=0)
    for found, limit, what in (
        (values, 100_000 + 200 * size, f"{values:,} values"),
        (expanded, (1 << 24) + 2000 * size, f"{expanded / 1e6:,.1f} MB"),
        (repeated, 10**9 + (20 * size) ** 2, f"{values:,} values of up to {expanded / 1e6:,.1f} MB"),
    ):
        if found > limit:
            raise UserError(f"{name}: claims {what} in a file of {size / 1e3:,.1f} kB; refusing to read it")


def _count_characters(row: Any) -> int:
    count, values = 0, [row]
    while values:
        value = values.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
    return count
