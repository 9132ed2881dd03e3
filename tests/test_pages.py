"""The pages: links and anchors exist, the site lists every page, and a page answers its question in 1,200 words."""

import re
from pathlib import Path

import yaml
from helpers.sources import FILES, tokens_of

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "tutorials").glob("*.md"))
DEVELOPERS = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "api.md"]  # not on the site
TABLES = {"models.md"}  # generated, and compared with the code by tests


def text_of(path: Path) -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)


def anchors_of(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text_of(path), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def test_every_link_and_anchor_exists():
    broken = []
    for page in [*PAGES, *ROOT.glob("*.md"), *DEVELOPERS]:
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", text_of(page)):
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors_of(path)):
                broken.append((page.name, target, anchor))
    assert not broken


def test_names_of_pages_in_code_and_files_exist():
    files = [
        path for folder in ("toolkit", "scripts", "config_hub", "extensions") for path in (ROOT / folder).rglob("*")
    ]
    named = {
        (path.name, name)
        for path in files
        if path.suffix in (".py", ".yaml", ".md", ".sh")
        for name in re.findall(r"(?:tutorials|docs)/\w+\.md", path.read_text())
    }
    assert len(named) > 10 and not [(file, name) for file, name in named if not (ROOT / name).exists()]


def test_sections_that_messages_name_exist():
    """A message ends with ``(see PAGE: SECTION)``, in lower case or as the heading has it."""
    sources = [path.read_text() for path in FILES]
    named = {pair for source in sources for pair in re.findall(r"\(see (\w+): ([\w -]+)\)", source)}
    assert {section.lower() for _, section in named} >= {"out of memory", "diverging", "hanging", "nccl"}
    for page, section in named:
        assert section.lower().replace(" ", "-") in anchors_of(ROOT / "tutorials" / f"{page}.md"), (page, section)


def test_the_site_lists_every_page():
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert not [page.name for page in PAGES if f"'{page.name}'" not in nav]


def test_a_page_has_less_than_1200_words():
    assert {page.name: n for page in PAGES if (n := len(page.read_text().split())) >= 1200}.keys() <= TABLES


def test_the_reading_page_lists_files_and_says_how_long_they_are():
    page = ROOT / "tutorials" / "reading.md"
    rows = re.findall(r"^\| \[([\w/]+\.py)\]\(\.\./toolkit/([\w/]+\.py)\) \| .+ \|$", page.read_text(), re.M)
    assert [name for name, _ in rows] == [path for _, path in rows]
    count, said = re.search(r"These (\d+) files, about ([\d,]+) tokens", page.read_text()).groups()
    total = sum(tokens_of(ROOT / "toolkit" / path) for _, path in rows)
    assert len({*rows}) == len(rows) == int(count)
    assert abs(total - int(said.replace(",", ""))) < 0.1 * total, f"{total:,} tokens"
