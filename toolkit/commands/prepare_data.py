"""`toolkit prepare_data`: tokenize data before a run."""

from __future__ import annotations

from jsonargparse.typing import PositiveInt

from toolkit.data import DataModule, PythonStdlib


def setup(
    data: DataModule = PythonStdlib(), max_seq_length: PositiveInt = 256, tokenizer_dir: str | None = None
) -> None:
    """Tokenize data into the cache that training reads.

    Args:
        data: The data, with the same options as in the run if they affect the stored tokens.
        max_seq_length: Tokens per sequence, as in the run.
        tokenizer_dir: A folder with a tokenizer.json; without it TextFiles and PythonStdlib train their own.
    """
    from toolkit.data.tokenizer import Tokenizer

    tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir)
    data.prepare(tokenizer=tokenizer, max_seq_length=max_seq_length)
