"""CONTRIBUTING.md is right about the tests."""

import re
from pathlib import Path

from helpers.sources import EXTENSIONS, FILES, FOLDERS, PACKAGE, file_name

from toolkit.extension import BUILT_IN

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROW = re.compile(r"^\| (?P<number>[NSM]\d+) (?P<slug>[a-z0-9-]+) \|.*\| (?P<links>[^|]+) \|$", re.M)


def test_every_invariant_links_to_tests_that_are_named_after_it():
    rows = list(ROW.finditer(TEXT))
    numbers = [row["number"] for row in rows]
    assert numbers == [f"{group}{i}" for group, n in (("N", 10), ("S", 7), ("M", 3)) for i in range(1, n + 1)]
    assert len({row["slug"] for row in rows}) == len(rows)
    untested = []
    for row in rows:
        for link in re.findall(r"\]\(([^)]+)\)", row["links"]):
            if f"def test_{row['number'].lower()}_" not in (ROOT / link).read_text():
                untested.append((row["number"], link))
    assert not untested


def test_every_invariant_in_the_name_of_a_test_is_listed():
    names = {name for file in (ROOT / "tests").rglob("test_*.py")
             for name in re.findall(r"^def test_([nsm]\d+)_", file.read_text(), re.M)}  # fmt: skip
    assert names == {row["number"].lower() for row in ROW.finditer(TEXT)}


def test_the_map_of_sources_to_tests_is_right():
    """A source is mirrored or in a row; a row's tests import its package, or run toolkit or its extension."""
    text = (ROOT / "tests/README.md").read_text().replace("\\", "")
    unused, wrong, mapped = [], [], set()
    for package, sources, tests in re.findall(r"^\| (toolkit\S*) \| (.+) \| (.+) \|$", text, re.M):
        source_folder, test_folder = ROOT / package, ROOT / "tests"
        uses = rf"{package.replace('/', '.')}|toolkit\.cli|toolkit import|helpers\.processes|helpers\.groups"
        if package in BUILT_IN:
            source_folder, test_folder, uses = FOLDERS[package], FOLDERS[package].parent / "tests", "toolkit"
        for pattern in sources.split(", "):
            files = set(source_folder.glob(pattern)) & set(FILES)
            unused += [] if files else [f"{package}/{pattern}"]
            mapped |= files
        for test in tests.split(", "):
            file = (ROOT if test.startswith("extensions/") else test_folder) / test
            if not (file.is_file() and re.search(uses, file.read_text())):
                wrong.append((package, test))
    long = {file for file in FILES if len(file.read_text().splitlines()) > 60}
    unmapped = sorted(file_name(file) for file in long - mapped if not _is_mirrored(file))
    assert (unused, wrong, unmapped) == ([], [], [])


def _is_mirrored(source):
    """Has a test file of its name in the folder of its name under tests/ or in one above, or in its extension's."""
    name = f"test_{source.stem}.py"
    if not source.is_relative_to(PACKAGE):
        return (EXTENSIONS / source.relative_to(EXTENSIONS).parts[0] / "tests" / name).is_file()
    folder = source.relative_to(PACKAGE).parent
    return any((ROOT / "tests" / place / name).is_file() for place in (folder, *folder.parents))
