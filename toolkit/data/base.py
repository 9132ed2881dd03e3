"""What a data module is, and what it hands to training. No torch at import: the command line lists the modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.data.tokenizer import Tokenizer


DEFAULT_VAL_FRACTION = 0.05  # of the tokens of a text


class TokenDataset(Protocol):
    """Map-style data. ``len(rows)`` counts the rows of the whole data set, whatever the number of ranks.

    ``rows[i]`` is ``{"input_ids": (T,) int64, "labels": (T,) int64}``; ``labels[t]`` is the token that follows
    ``input_ids[t]``, or -100 where nothing is to be learned. Where a row packs several documents there are also
    "positions" (T,), counted anew in each, and "documents" (T,), their numbers.

    Rows of unequal length have ``lengths``, (n,) int64 of numpy: the input tokens of each row; or, where these are not
    known, ``is_ragged``.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def is_ragged(rows: TokenDataset | None) -> bool:
    """Whether rows differ in length, so that every batch may have another shape."""
    return getattr(rows, "lengths", None) is not None or getattr(rows, "is_ragged", False)


@dataclass
class PreparedData:
    """Data that is ready to be read.

    Args:
        train: The training rows.
        val: The held-out rows, where there are any.
        tokenizer: What made the tokens; None where the data came as tokens and none was given.
        content_key: SHA-256 in hex of what the rows hold: equal keys mean equal rows.
        summary: One line for people.
        vocab_size: Where the data came as tokens, one more than the largest that they can be (SyntheticTokens) or are
            (LitData; see ``TokenTokenDataset.survey`` for very large data); None where ``tokenizer`` made them.
    """

    train: TokenDataset
    val: TokenDataset | None
    tokenizer: Tokenizer | None
    content_key: str
    summary: str
    vocab_size: int | None = None


class DataModule(ABC):
    """A kind of data. A subclass is a dataclass whose fields are the user's options.

    Every subclass has ``num_workers``: the processes that read rows during training (0: the training process itself).
    Options of the same name have the same default in every subclass: on the command line a default of one class
    passes to another when only ``--data`` changes.
    """

    num_workers: int

    @abstractmethod
    def prepare(
        self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Callable[[str], None] = print
    ) -> PreparedData:
        """Make rows of ``max_seq_length`` input tokens, or find them in the cache.

        Args:
            tokenizer: The tokenizer of ``--tokenizer_dir``; without one the module trains its own if it can.
            max_seq_length: T, the input tokens of a row (blocks on disk hold T + 1).
            report: Takes lines for people: prepared or taken from the cache, sizes, seconds.

        Raises:
            UserError: if an option or a file is unusable.
        """


def require(ok: bool, name: str, value: Any, hint: str) -> None:
    """Raise a UserError about the option ``--data.<name>`` unless ``ok``."""
    if not ok:
        raise UserError(f"--data.{name} {value}: {hint}")


def require_text_options(module: Any) -> None:
    """Check the options that the modules of text share."""
    fraction, vocab_size, workers = module.val_fraction, module.vocab_size, module.num_workers
    require(fraction is None or 0 <= fraction < 1, "val_fraction", fraction, "must be at least 0 and less than 1")
    require(vocab_size > 256, "vocab_size", vocab_size, "must be at least 257: the 256 bytes and <|endoftext|>")
    require(workers >= 0, "num_workers", workers, "must not be negative")
