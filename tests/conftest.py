"""Fixtures of toolkit's own tests."""

from unittest import mock

import pytest

from toolkit import extension


@pytest.fixture(scope="module", autouse=True)
def _without_installed_extensions():
    """The packages of extensions/ are installed and would add names; they have separate tests."""
    with mock.patch.object(extension, "_installed", dict):
        yield


@pytest.fixture
def ragged():
    from helpers.ragged import RaggedRows

    from toolkit.data.base import PreparedData

    return PreparedData(RaggedRows(40), RaggedRows(13), None, "key", "ragged rows")


@pytest.fixture
def fabric():
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def pico():
    """A small model of the vocabulary of ``ragged``."""
    from helpers.initialize import initialize
    from helpers.ragged import VOCABULARY

    from toolkit.models.families import get_config
    from toolkit.models.gpt import GPT

    model = GPT(get_config("pico-llama").with_vocab_size(VOCABULARY))
    initialize(model, seed=1)
    return model
