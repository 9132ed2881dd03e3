"""Fixtures of toolkit's own tests."""

from unittest import mock

import pytest

from toolkit import extension


@pytest.fixture(scope="module", autouse=True)
def _without_installed_extensions():
    """The packages of extensions/ are installed and would add names; they have tests of their own."""
    with mock.patch.object(extension, "_installed", dict):
        yield
