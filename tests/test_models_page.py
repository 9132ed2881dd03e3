"""tutorials/models.md matches the registry and the parity tests."""

import importlib.util
import re

import pytest
from test_tutorials import ROOT

from toolkit.models.families import FAMILIES, list_aliases, list_names

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "scripts" / "models_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_matches_the_registry(script):
    page = script.PAGE.read_text()
    assert not [name for name in list_names() if f"`{name}`" not in page], "run: python scripts/models_table.py"


@pytest.mark.slow
def test_page_has_the_sizes_of_all_models(script):
    page = script.PAGE.read_text()
    assert script.render(*script.read_errors(page)) == page, "run: python scripts/models_table.py"


def test_each_family_has_a_measured_error(script):
    errors, versions = script.read_errors(script.PAGE.read_text())
    assert errors.keys() == FAMILIES.keys() and all(float(error) < 1e-5 for error in errors.values())
    assert all(versions.values())


def test_counts_on_pages_in_readme_and_changelog():
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "tutorials").glob("*.md"))]
    counts = [int(n) for text in texts for n in re.findall(r"\b(\d+)\s+model\s+types", text)]
    assert len(counts) >= 3 and set(counts) == {len(FAMILIES)}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"[{len(FAMILIES)} model types](tutorials/models.md)" in readme
    counts = f"prints {len(list_names())} named architectures to train from scratch; {len(list_aliases())} further"
    assert counts in readme
    assert f"{len(list_names()) + len(list_aliases())} names to train" in (ROOT / "CHANGELOG.md").read_text()
