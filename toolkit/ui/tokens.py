"""Print tokens with the loss mask, and counts. Uses color on a terminal and brackets elsewhere."""

import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from toolkit.escape import visible
from toolkit.io.streams import unescaped

# Adjacent tokens alternate between two shades.
TRAINED = ("black on green", "black on bright_green")
MASKED = ("dim", "")


def print_inspection(inspection: dict[str, Any], console: Console | None = None) -> None:
    """Print the result of :func:`toolkit.data.inspection.inspect_rows`, by default on standard output."""
    console = console or Console(file=unescaped(sys.stdout), highlight=False, markup=False, emoji=False)
    color, is_file = console.color_system is not None and not console.no_color, not console.is_terminal
    are_prompts = "longest_row" in inspection["counts"]
    for number, sample in enumerate(inspection["samples"], 1):
        tokens = sample["tokens"]
        share = f"{sum(token['trained'] for token in tokens):,} of {len(tokens):,} tokens trained"
        share = f"{len(tokens):,} tokens" if are_prompts else share
        title = Text.assemble((f"Sample {number}", "bold"), f": {visible(sample['where'])}: {share}")
        console.print(title, soft_wrap=is_file)
        console.print(colored(tokens) if color else Text(bracketed(tokens, console.encoding)), soft_wrap=is_file)
        console.print()
    if inspection["samples"] and not are_prompts:
        legend = (" trained ", TRAINED[0]), " ", ("not trained", MASKED[0]), "; shades separate tokens"
        plain = r"Tokens in [brackets] are trained, the others are not; brackets of the text are \[ and \]."
        console.print(Text.assemble(*legend) if color else Text(plain))
        console.print()
    for name, value in _lines(inspection["counts"]):
        console.print(Text(f"{name:20} {value}"), soft_wrap=is_file)
    for number, sample in enumerate(inspection["longest"]):
        name = "" if number else "longest samples"
        console.print(Text(f"{name:20} {sample['tokens']:,} tokens: {visible(sample['where'])}"), soft_wrap=is_file)


def _lines(counts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and formatted counts with percentages. Skip drop reasons that did not occur."""
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


def colored(tokens: list[dict[str, Any]]) -> Text:
    """Return a sample as text. Trained tokens have a green background; others alternate between dim and normal."""
    shown = Text()
    for number, token in enumerate(tokens):
        style = (TRAINED if token["trained"] else MASKED)[number % 2]
        shown.append(visible(token["text"], keep="\n\t").replace("\n", "⏎\n").replace("\t", "⇥"), style)
    return shown


def bracketed(tokens: list[dict[str, Any]], encoding: str = "utf-8") -> str:
    """Return a sample as text, with each trained token in brackets. Brackets of the text get a backslash."""
    shown = []
    for token in tokens:
        text = re.sub(r"[\\\[\]]", r"\\\g<0>", token["text"])
        if not token["trained"]:
            shown.append(visible(text, keep="\n"))
        elif text:
            shown.append(f"[{visible(text)}]" + "\n" * text.count("\n"))
    return "".join(shown).encode(encoding, errors="replace").decode(encoding).rstrip("\n")
