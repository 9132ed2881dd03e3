"""Check the first rows of files before a run prepares its data, without torch, which takes seconds to import."""

from itertools import islice
from typing import Any

from toolkit.data.base import LabelSet, RowKind
from toolkit.data.sft.classification import Classification
from toolkit.data.sft.datasets import InstructionData
from toolkit.data.sft.readers import RowFile, describe_row
from toolkit.data.sft.schemas import Record, parse_row

_MAX_ROWS, _MAX_BYTES = 10_000, 2**26


def check_first_rows(data: Any, kind: RowKind, model_labels: LabelSet | None) -> None:
    """Raise UserError for columns, labels and values that the preparation would refuse.

    Args:
        data: A data module. Only toolkit's with local files are checked.
        kind: What a row is.
        model_labels: The labels of the initial model's head, if it has one.
    """
    is_labeled = isinstance(data, Classification)
    if not (is_labeled or isinstance(data, InstructionData)) or getattr(data, "repo_id", None):
        return
    files = [source for source in data.find_rows()[1].train if isinstance(source, RowFile)]
    if sum(file.path.stat().st_size for file in files) > _MAX_BYTES:  # some files are read as a whole
        return
    labeling = data.labeling(model_labels) if is_labeled else None
    records: list[Record] = []
    for file in files:
        names = file.class_names()
        for number, row in islice(file.rows(), _MAX_ROWS - len(records)):
            where = describe_row(file, number)
            if labeling is None:
                parse_row(row, where, data.columns, kind)
            else:
                records.append(labeling.parse(row, where, names))
    if labeling is not None and files and len(records) < _MAX_ROWS:
        import numpy as np  # not needed for other data

        is_any = np.ones(len(records), np.bool_)
        labeling.encode(records, is_any, is_any, files[0].class_names().get(labeling.label_column))
