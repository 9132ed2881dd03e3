"""What training will see, in plain values: the tokens of some rows with their labels, and counts over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.data.base import PreparedData, TokenDataset
from toolkit.data.tokenizer import UNFINISHED, Tokenizer
from toolkit.models.labels import IGNORE_INDEX

_SURVEYED = 1000  # rows of data that was not counted when it was prepared
_CONTEXT = 4  # tokens before one that are decoded with it: some tokenizers drop a space at the beginning


def inspect_rows(prepared: PreparedData, num_samples: int) -> dict[str, Any]:
    """Return counts and the first ``num_samples`` documents of the training rows.

    Returns:
        ``counts`` by name; ``longest``, a list of ``{"where", "tokens"}``; and ``samples``, a list of documents with
        ``where``, ``text`` and ``tokens``: ``{"id", "text", "trained"}`` each, the first of which is never predicted.
        The bytes of a character that spans several tokens show in the last of them.
    """
    facts = getattr(prepared.train, "facts", None)
    return {
        "counts": _survey(prepared) if facts is None else _counts(facts, prepared),
        "longest": [] if facts is None else _longest(prepared.train, facts),
        "samples": [_sample(prepared, *found) for found in _documents(prepared.train, num_samples)],
    }


def _counts(facts: dict[str, Any], prepared: PreparedData) -> dict[str, Any]:
    samples = facts["samples"]
    counts = {
        "samples": samples,
        "tokens": facts["tokens"],
        "trained_tokens": facts["trained_tokens"],
        "trained_percent": 100 * facts["trained_tokens"] / facts["tokens"],
        "truncated": facts["truncated"],
        "truncated_percent": 100 * facts["truncated"] / samples,
        "split": facts["split"],
        "dropped": facts["dropped"],
        "dropped_percent": 100 * facts["dropped"] / samples,
        "dropped_too_long": facts["too_long"],
        "dropped_without_trained_token": facts["untrained"],
        "dropped_empty_answer": facts["empty"],
        "train_rows": len(prepared.train),
        "val_rows": 0 if prepared.val is None else len(prepared.val),
        "val_samples_also_trained": facts["val_samples_also_trained"],
    }
    if facts["packing"] != "none":
        counts["packing_efficiency_percent"] = 100 * facts["packing_efficiency"]
    return counts


def _survey(prepared: PreparedData) -> dict[str, Any]:
    """Counts of rows that nothing was counted of; of many rows the first ones stand for all."""
    surveyed = min(len(prepared.train), _SURVEYED)
    rows = [prepared.train[i] for i in range(surveyed)]
    tokens = sum(len(row["input_ids"]) for row in rows)
    trained = sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in rows)
    return {
        "train_rows": len(prepared.train),
        "val_rows": 0 if prepared.val is None else len(prepared.val),
        "surveyed_rows": surveyed,
        "tokens_per_row": tokens / surveyed,
        "trained_percent": 100 * trained / max(tokens, 1),
    }


def _longest(rows: Any, facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"where": rows.place(source, row), "tokens": tokens} for tokens, source, row in facts["longest"]]


def _documents(rows: TokenDataset, count: int) -> Iterator[tuple[str, list[int], list[bool]]]:
    """The first ``count`` documents: where each comes from, its tokens, and which of them are predicted."""
    left = count
    for index in range(min(count, len(rows))):
        row = {name: values.tolist() for name, values in rows[index].items()}
        inputs, labels = row["input_ids"], row["labels"]
        numbers = row.get("documents", [0] * len(inputs))
        places = rows.where(index) if hasattr(rows, "where") else [f"row {index + 1:,}"]
        for document, place in enumerate(places):
            if not left:
                return
            left -= 1
            here = [i for i, number in enumerate(numbers) if number == document]
            ids, targets = [inputs[i] for i in here], [labels[i] for i in here]
            learned = [target != IGNORE_INDEX for target in targets]
            last = targets[-1:] if learned[-1] else []  # the token that is a label only
            yield place, ids + last, [False, *learned[: len(ids) - 1 + len(last)]]


def _sample(prepared: PreparedData, where: str, ids: list[int], trained: list[bool]) -> dict[str, Any]:
    texts = [str(i) for i in ids] if prepared.tokenizer is None else list(_texts(prepared.tokenizer, ids))
    tokens = [{"id": i, "text": text, "trained": learned} for i, text, learned in zip(ids, texts, trained, strict=True)]
    return {"where": where, "text": ("" if prepared.tokenizer else " ").join(texts), "tokens": tokens}


def _texts(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    """The text of each token, as it stands among the others."""
    start = 0  # tokens from here on are decoded with the next one
    for i in range(len(ids)):
        before = tokenizer.decode(ids[start:i], skip_special_tokens=False)
        after = tokenizer.decode(ids[start : i + 1], skip_special_tokens=False)
        stays = len(before.rstrip(UNFINISHED))
        if after.endswith(UNFINISHED) and i + 1 < len(ids) and len(after) - stays < 4:
            yield ""
        else:
            yield after[stays:]
            start = max(start, i + 1 - _CONTEXT)
