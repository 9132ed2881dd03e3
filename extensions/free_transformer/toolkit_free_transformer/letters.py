"""The paper's synthetic task: predict a noisy line that repeats a letter at a random position.

Example: ``K>______KKK!KKKK____!___``. The letter and ``>`` are followed by a line of ``_``, in which a run of the
letter begins at a random position. Each character is replaced by ``!`` with a small probability. Latents can encode
the position and the noise, which determine the line. After summaries of Fleuret 2025, arXiv 2510.17558, section 4.1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from toolkit.data.base import DataModule, PreparedData, TokenDataset, require

if TYPE_CHECKING:
    import numpy as np

    from toolkit.data.tokenizer import Tokenizer


@dataclass
class Letters(DataModule):
    """Lines with a run of one letter at a random position, with noise.

    Args:
        num_rows: Training lines.
        val_rows: Validation lines, which use other random numbers than training lines.
        run: Length of the run of letters.
        noise: Probability that an exclamation mark replaces a character.
        seed: Random seed of the lines.
        num_workers: Data loading processes; 0 uses the training process.
    """

    num_rows: int = 65536
    val_rows: int = 512
    run: int = 8
    noise: float = 1 / 16
    seed: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "val_rows", "run"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be greater than zero")
        for name in ("seed", "num_workers"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        require(0 <= self.noise < 1, "noise", self.noise, "must be at least 0 and less than 1")

    def prepare(
        self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Callable[[str], None] = print
    ) -> PreparedData:
        """Prepare the rows, see :meth:`DataModule.prepare`. Without a tokenizer, tokens are bytes."""
        from toolkit.data.tokenizer import train_bpe

        length = max_seq_length - 1
        require(length >= self.run, "run", self.run, f"does not fit into a line of {length} characters")
        tokenizer = tokenizer or train_bpe([], 257)
        ids = {character: tokenizer.encode(character, bos=False) for character in f"{ascii_uppercase}>_!"}
        many = next((c for c, tokens in ids.items() if len(tokens) != 1), None)
        require(many is None, "tokenizer", tokenizer.name, f"must have a token for {many}")
        table = [tokens[0] for tokens in ids.values()]
        train, val = (
            LetterRows(self, table, length, split, rows) for split, rows in ((0, self.num_rows), (1, self.val_rows))
        )
        options = f"letters {self.num_rows} {self.val_rows} {self.run} {self.noise} {self.seed} {length}"
        key = hashlib.sha256(f"{options} {tokenizer.fingerprint}".encode()).hexdigest()
        bound = entropy_per_token(length, self.run, self.noise)
        summary = f"{self.num_rows:,} lines of {length} characters with an entropy of {bound:.4f} nats per token"
        report(f"Data: {summary}")
        return PreparedData(train, val, tokenizer, key, summary)


def entropy_per_token(length: int, run: int, noise: float) -> float:
    """Return the entropy of a line given its letter, in nats per predicted token.

    This is the entropy of position and noise. It is at most 1e-4 too large, because different positions rarely give
    the same line.
    """
    bits = 0.0 if noise == 0 else -noise * math.log(noise) - (1 - noise) * math.log(1 - noise)
    return (math.log(length - run + 1) + length * bits) / (length + 1)


@dataclass(frozen=True)
class LetterRows(TokenDataset):
    """The rows of :class:`Letters`.

    Args:
        options: The data module.
        table: Token ids of A to Z, ``>``, ``_`` and ``!``.
        length: Characters per line.
        split: 0 for training, 1 for validation.
        rows: Number of rows.
    """

    options: Letters
    table: list[int]
    length: int
    split: int
    rows: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np
        import torch

        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        generator = np.random.default_rng([self.options.seed, self.split, index])
        tokens = torch.tensor(self.table)[torch.from_numpy(self._line(generator))]
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def _line(self, generator: np.random.Generator) -> np.ndarray:
        """Return a line as indices into the table, (2 + length,)."""
        import numpy as np

        run, letter = self.options.run, generator.integers(26)
        line = np.full(self.length + 2, 27)
        line[:2] = letter, 26
        start = 2 + generator.integers(self.length - run + 1)
        line[start : start + run] = letter
        line[2:][generator.random(self.length) < self.options.noise] = 28
        return line
