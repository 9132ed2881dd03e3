"""Where rows come from: JSON, JSON lines, CSV and Parquet files, and Hugging Face data sets. Rows are read as they are
asked for (a JSON array whole); mistakes in a file are said with its line or row."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import UserError

VAL_NAMES = ("val", "validation", "test")
JSON_KINDS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl"}
CSV_KINDS = {".csv": "csv"}
PARQUET_KINDS = {".parquet": "parquet"}
_PARQUET_BATCH = 64  # rows: each of them may repeat the largest value of the file
_NAMED = 5  # files that are named in a line
KINDS = JSON_KINDS | CSV_KINDS | PARQUET_KINDS


class RowSource(Protocol):
    """Rows with numbers from 1 on; ``name`` and ``unit`` ("line" or "row") say for people what a number means."""

    name: str
    unit: str

    def fingerprint(self) -> str:
        """SHA-256 in hex of what the rows hold."""
        ...

    def rows(self) -> Iterator[tuple[int, Any]]: ...


@dataclass(frozen=True)
class Splits:
    """Training rows, and held-out rows of their own where there are any; ``notes`` are lines for people."""

    train: list[RowSource]
    val: list[RowSource] | None = None
    notes: tuple[str, ...] = ()


def place(source: RowSource, number: int) -> str:
    """``data/faq.jsonl line 17``."""
    return f"{source.name} {source.unit} {number:,}"


@dataclass(frozen=True)
class RowFile:
    """The rows of a file.

    Args:
        path: The file.
        kind: One of the values of KINDS.
        option: How the user named it, such as ``--data.json_path faq.jsonl``.
        split: Of a JSON file that holds one object, the key whose list is read.
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
        from toolkit.data.documents import fingerprint

        (document,) = fingerprint([self.path], self.option)
        return f"{self.kind} {self.split} {document.sha256}"

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield the rows with their numbers.

        Raises:
            UserError: the file cannot be read, is broken or has no rows.
        """
        read = {"jsonl": _json_lines, "csv": _csv_lines, "parquet": _parquet_rows}.get(self.kind)
        empty = True
        try:
            for number, row in enumerate(self._array(), 1) if read is None else read(self.path):
                yield number, row
                empty = False
        except OSError as error:
            raise UserError(f"{self.option}: {self.path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
            ) from error
        if empty:
            raise UserError(f"{self.option}: {self.name} holds no rows")

    def _array(self) -> list[Any]:
        value = _parse_json(self.path)
        return value if self.split is None else value[self.split]


@dataclass(frozen=True)
class HubRows:
    """One split of a data set of the ``datasets`` library."""

    dataset: Any
    name: str
    unit: str = "row"

    def fingerprint(self) -> str:
        """Of the rows themselves: that of the library also knows paths and dates."""
        digest = hashlib.sha256()
        for row in self.dataset:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def rows(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(self.dataset, 1)


# ---- finding


def find_splits(value: str, name: str, kinds: dict[str, str]) -> Splits:
    """Find the files that ``--data.<name> <value>`` means: a file, or a folder with train and val files.

    Args:
        value: A path. In a folder, ``train`` and ``val`` (or validation, or test) with one of the suffixes; also in
            several parts, as in ``train-00000-of-00002.parquet``.
        name: The option, for messages.
        kinds: Suffixes that are read, and what such files are.

    Raises:
        UserError: there is no such file, or it is of another kind.
    """
    option, path = f"--data.{name} {value}", Path(value).expanduser()
    if path.is_dir():
        return _find_in_folder(path, option, kinds)
    if not path.is_file():
        raise UserError(f"{option}: {'not a regular file' if path.exists() else 'no such file or folder'}")
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"{option}: must end in {' or '.join(kinds)}{_other_module(path.suffix.lower())}")
    return _inside(path, option) if kind == "json" else Splits([RowFile(path, kind, option)])


def _find_in_folder(folder: Path, option: str, kinds: dict[str, str]) -> Splits:
    found = {split: _files_of(folder, split, kinds) for split in ("train", *VAL_NAMES)}
    if not found["train"]:
        raise UserError(f"{option}: the folder has no {' or '.join(f'train{suffix}' for suffix in kinds)}")

    def files(split: str) -> list[RowSource]:
        return [_whole_file(RowFile(path, kinds[path.suffix], option)) for path in _parts(found[split], split, option)]

    held_out = next((split for split in VAL_NAMES if found[split]), None)
    train, val = files("train"), files(held_out) if held_out else None
    read = {file.name for split in ("train", held_out) for file in found.get(split, [])}
    return Splits(train, val, _unread(folder, read, held_out))


def _files_of(folder: Path, split: str, kinds: dict[str, str]) -> list[Path]:
    names = (pattern for suffix in kinds for pattern in (f"{split}{suffix}", f"{split}-*{suffix}"))
    return sorted(path for pattern in names for path in folder.glob(pattern) if path.is_file())


def _parts(files: list[Path], split: str, option: str) -> list[Path]:
    """The files of a split; several must be parts of one kind, for others may hold the same rows twice."""
    whole = [path for path in files if path.stem == split]
    if len(files) > 1 and (whole or len({path.suffix for path in files}) > 1):
        first = whole[0] if whole else files[0]
        other = next(path for path in files if path != first and (whole or path.suffix != first.suffix))
        raise UserError(
            f"{option}: the folder has {first.name} and {other.name}, which may be the same rows; leave one of them"
        )
    return files


def _unread(folder: Path, read: set[str], held_out: str | None) -> tuple[str, ...]:
    """A line about the data files of a folder that nothing is read from."""
    files = (path for path in folder.iterdir() if path.suffix.lower() in KINDS and path.is_file())
    names = sorted(path.name for path in files if path.name not in read and not path.name.startswith("."))
    if not names:
        return ()
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    held = f", {held_out} is the held-out part" if held_out else "; name the held-out part val"
    return (f"{folder}: not read: {', '.join(names[:_NAMED])}{more} (train is trained on{held})",)


def _whole_file(file: RowFile) -> RowFile:
    """A ``.json`` of a folder, whose object of splits would contradict the folder's."""
    if file.kind != "json":
        return file
    splits = _inside(file.path, file.option)
    if splits.val is not None or splits.train[0].split is not None:
        raise UserError(f"{file.option}: {file.path} has splits of its own; give it alone, or as a list of rows")
    return splits.train[0]


