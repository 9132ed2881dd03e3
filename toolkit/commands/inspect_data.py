"""`toolkit inspect_data`: inspect the training data before a run."""

import json
from typing import Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt

from toolkit.config import AUTO, Auto, none_if_auto
from toolkit.data import DataModule, PythonStdlib
from toolkit.data.base import choose_seq_length
from toolkit.data.inspection import inspect_rows
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import notice


def setup(
    data: DataModule = PythonStdlib(),
    tokenizer_dir: str | None = None,
    max_seq_length: PositiveInt | Auto = AUTO,
    num_samples: NonNegativeInt = 3,
    format: Literal["text", "json"] = "text",
) -> None:
    """Show samples token by token, with trained tokens marked, and statistics of the complete data.

    Args:
        data: The data, with the options of the run.
        tokenizer_dir: The checkpoint folder of the run, a name below checkpoints/, or a folder with a tokenizer.json.
        max_seq_length: Tokens per sequence, as in the run. auto: 2048, or what the data sets.
        num_samples: Number of samples to show.
        format: Text, or one JSON object.
    """
    tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir, report=notice)
    length = choose_seq_length(data, none_if_auto(max_seq_length), "max_seq_length") or 2048
    prepared = data.prepare(tokenizer=tokenizer, max_seq_length=length, report=notice)
    inspection = inspect_rows(prepared, num_samples)
    if format == "json":
        print(json.dumps({"data": type(data).__name__, "max_seq_length": length, **inspection}))
        return
    from toolkit.ui.tokens import print_inspection

    print_inspection(inspection)
