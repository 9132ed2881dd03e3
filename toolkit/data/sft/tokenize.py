"""Tokenize instruction data: render samples with the chat template, truncate or split them, and write tokens."""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from toolkit.data.base import OnLong, Packing, Report, RowKind, TrainOn, Values
from toolkit.data.cache import HEARTBEAT
from toolkit.data.chat.template import ChatTemplate, Encoding, encode_text
from toolkit.data.sft.messages import EmptyAnswerError
from toolkit.data.sft.readers import RowSource, Splits, describe_row
from toolkit.data.sft.schemas import Completion, EqualAnswersError, Record, to_completions, to_record, unread_columns
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.store import TokenWriter
from toolkit.errors import UserError

N_LONGEST = 5  # number of longest samples to report


@dataclass(frozen=True)
class SFTConfig:
    """Row sources and preparation options; see :class:`toolkit.data.sft.instruct.InstructionData`.

    Args:
        module: Prefix of the cache folder name.
        kind: What a row is: a text with "answers", "pairs" of completions, or "rated" completions.
        option: The data option, such as ``--data.json_path faq.jsonl``.
        no_template: If ``template`` is None, the error to raise for the first conversation.
        skip_empty: Skip rows with an empty answer instead of raising an error.
        max_seq_length: Input tokens per row.
        val_fraction: Fraction of training samples to hold out.
    """

    module: str
    kind: RowKind
    option: str
    splits: Splits
    tokenizer: Tokenizer
    template: ChatTemplate | None
    no_template: UserError | None
    columns: dict[str, str] | None
    skip_empty: bool
    train_on: TrainOn
    on_long: OnLong
    packing: Packing
    max_seq_length: int
    val_fraction: float
    cache_dir: str | None

    @property
    def sources(self) -> list[RowSource]:
        return [*self.splits.train, *(self.splits.val or [])]

    def parse(self, row: Any, where: str) -> Any:
        """Parse a row into a record, or completions."""
        if self.kind == "answers":
            return to_record(row, where, self.columns)
        return to_completions(row, where, self.columns, self.kind == "rated")

    def cache_options(self) -> Values:
        """Return the options that affect prepared rows, for the cache key."""
        names = ("columns", "skip_empty", "train_on", "on_long", "packing", "max_seq_length", "val_fraction")
        return {name: getattr(self, name) for name in names} | ({} if self.kind == "answers" else {"kind": self.kind})


@dataclass
class Counts:
    """Preparation statistics.

    Args:
        samples: Rows read.
        unanswered: Conversations that end with a user message.
        truncated: Samples truncated to the row length.
        split: Samples split into several pieces.
        too_long: Samples dropped because they are too long.
        untrained: Samples dropped because no token within the row length has loss.
        empty, equal: Samples dropped because of an empty answer, or two equal ones to compare.
        pieces_left_out: Pieces of split samples dropped because no token has loss.
        cut_prompts, cut_completions: In preferences: samples whose prompt was cut from the left, completions cut at the
            end.
        trained_tokens: Tokens with loss in all samples that were not dropped.
        unread: Columns, and fields of messages, that are not read.
        longest: Heap of (tokens, -source index, -row number).
    """

    samples: int = 0
    conversations: int = 0
    unanswered: int = 0
    truncated: int = 0
    split: int = 0
    too_long: int = 0
    untrained: int = 0
    empty: int = 0
    equal: int = 0
    pieces_left_out: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0
    trained_tokens: int = 0
    unread: list[str] = field(default_factory=list)
    longest: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return self.too_long + self.untrained + self.empty + self.equal

    def measure(self, tokens: int, source: int, number: int) -> None:
        """Track the longest samples. On ties, keep the first."""
        heapq.heappush(self.longest, (tokens, -source, -number))
        if len(self.longest) > N_LONGEST:
            heapq.heappop(self.longest)

    def to_dict(self) -> Values:
        """Return all counts. ``longest`` is a list of (tokens, source index, row number), longest first."""
        longest = [(tokens, -source, -number) for tokens, source, number in sorted(self.longest, reverse=True)]
        return asdict(self) | {"dropped": self.dropped, "longest": longest}


