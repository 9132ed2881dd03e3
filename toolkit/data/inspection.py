"""Inspect prepared data: tokens and loss mask of sample rows, and dataset counts."""

from collections.abc import Iterator
from typing import Any

from toolkit.data.base import PreparedData, TokenDataset, Values, member, preview, row_count, rows_of
from toolkit.data.tokenizer import UNFINISHED, Tokenizer
from toolkit.models.labels import IGNORE_INDEX

_SURVEY_ROWS = 1000  # sample size for counts if the dataset has no statistics
_CONTEXT = 4  # tokens of decoding context; some tokenizers drop a leading space


def inspect_rows(prepared: PreparedData, num_samples: int) -> Values:
    """Return dataset counts and the first ``num_samples`` training documents.

    Returns:
        A dict with ``counts`` by name; ``longest``, a list of ``{"where", "tokens"}``; and ``samples``, a list of
        ``{"where", "text", "tokens"}``. Each token is ``{"id", "text", "trained"}``. The first token of a document is
        never a target. A character that spans several tokens is shown at the last of them.
    """
    train: Any = prepared.train
    statistics, rows = member(train, "statistics"), preview(train)
    longest = [] if statistics is None else statistics["longest"]
    return {
        "counts": _count_rows(prepared, rows) if statistics is None else _select_counts(statistics, prepared),
        "longest": [{"where": train.describe_row(source, row), "tokens": tokens} for tokens, source, row in longest],
        "samples": [_describe_sample(prepared, *document) for document in _iterate_documents(rows, num_samples)],
    }


def _select_counts(statistics: Values, prepared: PreparedData) -> Values:
    samples = statistics["samples"]
    counts = {
        "samples": samples,
        "tokens": statistics["tokens"],
        "trained_tokens": statistics["trained_tokens"],
        "trained_percent": 100 * statistics["trained_tokens"] / statistics["tokens"],
        "truncated": statistics["truncated"],
        "truncated_percent": 100 * statistics["truncated"] / samples,
        "split": statistics["split"],
        "dropped": statistics["dropped"],
        "dropped_percent": 100 * statistics["dropped"] / samples,
        "dropped_too_long": statistics["too_long"],
        "dropped_without_trained_token": statistics["untrained"],
        "dropped_empty_answer": statistics["empty"],
        "dropped_equal_answers": statistics["equal"],
        "train_rows": len(prepared.train),
        "val_rows": 0 if prepared.val is None else len(prepared.val),
        "val_samples_also_trained": statistics["val_samples_also_trained"],
    }
    if statistics["packing"] != "none":
        counts["packing_efficiency_percent"] = 100 * statistics["packing_efficiency"]
    return counts


def _count_rows(prepared: PreparedData, train: TokenDataset) -> Values:
    count, surveyed = row_count(prepared.train), min(len(train), _SURVEY_ROWS)
    rows = [row for i in range(surveyed) for row in rows_of(train[i])]
    lengths = [len(row["input_ids"]) for row in rows]
    n_targets = sum(int((row["labels"] != IGNORE_INDEX).sum()) for row in rows)
    return ({} if count is None else {"train_rows": count}) | {
        "val_rows": 0 if prepared.val is None else len(prepared.val),
        "surveyed_rows": surveyed,
        "tokens_per_row": sum(lengths) / len(rows),
        **({"trained_percent": 100 * n_targets / sum(lengths)} if n_targets else {"longest_row": max(lengths)}),
    }


def _iterate_documents(rows: TokenDataset, count: int) -> Iterator[tuple[str, list[int], list[bool]]]:
    """Yield the origin, token ids and loss mask of the first ``count`` documents, or the mask of tokens to score."""
    n_left = count
    for index in range(min(count, len(rows))):
        documents = list[tuple[list[int], list[int]]]()  # input ids and labels
        for row in rows_of(rows[index]):
            numbers = row.get("documents", row["labels"] * 0)
            masks = [numbers == document for document in range(int(numbers.max()) + 1)]
            documents += [(row["input_ids"][mask].tolist(), row["labels"][mask].tolist()) for mask in masks]
        where = member(rows, "where")
        origins = [f"row {index + 1:,}"] * len(documents) if where is None else where(index)
        for origin, (ids, targets) in zip(origins, documents, strict=False):
            if not n_left:
                return
            n_left -= 1
            loss_mask = [target != IGNORE_INDEX for target in targets]
            if "targets" in row:
                yield origin, ids, loss_mask
                continue
            last = targets[-1:] if loss_mask[-1] else []  # the last label is not an input
            yield origin, ids + last, [False, *loss_mask[: len(ids) - 1 + len(last)]]


def _describe_sample(prepared: PreparedData, where: str, ids: list[int], loss_mask: list[bool]) -> Values:
    texts = [str(i) for i in ids] if prepared.tokenizer is None else list(_decode_each(prepared.tokenizer, ids))
    samples = zip(ids, texts, loss_mask, strict=True)
    tokens = [{"id": i, "text": text, "trained": is_target} for i, text, is_target in samples]
    return {"where": where, "text": ("" if prepared.tokenizer else " ").join(texts), "tokens": tokens}


def _decode_each(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    """Yield the text of each token, decoded in context."""
    start = 0  # first token of the decoding context
    for i in range(len(ids)):
        before = tokenizer.decode(ids[start:i], skip_special_tokens=False)
        after = tokenizer.decode(ids[start : i + 1], skip_special_tokens=False)
        prefix = len(before.rstrip(UNFINISHED))
        if after.endswith(UNFINISHED) and i + 1 < len(ids) and len(after) - prefix < 4:
            yield ""
        else:
            yield after[prefix:]
            start = max(start, i + 1 - _CONTEXT)
