"""LitGPT's module name for the classes of :mod:`toolkit.models`."""

from toolkit.models.block import Block as Block
from toolkit.models.gpt import GPT as GPT
