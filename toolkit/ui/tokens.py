"""Tokens with their labels, and counts, for people: in colour on a terminal, with brackets everywhere else."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

# Neighbours alternate between two shades, so that each token can be told from the next.
TRAINED = ("black on green", "black on bright_green")
MASKED = ("dim", "bold dim")
_SHOWN = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_PLAIN = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def print_inspection(found: dict[str, Any], console: Console) -> None:
    """Print what :func:`toolkit.data.inspection.inspect_rows` returns."""
    colour = console.color_system is not None
    for number, sample in enumerate(found["samples"], 1):
        tokens = sample["tokens"]
        trained = sum(token["trained"] for token in tokens)
        share = f"{trained:,} of {len(tokens):,} tokens trained"
        console.print(Text.assemble((f"Sample {number}", "bold"), f": {sample['where']}: {share}"))
        console.print(coloured(tokens) if colour else Text(bracketed(tokens, console.encoding)), soft_wrap=not colour)
        console.print()
    legend = Text.assemble((" trained ", TRAINED[0]), " ", ("not trained", MASKED[0])) if colour else Text(
        "[trained] tokens are in brackets, the others are not trained"
    )  # fmt: skip
    if found["samples"]:
        console.print(legend)
        console.print()
    for name, value in found["counts"].items():
        console.print(Text(f"{name.removesuffix('_percent').replace('_', ' '):28} {_number(name, value)}"))
    for number, sample in enumerate(found["longest"]):
        console.print(Text(f"{'' if number else 'longest samples':28} {sample['tokens']:,} tokens: {sample['where']}"))


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
            shown.append(token["text"])
        elif token["text"]:
            text = _visible(token["text"], _PLAIN)
            shown.append(f"[{text}]" + "\n" * token["text"].count("\n"))
    return "".join(shown).encode(encoding, errors="replace").decode(encoding).rstrip("\n")


def _visible(text: str, names: dict[str, str]) -> str:
    """Control characters as pictures: what a file holds must not steer the terminal."""
    for character, name in names.items():
        text = text.replace(character, name)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _number(name: str, value: float) -> str:
    if name.endswith("_percent"):
        return f"{value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
