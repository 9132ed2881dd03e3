"""The data module interface and the data it returns. No torch at import: the command line lists the modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from toolkit.errors import UserError, require_option

if TYPE_CHECKING:
    import numpy as np

    from toolkit.data.order import SampleOrder
    from toolkit.data.tokenizer import Tokenizer


DEFAULT_VAL_FRACTION = 0.05  # share of the tokens to hold out

Report = Callable[[str], None]
"""Receives progress lines: cache hit or miss, sizes, seconds."""

# The tokenizer to train: the size of a byte-level BPE, or one token per character.
Vocabulary = int | Literal["characters"]

# Options of instruction data, see toolkit.data.InstructionData.
OnLong = Literal["truncate", "drop", "split", "error"]
TrainOn = Literal["answers", "last_answer", "all"]
Packing = Literal["none", "best_fit"]


class TokenDataset(Protocol):
    """A map-style dataset. ``len(dataset)`` counts all rows, independent of the number of ranks.

    ``dataset[i]`` is ``{"input_ids": (T,) int64, "labels": (T,) int64}``. ``labels[t]`` is the token that follows
    ``input_ids[t]``, or -100 where the loss is masked. Packed rows also have "positions" (T,), which restart at 0 in
    every document, and "documents" (T,), the document indices.

    A dataset of variable-length rows has ``lengths``, a numpy (n,) int64 array of input tokens per row, or sets
    ``is_ragged`` if the lengths are unknown.

    In a dataset with a ``group_size``, ``dataset[i]`` is a list of so many rows that stay together in one micro-batch,
    and ``lengths`` are the input tokens of a group. Batch sizes count groups.

    A dataset may define its own sample order: ``order(seed, state) -> SampleOrder``, where ``state`` is what the order
    returned when the run's checkpoint was saved, or {} at the start of a run. Its row indices may then be any
    non-negative int64, and it may omit ``__len__`` if the number of rows is unknown. ``preview`` is then a dataset
    of some of its rows, for inspect_data.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def row_lengths(dataset: TokenDataset | None) -> np.ndarray | None:
    """Return the input tokens of each row, (n,) int64; None if they are unknown, or the same in all rows."""
    return getattr(dataset, "lengths", None)


def mean_length(dataset: TokenDataset) -> float:
    """Return the mean input tokens of a row. User-provided rows may be shorter than the context."""
    if (mean := getattr(dataset, "mean_length", None)) is not None:
        return mean
    lengths = row_lengths(dataset)
    return len(dataset[0]["input_ids"]) if lengths is None else float(lengths.mean())


def rows_of(item: Any) -> list[dict[str, Any]]:
    """Return the rows of a dataset item: the rows of a group, or a single row."""
    return list(item) if isinstance(item, list | tuple) else [item]


def row_count(dataset: TokenDataset | None) -> int | None:
    """Return the number of rows, 0 without a dataset; None if it is unknown."""
    if dataset is None:
        return 0
    return len(dataset) if hasattr(dataset, "__len__") else None


def sample_order(dataset: TokenDataset, seed: int, state: dict[str, Any]) -> SampleOrder:
    """Return the dataset's own sample order, else :class:`~toolkit.data.order.ShuffledOrder`.

    Args:
        dataset: The training rows.
        seed: Seed of the sample order.
        state: :meth:`~toolkit.data.order.SampleOrder.state` from the checkpoint; {} at the start of a run.
    """
    from toolkit.data.order import ShuffledOrder

    order = getattr(dataset, "order", None)
    return ShuffledOrder(len(dataset), seed) if order is None else order(seed, state)


def is_ragged(dataset: TokenDataset | None) -> bool:
    """Whether rows differ in length; batch shapes may then vary."""
    return row_lengths(dataset) is not None or getattr(dataset, "is_ragged", False)


@dataclass
class PreparedData:
    """Datasets that are ready to read.

    Args:
        train: The training rows.
        val: The validation rows, or None.
        tokenizer: The tokenizer of the tokens; None for pre-tokenized data without one.
        content_key: Hex SHA-256 of the row contents: equal keys mean equal rows.
        summary: One line for the log.
        vocab_size: Pre-tokenized data: one more than the largest possible token (SyntheticTokens) or the largest
            token found (LitData, in samples of very large data). None if ``tokenizer`` made the tokens.
        val_sources: Parts of ``val`` by name; the loss on each is also reported, as val_loss_<name>.
    """

    train: TokenDataset
    val: TokenDataset | None
    tokenizer: Tokenizer | None
    content_key: str
    summary: str
    vocab_size: int | None = None
    val_sources: dict[str, TokenDataset] = field(default_factory=dict)


class DataModule(ABC):
    """A data source. A subclass is a dataclass whose fields are the command-line options.

    ``num_workers`` is the number of data loading processes (0: the training process reads); a subclass makes it an
    option by declaring it as a field.
    An option has the same default in every subclass: on the command line, the default of one class carries over to
    another when only ``--data`` changes.
    """

    num_workers: int = 0

    @property
    def reads_ahead(self) -> bool:
        """Whether a thread may read rows while a step computes: they are pure functions of their index."""
        return True

    @property
    def seq_length(self) -> int | None:
        """Tokens per sequence if ``--data.block_size`` sets them; None: --train.max_seq_length does."""
        return None

    @abstractmethod
    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        """Return rows of ``max_seq_length`` input tokens, from the cache if they are there.

        Args:
            tokenizer: The tokenizer of ``--tokenizer_dir``; if None, text modules train one.
            max_seq_length: T, the input tokens of a row (blocks on disk hold T + 1).
            report: Receives progress lines: cache hit or miss, sizes, seconds.

        Raises:
            UserError: An option or a file is invalid.
        """


def choose_seq_length(data: DataModule, option: int | None, flag: str) -> int | None:
    """Return the tokens per sequence that the data or ``flag`` sets; None if neither does."""
    length = data.seq_length
    if length is not None and option not in (None, length):
        raise UserError(f"--data.block_size {length}: --{flag} is {option}; set only one of them")
    return length or option


def require(ok: bool, name: str, value: Any, hint: str) -> None:
    """Raise a UserError about the option ``--data.<name>`` unless ``ok``."""
    require_option(ok, f"data.{name}", value, hint)


def require_text_options(module: Any) -> None:
    fraction, vocab_size, workers = module.val_fraction, module.vocab_size, module.num_workers
    require(fraction is None or 0 <= fraction < 1, "val_fraction", fraction, "must be at least 0 and less than 1")
    is_valid = vocab_size == "characters" or vocab_size > 256
    require(is_valid, "vocab_size", vocab_size, "must be at least 257, the 256 bytes and <|endoftext|>, or characters")
    require(workers >= 0, "num_workers", workers, "must not be negative")
