"""Shared fixtures of the tests of data modules."""

from helpers.byte_tokenizer import plain, tokenizer  # noqa: F401 - fixtures
