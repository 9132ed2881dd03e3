"""Limit text growth in a tokenizer.json. For example, 40 doubling replacements expand one character to 1 TB."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 256  # output to input length; real tokenizers stay below 40
# Maximum output characters per input character, if above 1. Other steps add at most a constant.
_FACTORS = {"ByteLevel": 4, "BertNormalizer": 3, "Metaspace": 2, "NFD": 4, "NFKC": 4, "NFKD": 4}
_MAY_MATCH_NOTHING = re.compile(r"[?*|^$(]|\\[bBAzZGKyY]|\{[0,]|^$")
_IS_LITERAL = re.compile(r"[^\\.^$*+?{}\[\]|()]+")


def require_bounded(tokenizer: Any) -> None:
    """Check a ``tokenizers.Tokenizer`` before it processes any text.

    Raises:
        ValueError: The tokenizer can expand a text by more than a factor of MAX_GROWTH.
    """
    before = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
    for what, steps, factors in (("normalizer", before, _FACTORS), ("decoder", [*_steps(tokenizer.decoder)], {})):
        if (growth := _max_growth(steps, factors)) > MAX_GROWTH:
            raise ValueError(
                f"tokenizer.json: its {what} can make a text {growth:.3g} times as long, more than {MAX_GROWTH} times"
            )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, in tokenizer.json format."""
    stack = [] if part is None else [json.loads(part.__getstate__())]
    while stack:
        step = stack.pop()
        if step["type"] == "Sequence":
            (parts,) = (value for value in step.values() if isinstance(value, list))
            stack += reversed(parts)
        else:
            yield step


def _max_growth(steps: list[dict[str, Any]], factors: dict[str, int]) -> float:
    """Return an upper bound on output characters per input character.

    Iterate from the last step to the first. A character's weight is an upper bound on its output length after the
    remaining steps. A replacement distributes the weight of the content over the characters of the pattern, so no step
    increases a text's total weight.
    """
    weights: dict[str, float] = {}  # characters whose weight differs from ``other``
    other = 1.0
    for step in reversed(steps):
        if step["type"] == "Replace":
            content = sum(weights.get(c, other) for c in step["content"])
            pattern = step["pattern"].get("String", step["pattern"].get("Regex", ""))
            if pattern and ("String" in step["pattern"] or _IS_LITERAL.fullmatch(pattern)):
                for c in set(pattern):
                    weights[c] = max(weights.get(c, other), content / len(pattern))
                continue
            # The pattern may match any character, and possibly the empty string between characters.
            between = content if _MAY_MATCH_NOTHING.search(pattern) else 0.0
            other, weights = max(other, content, *weights.values()) + between, {}
        else:
            factor = _longest_replacement(step) if step["type"] == "Precompiled" else factors.get(step["type"], 1)
            other, weights = max(1, factor) * max([other, *weights.values()]), {}
    return max([other, *weights.values()])


def _longest_replacement(step: dict[str, Any]) -> int:
    """Return the longest replacement in SentencePiece's charsmap: trie size, trie, zero-terminated replacements."""
    blob = base64.b64decode(step["precompiled_charsmap"] or "")
    replacements = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
    return max(len(text.decode(errors="ignore")) for text in replacements)
