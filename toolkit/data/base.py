"""Define the data module interface and the dataset types. Does not import torch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from toolkit.config.checks import require_not_negative
from toolkit.config.strategy_options import AUTO, Auto  # noqa: F401 - AUTO is for data modules
from toolkit.errors import UserError, require_option
from toolkit.models.config_checks import ProblemType
from toolkit.models.labels import IGNORE_INDEX

if TYPE_CHECKING:
    import numpy as np

    from toolkit.data.order import SampleOrder
    from toolkit.data.tokenizer import Tokenizer


DEFAULT_VAL_FRACTION = 0.05  # fraction held out for validation

Report = Callable[[str], None]
"""Receives progress lines: cache hit or miss, sizes, seconds."""
Values = dict[str, Any]
"""Values by name, such as a JSON object."""
Row = dict[str, Any]
"""Values of a row, see :class:`TokenDataset`."""
State = dict[str, Any]
"""Values of an object, to save and restore it."""

# Vocabulary of the tokenizer to train: byte-level BPE size, or one token per character.
Vocabulary = int | Literal["characters"]

# Whether documents of text begin with bos; see toolkit.data.text.documents. None: the rule of toolkit 0.1.0.
AddBos = bool | Auto | None

# Options of instruction data, see toolkit.data.InstructionData.
OnLong = Literal["truncate", "drop", "split", "error"]
TrainOn = Literal["answers", "last_answer", "all"]
Packing = Literal["none", "best_fit"]

# What a row is: a text with answers, preferences (pairs of completions, or rated completions), or for a model with a
# score layer: a text with a label, or a pair of completions, scored at the last token ("compared") or at each token of
# the completion ("compared_tokens").
RowKind = Literal["answers", "pairs", "rated", "labeled", "compared", "compared_tokens"]


# What a data module reads, which decides the options that a run can have with it.
Content = Literal["tokens", "text", "answers", "preferences", "labels"]


class LabelSet(NamedTuple):
    """The names of a classification's labels, and its kind, as in :class:`~toolkit.models.config.ModelConfig`."""

    names: list[str]
    problem_type: ProblemType


class TextPaths(NamedTuple):
    """Text files of a data module.

    Args:
        train: Training text files. If ``val`` is None, the end of the text is held out.
        train_option: The option that set ``train``, such as ``--data.train_data_path corpus``.
        val: Validation text files, or None.
        val_option: The option that set ``val`` or the held-out fraction; by default, ``--data.val_fraction``.
    """

    train: list[Path]
    train_option: str
    val: list[Path] | None = None
    val_option: str = ""


