"""`toolkit prepare_data`: tokenise once, ahead of the run."""

from __future__ import annotations

from toolkit.data import DataModule, PythonStdlib


def setup(data: DataModule = PythonStdlib(), max_seq_length: int = 256, tokenizer_dir: str | None = None) -> None:
    """Tokenise data into chunks that training finds in its cache.

    Args:
        data: What to prepare. The options that change what is stored must be those of the run.
        max_seq_length: Tokens per sequence, as in the run.
        tokenizer_dir: A folder with a tokenizer.json; without it TextFiles and PythonStdlib train their own.
    """
    from toolkit.data.tokenizer import Tokenizer
    from toolkit.errors import UserError

    if max_seq_length <= 0:
        raise UserError(f"--max_seq_length {max_seq_length}: must be greater than zero")
    tokenizer = None if tokenizer_dir is None else Tokenizer.load(tokenizer_dir)
    data.prepare(tokenizer=tokenizer, max_seq_length=max_seq_length)
