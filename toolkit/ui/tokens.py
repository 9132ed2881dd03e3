"""Tokens with their labels, and counts, for people: in colour on a terminal, with brackets everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

# Neighbours alternate between two shades, so that each token can be told from the next.
TRAINED = ("black on green", "black on bright_green")
MASKED = ("dim", "")
_SHOWN = {"\n": "⏎", "\t": "⇥"}
_PLAIN = {"\n": "\\n"}


def print_inspection(found: dict[str, Any], console: Console) -> None:
    """Print what :func:`toolkit.data.inspection.inspect_rows` returns."""
    colour = console.color_system is not None and not console.no_color
    for number, sample in enumerate(found["samples"], 1):
        tokens = sample["tokens"]
        share = f"{sum(token['trained'] for token in tokens):,} of {len(tokens):,} tokens trained"
        console.print(Text.assemble((f"Sample {number}", "bold"), f": {sample['where']}: {share}"), soft_wrap=True)
        console.print(coloured(tokens) if colour else Text(bracketed(tokens, console.encoding)), soft_wrap=not colour)
        console.print()
    if found["samples"]:
        console.print(_legend(colour))
        console.print()
    for name, value in _lines(found["counts"]):
        console.print(Text(f"{name:20} {value}"), soft_wrap=True)
    for number, sample in enumerate(found["longest"]):
        name = "" if number else "longest samples"
        console.print(Text(f"{name:20} {sample['tokens']:,} tokens: {sample['where']}"), soft_wrap=True)


def _legend(colour: bool) -> Text:
    if not colour:
        return Text("Tokens in [brackets] are trained, the others are not.")
    return Text.assemble((" trained ", TRAINED[0]), " ", ("not trained", MASKED[0]), "; shades tell tokens apart")


def _lines(counts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values for people: a count together with its share, and only those reasons that occurred."""
    for name, value in counts.items():
        share = counts.get(f"{name.removesuffix('_tokens')}_percent")
        if name.endswith("_percent"):
            count = name.removesuffix("_percent")
            if count not in counts and f"{count}_tokens" not in counts:
                yield count.replace("_", " "), f"{value:.1f} %"
        elif name.startswith("dropped_") or name in ("split", "val_samples_also_trained"):
            if value:
                yield name.replace("dropped_", "  ").replace("_", " "), f"{value:,}"
        else:
            number = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
            yield name.replace("_", " "), number if share is None else f"{number} ({share:.1f} %)"


def coloured(tokens: list[dict[str, Any]]) -> Text:
    """The text of a sample; trained tokens on a green ground, the others dim."""
    shown = Text()
    for number, token in enumerate(tokens):
        style = (TRAINED if token["trained"] else MASKED)[number % 2]
        lines = _visible(token["text"], _SHOWN).split("⏎")
        for line in lines[:-1]:
            shown.append(f"{line}⏎", style).append("\n")
        shown.append(lines[-1], style)
    return shown


def bracketed(tokens: list[dict[str, Any]], encoding: str = "utf-8") -> str:
    """The text of a sample; every trained token in brackets."""
    shown = []
    for token in tokens:
        if not token["trained"]:
            shown.append(_visible(token["text"], {}))
        elif token["text"]:
            shown.append(f"[{_visible(token['text'], _PLAIN)}]" + "\n" * token["text"].count("\n"))
    return "".join(shown).encode(encoding, errors="replace").decode(encoding).rstrip("\n")


def _visible(text: str, names: dict[str, str]) -> str:
    """Control characters in writing: what a file holds must not steer the terminal."""
    return "".join(names.get(c, c if c.isprintable() or c == "\n" else ascii(c)[1:-1]) for c in text)
