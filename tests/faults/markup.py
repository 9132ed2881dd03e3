"""What a report of a hostile run may consist of: the elements of harmless runs' reports, and nothing else."""

import shutil
import tempfile
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from toolkit_report.markdown import render_markdown
from toolkit_report.page import render_page
from toolkit_report.run import read_runs

from tests.faults.states import undisturbed
from toolkit.ui.events import write_event

ONCE = ("html", "head", "meta", "title", "style", "body", "main", "h1", "script")
"""A page has as many of them as a harmless one, whatever the run has written."""
VOID = ("meta", "input", "br", "hr", "img")


class Page(HTMLParser):
    """Elements of a page with their attributes, and the content of its scripts and styles but the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        text.encode()  # a lone surrogate cannot be written
        self.elements: Counter[str] = Counter()
        self.code: list[str] = []
        self._open: list[str] = []
        self._is_data = False
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[" ".join([tag, *(f"{name}={value}" for name, value in attrs)])] += 1
        self._is_data = ("id", "data") in attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self._open[-1:] in (["script"], ["style"]) and not self._is_data:
            self.code.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data:.60}")

    handle_pi = unknown_decl = handle_comment


def count_once(page: Page) -> Counter[str]:
    """Return the counts of :data:`ONCE`."""
    counts: Counter[str] = Counter()
    for element, n in page.elements.items():
        counts[element.split(" ")[0]] += n
    return Counter({tag: counts[tag] for tag in ONCE})


def kinds_of(markdown: str) -> set[str]:
    """Return the kinds of parts of a Markdown text, such as "th_open th" and "html_inline"."""
    markdown.encode()
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    return {f"{part.type} {part.tag}" for token in tokens for part in (token, *(token.children or ()))}


@cache
def harmless() -> tuple[Page, frozenset[str], frozenset[str]]:
    """Return the page of a harmless run with all parts, its elements, and the kinds of its Markdown."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        shutil.copytree(undisturbed("ordinary"), run)
        write_event(run, "launch", settings={"model_name": "pico-llama", "seed": 1}, devices="1 x cpu")
        for step in (1, 2):
            write_event(run, "sample", step=step, prompt="a prompt", text="a text")
        write_event(run, "warning", text="a warning")
        runs = read_runs([str(run)])
        runs[0].notes.append("a note")
        page, markdown = Page(render_page(runs)), render_markdown(runs)
    return page, frozenset(page.elements), frozenset(kinds_of(markdown))


def require_harmless_report(runs: list[Any]) -> None:
    """Require that both forms of a report have no other elements than a harmless run's, and no other code."""
    expected, elements, kinds = harmless()
    page = Page(render_page(runs))
    others = page.elements.keys() - elements
    assert not others, f"the page has {len(others)} foreign elements, such as <{min(others):.80}>"
    assert count_once(page) == count_once(expected), f"the page has {count_once(page) - count_once(expected)} more"
    assert page.code == expected.code, "the page has other scripts or styles"
    parts = kinds_of(render_markdown(runs)) - kinds
    assert not parts, f"the Markdown has foreign parts: {sorted(parts)}"
