"""A pico model on random rows, for tests of training without a data module."""

import pytest
import torch
from helpers.initialize import initialize
from lightning.fabric import Fabric

from toolkit.data.base import PreparedData
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT

VOCABULARY = 128


class RaggedRows:
    """Rows of different lengths whose first tokens are masked; every fifth row is masked completely."""

    def __init__(self, n: int, length: int = 24) -> None:
        self.n, self.length = n, length

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        length = self.length - row % 7
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: length if row % 5 == 0 else row % 11] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


@pytest.fixture
def ragged() -> PreparedData:
    return PreparedData(RaggedRows(40), RaggedRows(13), None, "key", "ragged rows")


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def pico() -> GPT:
    model = GPT(get_config("pico-llama").with_vocab_size(VOCABULARY))
    initialize(model, seed=1)
    return model