def _inside(path: Path, option: str) -> Splits:
    """The splits of a ``.json``: a list, an object of lists, or what should be called ``.jsonl``."""
    first = _first_line(path, option)
    if not first:
        raise UserError(f"{option}: {path} is empty")
    if first.startswith("["):
        return Splits([RowFile(path, "json", option)])
    try:
        line = json.loads(first)
        if isinstance(line, dict) and "train" not in line:
            return Splits([RowFile(path, "jsonl", option)])
    except (ValueError, RecursionError):
        pass
    value = _parse_json(path)
    if not isinstance(value, dict) or "train" not in value:
        raise UserError(f'{option}: {path} must hold a list of rows, or {{"train": [...], "val": [...]}}')
    held_out = [split for split in VAL_NAMES if split in value]
    for split in ("train", *held_out):
        if not isinstance(value[split], list):
            raise UserError(f'{option}: {path}: "{split}" must hold a list of rows')
    notes = tuple(f"{path}: {split} is not read: {held_out[0]} is the held-out part" for split in held_out[1:])
    val = [RowFile(path, "json", option, held_out[0])] if held_out else None
    return Splits([RowFile(path, "json", option, "train")], val, notes)


def _first_line(path: Path, option: str) -> str:
    """The first line that is not blank."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return next((line.strip() for line in file if line.strip()), "")
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    return UserError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it")


def _other_module(suffix: str) -> str:
    modules = {".csv": "CSV --data.csv_path", ".parquet": "Parquet --data.parquet_path"}
    modules |= dict.fromkeys(JSON_KINDS, "JSON --data.json_path")
    return f"; did you mean --data {modules[suffix]}?" if suffix in modules else ""


# ---- reading


def _parse_json(path: Path) -> Any:
    text = path.read_text(encoding="utf-8-sig")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno:,}: broken JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise UserError(f"{path}: broken JSON: nested too deeply") from error
    except ValueError as error:
        raise _long_number(path, text) from error


def _long_number(path: Path, text: str, line: int = 1) -> UserError:
    """The one ValueError of json.loads that is no JSONDecodeError: a number with more digits than Python converts."""
    limit = sys.get_int_max_str_digits()
    # Strings are matched too, so that digits in one are not found.
    found = next(m for m in re.finditer(r'"(?:[^"\\]|\\.)*"|\d+', text) if m[0][0] != '"' and len(m[0]) > limit)
    line += text.count("\n", 0, found.start())
    column = found.start() - text.rfind("\n", 0, found.start())
    return UserError(f"{path} line {line:,}: has a number of {len(found[0]):,} digits at column {column}; shorten it")


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if not text:
                continue
            try:
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise UserError(f"{path} line {number:,}: is not UTF-8 text; convert the file") from error
            except json.JSONDecodeError as error:
                hint = "; a file with one JSON value over many lines must end in .json" if text in b"[{" else ""
                where = f"at column {error.colno}{hint}"
                raise UserError(f"{path} line {number:,}: broken JSON: {error.msg} {where}") from error
            except RecursionError as error:
                raise UserError(f"{path} line {number:,}: broken JSON: nested too deeply") from error
            except ValueError as error:
                raise _long_number(path, text.decode(), number) from error
            yield number, row


def _csv_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows by the names of the first line; an empty cell is an empty text. Line ends within a cell are ``\\n``."""
    number, before = 1, csv.field_size_limit(1 << 30)
    try:
        with open(path, encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if doubled := {name for name in names if names.count(name) > 1}:
                raise UserError(f"{path} line 1: names the column {min(doubled)} twice")
            while True:
                number = reader.line_num + 1  # where the row begins: a quoted cell may go over lines
                row = next(reader, None)
                if row is None:
                    return
                if None in row or None in row.values():
                    wrong = "more" if None in row else "fewer"
                    raise UserError(f"{path} line {number:,}: has {wrong} cells than the first line has names")
                yield number, row
    except csv.Error as error:
        raise UserError(f"{path} line {number:,}: broken CSV: {error}") from error
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
            _require_plausible(path, file.metadata)
            batches = file.iter_batches(batch_size=_PARQUET_BATCH)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: is not a Parquet file that can be read: {' '.join(str(error).split())}") from error


def _require_plausible(path: Path, metadata: Any) -> None:
    """Raise UserError for a file that expands to far more than data does: repeats of one value, or compressed zeros."""
    size = path.stat().st_size
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
            raise UserError(f"{path}: claims {what} in a file of {size / 1e3:,.1f} kB; such a file is not read")


def load_hub_split(repo_id: str, subset: str | None, split: str, option: str) -> HubRows:
    """One split of a data set from the Hugging Face hub, or from a local folder.

    Args:
        option: What the user chose the split with, for messages.

    Raises:
        UserError: ``datasets`` is not installed, or there is no such data set, subset or split.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError("--data HuggingFace: needs datasets; run: pip install 'datasets>=3'") from error
    try:
        dataset = datasets.load_dataset(repo_id, subset, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{option}: {repo_id}, split {split}: cannot be loaded: {reason}") from error
    name = " ".join(filter(None, [repo_id, subset, split]))
    if not len(dataset):
        raise UserError(f"{option}: {name} holds no rows")
    return HubRows(dataset, name)