def tokenize_samples(config: SFTConfig, writer: TokenWriter, report: Report) -> tuple[Counts, dict[str, np.ndarray]]:
    """Tokenize all rows, write tokens and loss masks, and finish the writer.

    Returns:
        The counts, and int64 arrays: ``offsets`` (n + 1,), the token offset of each sample; ``sources`` (n,), the
        index in ``config.sources``; and ``numbers`` (n,), the row number. Pieces of a sample are adjacent. Of
        preferences: ``labels`` (n,), 1 for a good completion, 0 for a bad one. Both completions of a pair are adjacent.
    """
    counts, last_line = Counts(), time.perf_counter()
    offsets, sources, numbers, labels = array("q", [0]), array("q"), array("q"), array("q")
    tokenize = _tokenize_record if config.kind == "answers" else _tokenize_completions
    unread: set[str] = set()
    for position, source in enumerate(config.sources):
        for number, row in source.rows():
            counts.samples += 1
            try:
                parsed = config.parse(row, describe_row(source, number))
            except EmptyAnswerError as error:
                if not config.skip_empty:
                    raise
                counts.equal += isinstance(error, EqualAnswersError)
                counts.empty += not isinstance(error, EqualAnswersError)
                continue
            unread |= unread_columns(row, config.columns, partial(config.parse, where=""))
            for ids, mask, *label in tokenize(config, parsed, position, number, counts):
                writer.add(ids, mask)
                labels.extend(label)
                offsets.append(writer.n_tokens)
                sources.append(position)
                numbers.append(number)
            if time.perf_counter() - last_line > HEARTBEAT:
                report(f"Data: tokenized {counts.samples:,} samples")
                last_line = time.perf_counter()
    writer.finish()
    fields = config.template.unread_fields if config.template else ()
    counts.unread = sorted(unread) + sorted(f"{name} of messages" for name in fields)
    arrays = {"offsets": offsets, "sources": sources, "numbers": numbers} | ({"labels": labels} if labels else {})
    return counts, {name: np.asarray(values, np.int64) for name, values in arrays.items()}


def _tokenize_record(
    config: SFTConfig, record: Record, source: int, number: int, counts: Counts
) -> list[tuple[list[int], list[bool]]]:
    """Tokenize a row into pieces that fit: usually one, or none if the row is dropped."""
    counts.conversations += record.messages is not None
    counts.unanswered += (record.messages or ({},))[-1].get("role") == "user"
    encoding = tokenize_record(record, config)
    counts.measure(len(encoding.ids), source, number)
    limit = config.max_seq_length + 1
    is_long = len(encoding.ids) > limit
    if is_long and config.on_long == "error":
        raise _too_long(record.where, len(encoding.ids), limit, "truncate, drop or split")
    if is_long and config.on_long == "drop":
        counts.too_long += 1
        return []
    pieces = list(_fit_to_row(encoding, limit, split=config.on_long == "split"))
    trained_pieces = [(ids, loss_mask) for ids, loss_mask in pieces if any(loss_mask[1:])]
    counts.trained_tokens += sum(sum(loss_mask[1:]) for _, loss_mask in trained_pieces)
    if not trained_pieces:
        counts.untrained += 1
    elif is_long:
        counts.truncated += config.on_long == "truncate"
        counts.split += config.on_long == "split"
        counts.pieces_left_out += len(pieces) - len(trained_pieces)
    return trained_pieces


