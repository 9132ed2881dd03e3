"""Decide how the documents of text data begin and end, see :meth:`toolkit.data.tokenizer.Tokenizer.missing_ends`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from toolkit.data.base import AUTO, AddBos, AddedBos, Report, require
from toolkit.data.tokenizer import END_OF_TEXT, Tokenizer

# What documents have: "bos": bos and eos; "eos": eos; "": eos, twice if the text ends with it, as in toolkit 0.1.0.
# "eos" is used only if it gives other tokens than "", so that other caches keep their keys.
# A stream looks at few documents: "later" is "eos" with the key of "", if none of these documents ends with eos.
DocumentEnds = Literal["bos", "eos", "later", ""]
TAIL = 64  # length of a document's end that shows whether it ends with eos


def added_bos(ends: DocumentEnds, tokenizer: Any) -> AddedBos | None:
    return AddedBos(tokenizer.bos_id, tokenizer.eos_id) if ends == "bos" else None


def choose_ends(add_bos: AddBos, tokenizer: Tokenizer | None, tails: Iterable[str], report: Report) -> DocumentEnds:
    """Return how documents begin and end, by ``--data.add_bos`` and the last characters of some documents."""
    names = {"eos_token": END_OF_TEXT} if tokenizer is None else tokenizer.special_tokens
    adds_bos = tokenizer is not None and tokenizer.adds_bos
    if add_bos is None:
        if adds_bos:
            report("Data: documents begin without bos, as in toolkit 0.1.0 (--data.add_bos null)")
        return ""
    if add_bos is True or (add_bos == AUTO and adds_bos):
        hint = "the tokenizer has no bos token; set bos_token in tokenizer_config.json"
        require("bos_token" in names, "add_bos", "true", hint)
        how = f"begins with {names['bos_token']} and ends with {names['eos_token']}"
        report(f"Data: each document {how} (--data.add_bos {str(add_bos).lower()})")
        return "bos"
    return "eos" if any(tail.rstrip().endswith(names["eos_token"]) for tail in tails) else ""
