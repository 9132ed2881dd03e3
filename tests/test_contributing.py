"""CONTRIBUTING.md is right about the tests."""

import re
from pathlib import Path

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
