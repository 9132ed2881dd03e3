"""Check what data modules from outside toolkit return."""

from __future__ import annotations

from toolkit.data.base import PreparedData, row_count, rows_of
from toolkit.data.tokens.rows import read_row
from toolkit.errors import UserError


def check_rows(flag: str, data: PreparedData, seq_length: int | None) -> None:
    """Check the first rows of a data module from outside toolkit."""
    if not isinstance(data, PreparedData):
        raise UserError(f"{flag}: prepare() returns {type(data).__name__}; it must return PreparedData")
    for split, rows in (("train", data.train), ("val", data.val)):
        if rows is None or row_count(rows) == 0:
            continue
        for row in rows_of(rows[0]) if getattr(rows, "group_size", 1) > 1 else [rows[0]]:
            length = len(read_row(row, f"{flag}: {split}[0]", None)["input_ids"])
            if seq_length is not None and length > seq_length:
                raise UserError(f"{flag}: {split}[0]: has {length} tokens, and a sequence has {seq_length}")
