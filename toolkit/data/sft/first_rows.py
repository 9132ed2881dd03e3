"""Read the first rows of files before a run prepares its data, without torch, which takes seconds to import."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from toolkit.data.sft.readers import RowFile, describe_row

MAX_ROWS, _MAX_BYTES = 10_000, 2**26


def first_records(data: Any, parse: Callable[[Any, str, Any], Any]) -> tuple[list[RowFile], list[Any]]:
    """Return a data module's local training files, unless they are large, and their first :data:`MAX_ROWS` rows.

    ``parse`` gets a row, its location and the names of the file's classes, and raises UserError for a wrong row.
    """
    if getattr(data, "repo_id", None):
        return [], []
    files = [source for source in data.find_rows()[1].train if isinstance(source, RowFile)]
    if sum(file.path.stat().st_size for file in files) > _MAX_BYTES:  # some files are read as a whole
        return [], []
    records: list[Any] = []
    for file in files:
        names = file.class_names()
        for number, row in islice(file.rows(), MAX_ROWS - len(records)):
            records.append(parse(row, describe_row(file, number), names))
    return files, records
