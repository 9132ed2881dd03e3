"""Random tokens for benchmarks: no text, no tokenizer, no files."""

import hashlib
from dataclasses import dataclass

from toolkit.config.checks import require_not_negative, require_positive
from toolkit.data.base import DataModule, PreparedData, Report, Row, TokenDataset, next_token_row, trained_vocabulary
from toolkit.data.tokenizer import Tokenizer


@dataclass
class SyntheticTokens(DataModule):
    """Random tokens, a pure function of seed and row.

    Args:
        vocab_size: Number of distinct tokens, sampled uniformly; 4096 by default.
        num_rows: Rows per epoch.
        seed: Seed of the random tokens.
        num_workers: Data loading processes; 0 uses the training process.
    """

    vocab_size: int | None = None
    num_rows: int = 65536
    seed: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data", self, "vocab_size", "num_rows")
        require_not_negative("data", self, "seed")

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        block_size, vocab_size = max_seq_length + 1, trained_vocabulary(self)
        options = f"synthetic {vocab_size} {self.num_rows} {self.seed} {block_size}"
        key = hashlib.sha256(options.encode()).hexdigest()
        summary = f"{self.num_rows:,} rows of {max_seq_length:,} random tokens, vocabulary size {vocab_size:,}"
        report(f"Data: {summary}")
        rows = SyntheticRows(vocab_size, self.num_rows, self.seed, block_size)
        return PreparedData(rows, None, tokenizer, key, summary, vocab_size)


@dataclass(frozen=True)
class SyntheticRows(TokenDataset):
    """The rows of :class:`SyntheticTokens`."""

    vocab_size: int
    num_rows: int
    seed: int
    block_size: int

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        import numpy as np

        self.require_row(index)
        return next_token_row(np.random.default_rng([self.seed, index]).integers(0, self.vocab_size, self.block_size))
