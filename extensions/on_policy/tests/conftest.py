"""Fixtures of these tests."""

from helpers.on_policy import folder

__all__ = ["folder"]
