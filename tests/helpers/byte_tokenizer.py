"""Fixtures: a byte tokenizer, and the same with a chat template."""

import pytest

from helpers.chatml import CHATML
from toolkit.data.tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def plain():
    """A byte tokenizer without a chat template: one token per character."""
    return train_bpe(["x"], 257)


@pytest.fixture(scope="module")
def tokenizer(plain):
    """The same with ChatML's tokens and template."""
    from tokenizers import Tokenizer as Core

    files = dict(plain._files)
    core = Core.from_str(files["tokenizer.json"].decode())
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    files |= {"tokenizer.json": core.to_str().encode(), "chat_template.jinja": CHATML.encode()}
    return Tokenizer(files, "the checkpoint")