def _tokenize_completions(
    config: SFTConfig, completions: list[Completion], source: int, number: int, counts: Counts
) -> list[tuple[list[int], list[bool], int]]:
    """Tokenize a row of preferences into completions with their prompt; none if the row is dropped.

    Both completions of a pair keep equally many tokens of the prompt.
    """
    first = completions[0].record
    counts.conversations += first.messages is not None
    encodings = [_tokenize_completion(completion, config) for completion in completions]
    if len(encodings) > 1 and encodings[0].ids == encodings[1].ids:
        name = "the tokenizer" if config.template is None else config.template.name
        raise UserError(f"{first.where}: {name} renders chosen and rejected as the same tokens; fix or remove this row")
    longest, limit = max(len(encoding.ids) for encoding in encodings), config.max_seq_length + 1
    counts.measure(longest, source, number)
    if longest > limit:
        if config.on_long == "error":
            raise _too_long(first.where, longest, limit, "truncate or drop")
        if config.on_long == "drop":
            counts.too_long += 1
            return []
    pieces = [(e.ids, e.loss_mask, int(c.is_good)) for e, c in zip(encodings, completions, strict=True)]
    if longest > limit:
        counts.truncated += 1
        pieces = _cut_prompts(pieces, limit, config.tokenizer.bos_id, counts)
    if not all(any(mask[1:]) for _, mask, _ in pieces) or (len(pieces) > 1 and pieces[0][0] == pieces[1][0]):
        counts.untrained += 1
        return []
    counts.trained_tokens += sum(sum(mask[1:]) for _, mask, _ in pieces)
    return pieces


def _tokenize_completion(completion: Completion, config: SFTConfig) -> Encoding:
    if (text := completion.record.text) is None:
        return tokenize_record(completion.record, config)
    return encode_text(config.tokenizer, text, config.template, completion.prompt_length)


def _cut_prompts(
    pieces: list[tuple[list[int], list[bool], int]], limit: int, bos: int | None, counts: Counts
) -> list[tuple[list[int], list[bool], int]]:
    """Cut completions with their prompt to ``limit`` tokens: the prompt from the left, then completions from the right.

    The token bos and at least one token of the prompt stay.
    """
    starts = [mask.index(True) if True in mask else len(mask) for _, mask, _ in pieces]
    longest = max(len(ids) - start for (ids, *_), start in zip(pieces, starts, strict=True))
    counts.cut_prompts += max(starts) > max(1, limit - longest)
    cut = []
    for (ids, mask, label), start in zip(pieces, starts, strict=True):
        n_bos = int(ids[0] == bos and start > 1)
        first = max(n_bos, start - max(1, limit - n_bos - longest))
        ids, mask = ids[:n_bos] + ids[first:], mask[:n_bos] + mask[first:]
        counts.cut_completions += len(ids) > limit
        cut.append((ids[:limit], mask[:limit], label))
    return cut


def _too_long(where: str, tokens: int, limit: int, choices: str) -> UserError:
    return UserError(
        f"{where}: {tokens:,} tokens, but a row has room for {limit:,} (--train.max_seq_length + 1); increase it, or "
        f"choose --data.on_long {choices}"
    )


def tokenize_record(record: Record, config: SFTConfig) -> Encoding:
    if record.messages is None:
        return encode_text(config.tokenizer, record.text or "", config.template)
    if config.template is None:
        raise config.no_template or UserError("--data.prompt_style: conversations need a chat template")
    try:
        return config.template.encode(record.messages, config.train_on, record.tools)
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from error


def _fit_to_row(encoding: Encoding, limit: int, split: bool) -> Iterator[tuple[list[int], list[bool]]]:
    """Truncate a sample to ``limit`` tokens (max_seq_length + 1), or split it into pieces of that size.

    Consecutive pieces share one token, a label in the first and an input in the second, so that every token is
    predicted once.
    """
    ids, loss_mask = encoding.ids, encoding.loss_mask
    last = len(ids) - 1 if split else 1
    for start in range(0, max(last, 1), limit - 1):
        yield ids[start : start + limit], loss_mask[start : start + limit]
