"""What is known of the data of a run before it is prepared."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from toolkit.config import TrainArgs
from toolkit.data.base import PreparedData, data_modules
from toolkit.data.cache import NotPreparedError, read_only
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.extension import is_built_in
from toolkit.planning.data import prepare_data
from toolkit.planning.resolve import has_limit
from toolkit.planning.run_args import RunArgs


@dataclass(frozen=True)
class UnpreparedRows:
    """What is known of the training rows before the data is prepared, with attributes of TokenDataset.

    Args:
        epoch_rows: Estimated training rows of an epoch; None if unknown.
        mean_length: Input tokens per row; the maximum if ``is_ragged``.
        is_ragged: Whether row lengths vary.
        is_streamed: Whether a run, too, does not know the number of rows.
    """

    epoch_rows: int | None
    mean_length: float
    is_ragged: bool
    is_streamed: bool
    val: ClassVar = None

    @property
    def train(self) -> Any:
        return self

    def define_length(self, train: TrainArgs) -> bool:
        """Whether the steps of a run with these limits are known or can be estimated."""
        counts_rows = train.epochs is not None or not has_limit(train)
        knows_tokens = train.max_tokens is None or not self.is_ragged
        return knows_tokens and (not counts_rows or self.is_streamed or self.epoch_rows is not None)


Rows = PreparedData | UnpreparedRows


def find_data(args: RunArgs, seq_length: int | None) -> Rows:
    """Return the data if it is prepared, otherwise what is known of it. Prepares and downloads nothing.

    Raises:
        UserError: The run would refuse the data.
    """
    if is_built_in(type(args.data)):  # others may not respect it
        with suppress(NotPreparedError), read_only():
            return prepare_data(args, seq_length, lambda line: None)
    return unprepared_rows(args, seq_length)


def unprepared_rows(args: RunArgs, seq_length: int | None) -> UnpreparedRows:
    modules, tokenizer = data_modules(args.data), None
    if args.tokenizer_dir is not None:
        with suppress(UserError):  # the run would raise this
            tokenizer = Tokenizer.load(args.tokenizer_dir)
    return UnpreparedRows(
        args.data.estimate_rows(tokenizer, seq_length or 0),
        seq_length or math.nan,
        is_ragged=any(hasattr(module, "packing") and not module.sources_by_name for module in modules),
        is_streamed=any(module.is_streamed for module in modules),
    )
