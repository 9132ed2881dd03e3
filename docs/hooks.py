"""The site's pages that are not in tutorials/, and links to files of the repository that are no page of the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import toolkit

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "tutorials"
ADDED = {
    "index.md": ROOT / "README.md",
    "api.md": ROOT / "docs" / "api.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "site.css": ROOT / "docs" / "site.css",
}
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)
LINK = re.compile(r"\[((?:!\[[^]]*\]\([^)]*\)|[^]])*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):(<code>)(?:~[\w.]*\.)?")  # :class:`~package.Name`


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in ADDED.items():
        files.append(File.generated(config, name, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    if name == "index.md":
        page.meta["hide"] = ["navigation"]
    if name == "api.md":
        return markdown + "".join(f"\n::: toolkit.{public}\n" for public in _public_names())
    source = ADDED.get(name, TUTORIALS / name)
    parts = FENCE.split(markdown)  # every second one is a code block
    return "".join(part if i % 2 else _rewrite_links(part, source) for i, part in enumerate(parts))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return ROLE.sub(r"\1", html)  # docstrings name classes as Sphinx does


def _public_names() -> list[str]:
    """Functions before classes, the ones used most first."""
    first = [name for name in ("train", "finetune", "load", "generate") if name in toolkit.__all__]
    rest = sorted(set(toolkit.__all__) - set(first), key=lambda name: (name[0].isupper(), name))
    return first + rest


def _rewrite_links(text: str, source: Path) -> str:
    """Point links at the pages of the site; of links to other files of the repository, keep the text."""
    pages = {path: name for name, path in ADDED.items()}

    def rewrite(match: re.Match[str]) -> str:
        label, target, anchor = LINK.sub(rewrite, match[1]), match[2], match[3] or ""
        path = source.parent.joinpath(target).resolve()
        if not path.exists():
            raise PluginError(f"{source.name}: links to {target}, which does not exist")
        if path in pages:
            return f"[{label}]({pages[path]}{anchor})"
        if path.is_file() and path.is_relative_to(TUTORIALS):
            return f"[{label}]({path.relative_to(TUTORIALS).as_posix()}{anchor})"
        if label.startswith(("`", "!")):
            return label
        file = path.relative_to(ROOT).as_posix()
        return f"`{label}`" if label in file else f"{label} (`{file}`)"

    return LINK.sub(rewrite, text)
