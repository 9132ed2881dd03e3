"""Fixtures shared with the tests of data."""

from tests.data.conftest import plain, tokenizer

__all__ = ["plain", "tokenizer"]
