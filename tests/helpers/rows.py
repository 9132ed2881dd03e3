"""Rows parsed for training."""

from toolkit.data.sft.schemas import Record, parse_row


def to_record(row, where: str, columns=None) -> Record:
    """Return the record of a row with answers."""
    (record,) = parse_row(row, where, columns)
    return record