class TokenDataset:
    """A map-style dataset. ``len(dataset)`` counts all rows, independent of the number of ranks.

    ``dataset[i]`` is ``{"input_ids": (T,) int64, "labels": (T,) int64}``. ``labels[t]`` is the token that follows
    ``input_ids[t]``, or -100 where the loss is masked. Packed rows also have "positions" (T,), which restart at 0 in
    every document, and "documents" (T,), the document indices.

    A row may have "values", numbers by name. They are in ``Batch.values``. It may also have "targets", an fp32 array
    with a line for each of its samples; ``Batch.values["targets"]`` has the lines of all rows.

    A dataset need not derive from this class: an attribute that it lacks has the default from here.
    """

    lengths: np.ndarray | None = None
    """Input tokens per row, or per group, (n,) int64, if rows differ in length."""
    is_ragged: bool = False
    """Whether rows differ in length, and the lengths are unknown."""
    mean_length: float | None = None
    """Mean input tokens per row, by default the mean of ``lengths``."""
    group_size: int = 1
    """If more than 1, ``dataset[i]`` is a list of so many rows of one micro-batch, and batch sizes count groups."""
    with_partner: Callable[[int, int], list[Row]] | None = None
    """``with_partner(index, partner)`` returns the group. ``partner`` is the index of the sample before in the global
    batch, of the last one for the first."""
    order: Callable[[int, State], SampleOrder] | None = None
    """``order(seed, state)`` is a custom sample order. ``state`` is ``SampleOrder.state()`` from the checkpoint, or {}
    at the start of a run. Row indices may then be any non-negative int64, and ``__len__`` may be missing."""
    epoch_rows: int | None
    """Training rows of an epoch, None if unknown; by default ``len(dataset)``."""
    largest_token: Callable[[], int] | None = None
    """``largest_token()`` returns the largest token id, if that need not read all rows."""
    preview: TokenDataset | None = None
    """Sample rows for inspect_data, if the number of rows is unknown."""
    statistics: Values | None = None
    """Counts of all rows for inspect_data."""
    where: Callable[[int], list[str]] | None = None
    """``where(index)`` describes the origin of each sample of a row, such as ``data/faq.jsonl line 17``."""

    def __len__(self) -> int:
        raise TypeError("the number of rows is unknown")

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def require_row(self, index: int) -> None:
        """Raise IndexError unless the dataset has the row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")


def member(dataset: TokenDataset | None, name: str) -> Any:
    """Return an attribute of a dataset, or its default."""
    return getattr(dataset, name, getattr(TokenDataset, name))


def next_token_row(tokens: np.ndarray) -> Row:
    """Return the row of T + 1 consecutive tokens."""
    import torch

    block = torch.from_numpy(tokens.astype("int64"))
    return {"input_ids": block[:-1], "labels": block[1:]}


def row_lengths(dataset: TokenDataset | None) -> np.ndarray | None:
    """Return the input tokens per row, (n,) int64; None if unknown or equal for all rows."""
    return member(dataset, "lengths")


def mean_length(dataset: TokenDataset) -> float:
    """Return the mean input tokens per row."""
    if (mean := member(dataset, "mean_length")) is not None:
        return mean
    lengths = row_lengths(dataset)
    return len(dataset[0]["input_ids"]) if lengths is None else float(lengths.mean())


def rows_of(item: Any) -> list[Row]:
    """Return a dataset item as a list of rows: a group, or a single row."""
    return list(item) if isinstance(item, list | tuple) else [item]


def preview(dataset: TokenDataset) -> TokenDataset:
    """Return sample rows whose number is known."""
    return dataset if (rows := member(dataset, "preview")) is None else rows


def row_count(dataset: TokenDataset | None) -> int | None:
    """Return the number of rows: 0 without a dataset, None if unknown."""
    try:
        return 0 if dataset is None else len(dataset)
    except TypeError:
        return None


def epoch_rows(dataset: TokenDataset) -> int | None:
    """Return the training rows of an epoch; None if unknown."""
    return getattr(dataset, "epoch_rows", row_count(dataset))


def sample_order(dataset: TokenDataset, seed: int, state: State) -> SampleOrder:
    """Return the dataset's custom sample order, or :class:`~toolkit.data.order.ShuffledOrder`.

    Args:
        dataset: The training rows.
        seed: Seed of the sample order.
        state: :meth:`~toolkit.data.order.SampleOrder.state` from the checkpoint; {} at the start of a run.
    """
    from toolkit.data.order import ShuffledOrder

    order = member(dataset, "order")
    return ShuffledOrder(len(dataset), seed) if order is None else order(seed, state)


def largest_token(dataset: TokenDataset) -> int:
    """Return the largest token id of a dataset, which reads all rows unless its files have an index."""
    import torch

    if (method := member(dataset, "largest_token")) is not None:
        return method()
    return max(
        int(torch.as_tensor(row[name]).max())
        for i in range(len(dataset))
        for row in rows_of(dataset[i])
        for name in ("input_ids", "labels")
    )


def is_ragged(dataset: TokenDataset | None) -> bool:
    """Whether row lengths, and so batch shapes, may vary."""
    return row_lengths(dataset) is not None or member(dataset, "is_ragged")


class AddedBos(NamedTuple):
    """The bos that follows the eos of each document."""

    bos: int
    eos: int

    def without_loss(self, row: Row) -> Row:
        """Mask the loss of added bos tokens: validation measures the text."""
        is_added = (row["input_ids"] == self.eos) & (row["labels"] == self.bos)
        return row | {"labels": row["labels"].masked_fill(is_added, IGNORE_INDEX)}


@dataclass
class PreparedData:
    """Prepared training and validation datasets.

    Args:
        train: The training rows.
        val: The validation rows, or None.
        tokenizer: The tokenizer; None for pre-tokenized data without one.
        content_key: Hex SHA-256 of the row contents.
        summary: Log line.
        vocab_size: For pre-tokenized data, the largest token id + 1: the largest possible id (SyntheticTokens) or the
            largest id in the data (LitData; very large data is sampled). None if ``tokenizer`` produced the tokens.
        val_sources: Subsets of ``val`` by name. Each is also reported as val_loss_<name>.
        added_bos: The bos that begins each document. Validation leaves its loss out.
        labels: The labels of a classification.
    """

    train: TokenDataset
    val: TokenDataset | None
    tokenizer: Tokenizer | None
    content_key: str
    summary: str
    vocab_size: int | None = None
    val_sources: dict[str, TokenDataset] = field(default_factory=dict)
    added_bos: AddedBos | None = None
    labels: LabelSet | None = None


class DataModule(ABC):
    """A data source. A subclass is a dataclass whose fields are the command-line options.

    ``num_workers`` is the number of data loading processes; with 0, the training process loads data. A subclass makes
    it an option by declaring it as a field.
    Give an option the same default in every subclass: on the command line, the default of one class carries over to
    another when only ``--data`` changes.
    """

    num_workers: int = 0
    reads_ahead: bool = True
    """Whether a thread may prefetch rows during a step. True if rows are pure functions of their index."""
    checks_tokens: bool = False
    """Whether a run checks the token ids of each batch, because they are not known before."""
    seq_length: int | None = None
    """Sequence length from ``--data.block_size``; None to use --train.max_seq_length."""
    content: ClassVar[Content] = "tokens"
    """``text``, and prompts with ``answers``: the tokenizer of the model's architecture encodes them."""
    is_streamed: ClassVar[bool] = False
    """Whether the number of rows is unknown, because the data is tokenized while the run trains."""
    is_stand_in: ClassVar[bool] = False
    """Whether it is text for first tries, far too short for a model."""
    takes_urls: ClassVar[tuple[str, ...]] = ()
    """Options with paths that may be URLs."""
    takes_patterns: ClassVar[bool] = False
    """Whether paths may be patterns, such as ``books/*.txt``."""

    @property
    def sources_by_name(self) -> dict[str, DataModule]:
        """The data modules of a mixture; empty for others."""
        return {}

    def __post_init__(self) -> None:
        """Check the options."""
        require_not_negative("data", self, "num_workers")

    @abstractmethod
    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        """Prepare rows of ``max_seq_length`` input tokens, or load them from the cache.

        Args:
            tokenizer: The tokenizer from ``--tokenizer_dir``; if None, text modules train one.
            max_seq_length: Input tokens per row, T. Blocks on disk have T + 1 tokens.
            report: Receives progress lines: cache hit or miss, sizes, seconds.

        Raises:
            UserError: An option or a file is invalid.
        """

    @property
    def has_answers(self) -> bool:
        """Whether rows are prompts with answers, see :class:`toolkit.data.InstructionData`."""
        return self.content in ("answers", "preferences")

    def check_first_rows(self, kind: RowKind, model_labels: LabelSet | None) -> None:  # noqa: B027
        """Raise UserError for rows that the preparation would refuse, as far as a look at the first ones shows.

        Args:
            kind: What a row is.
            model_labels: The labels of the initial model's head, if it has one.
        """

    def as_trained(self, folder: Path) -> DataModule:
        """Return the data with what is not set as in the run of a checkpoint, for ``toolkit evaluate``."""
        return self

    def estimate_rows(self, tokenizer: Tokenizer | None, max_seq_length: int) -> int | None:
        """Estimate the training rows in less than a second, for ``toolkit plan``; None if they are unknown."""
        return None


def data_modules(data: DataModule) -> list[DataModule]:
    """Return the data module and, for a mixture, its source modules."""
    return [data, *data.sources_by_name.values()]


def choose_seq_length(data: DataModule, option: int | None, flag: str) -> int | None:
    """Return the sequence length from the data module or ``flag``; None if neither sets it."""
    length = data.seq_length
    if length is not None and option not in (None, length):
        raise UserError(f"--data.block_size {length}: --{flag} is {option}; set only one of them")
    return length or option


def require(ok: bool, name: str, value: Any, hint: str) -> None:
    """Raise UserError for ``--data.<name>`` unless ``ok``."""
    require_option(ok, f"data.{name}", value, hint)


def require_one(module: Any, name: str, other: str) -> None:
    """Raise UserError if two options that exclude each other are set."""
    value = getattr(module, other)
    hint = f"is not supported with --data.{other} {value}; remove one of them"
    require(getattr(module, name) in (None, "") or value in (None, ""), name, getattr(module, name), hint)


@contextmanager
def file_errors(option: str, path: Path, hint: str = "convert it") -> Iterator[None]:
    """Turn errors of reading a text file into a one-line UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        where = f"{option}: {path} is not UTF-8 text ({error.reason} at byte {error.start})"
        raise UserError(f"{where}; {hint}") from error
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror or error}") from error


def trained_vocabulary(module: Any) -> Any:
    """Return the vocabulary of the tokenizer that a data module trains if it gets none; 0 if it never trains one.

    The option has no default, so that a value that the user sets, also this one, is never replaced by a tokenizer.
    """
    size = getattr(module, "vocab_size", 0)
    return 4096 if size is None else size


def cache_prefix(module: DataModule) -> str:
    """Return the beginning of the names of a data module's cache folders, such as text_files for TextFiles."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(module).__name__).lower()


def held_out_fraction(option: float | None, val: Any) -> float:
    """Return the fraction of the training data to hold out: by the option, or none with validation data."""
    return 0.0 if val is not None else DEFAULT_VAL_FRACTION if option is None else option


def require_val_fraction(module: Any, name: str) -> None:
    fraction = getattr(module, name)
    require(fraction is None or 0 <= fraction < 1, name, fraction, "must be at least 0 and less than 1")
