"""Tokenize rows of text: render samples with the chat template, truncate or split them, and write tokens."""

from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from toolkit.data.base import OnLong, Packing, Report, RowKind, TrainOn, Values
from toolkit.data.cache import throttle
from toolkit.data.chat.template import ChatTemplate, Encoding, encode_text
from toolkit.data.sft.messages import EmptyAnswerError
from toolkit.data.sft.readers import ClassNames, RowSource, Splits, describe_row
from toolkit.data.sft.schemas import Columns, EqualAnswersError, Record, parse_row
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.token_store import TokenWriter
from toolkit.errors import UserError

Arrays = dict[str, np.ndarray]
N_LONGEST = 5  # number of longest samples to report


@dataclass(frozen=True)
class SFTConfig:
    """Row sources and preparation options; see :class:`toolkit.data.sft.datasets.InstructionData`.

    Args:
        module: Prefix of the cache folder name.
        kind: What a row is, see :data:`toolkit.data.base.RowKind`.
        labeling: How to read the texts and labels of a classification, a dataclass; None reads answers.
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
    skip_empty: bool
    on_long: OnLong
    packing: Packing
    max_seq_length: int
    val_fraction: float
    cache_dir: str | None
    columns: Columns = None
    train_on: TrainOn = "all"
    labeling: Any = None

    @property
    def is_scored(self) -> bool:
        """Whether the model scores tokens of each sample."""
        return self.kind == "labeled" or self.is_compared

    @property
    def is_paired(self) -> bool:
        return self.kind == "pairs" or self.is_compared

    @property
    def is_compared(self) -> bool:
        """Whether a sample is a pair of completions to score."""
        return self.kind in ("compared", "compared_tokens")

    @property
    def sources(self) -> list[RowSource]:
        return [*self.splits.train, *(self.splits.val or [])]

    def parse(self, row: Any, where: str, class_names: ClassNames | None = None) -> list[Record]:
        """Parse a row into a record, or completions with their prompt. ``class_names``: of the row's source."""
        if self.labeling is not None:
            return [self.labeling.parse(row, where, class_names or {})]
        return parse_row(row, where, self.columns, self.kind)


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
        labels: Names, problem type and description of a classification's labels.
        unread: Columns, and fields of messages, that are not read.
        longest: The longest samples, (tokens, source index, row number).
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
    labels: tuple[list[str], str, str] | None = None
    unread: list[str] = field(default_factory=list)
    longest: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return self.too_long + self.untrained + self.empty + self.equal

    def measure(self, tokens: int, source: int, number: int) -> None:
        """Track the longest samples. On ties, keep the first."""
        self.longest = sorted([*self.longest, (tokens, source, number)], key=lambda sample: -sample[0])[:N_LONGEST]

    def to_dict(self) -> Values:
        return asdict(self) | {"dropped": self.dropped}


def tokenize_samples(config: SFTConfig, writer: TokenWriter, report: Report) -> tuple[Counts, Arrays, list[Record]]:
    """Tokenize all rows, write tokens and loss masks, and finish the writer.

    Returns:
        The counts, and int64 arrays: ``offsets`` (n + 1,), the token offset of each sample; ``sources`` (n,), the
        index in ``config.sources``; and ``numbers`` (n,), the row number. Pieces of a sample are adjacent. Of
        preferences: ``labels`` (n,), 1 for a good completion, 0 for a bad one. Both completions of a pair are adjacent.
        Of scored pairs: ``targets``, the margin, (n, 1). Then the records of samples that are scored.
    """
    counts, report_progress = Counts(), throttle(report)
    offsets, sources, numbers, labels = array("q", [0]), array("q"), array("q"), array("q")
    unread: set[str] = set()
    scored: list[Record] = []
    for position, source in enumerate(config.sources):
        class_names = None if config.labeling is None else source.class_names()
        for number, row in source.rows():
            counts.samples += 1
            try:
                records = config.parse(row, describe_row(source, number), class_names)
            except EmptyAnswerError as error:
                if not config.skip_empty:
                    raise
                counts.equal += isinstance(error, EqualAnswersError)
                counts.empty += not isinstance(error, EqualAnswersError)
                continue
            unread |= records[0].unread
            for i, piece in enumerate(_tokenize(config, records, position, number, counts)):
                writer.add(*piece)
                if config.is_scored:
                    scored.append(records[i])
                if config.kind not in ("answers", "labeled"):
                    labels.append(records[i].is_good)
                offsets.append(writer.n_tokens)
                sources.append(position)
                numbers.append(number)
            report_progress(f"Data: tokenized {counts.samples:,} samples")
    writer.finish()
    fields = config.template.unread_fields if config.template else ()
    counts.unread = sorted(unread) + sorted(f"{name} of messages" for name in fields)
    lists = {"offsets": offsets, "sources": sources, "numbers": numbers} | ({"labels": labels} if labels else {})
    arrays = {name: np.asarray(values, np.int64) for name, values in lists.items()}
    if config.is_compared:
        arrays["targets"] = np.array([[record.label] for record in scored], np.float32)
    return counts, arrays, scored


def _tokenize(config: SFTConfig, records: list[Record], source: int, number: int, counts: Counts) -> list[Encoding]:
    """Tokenize a row into pieces that fit: usually one, or none if the row is dropped.

    In preferences, a piece is a completion with its prompt. Both of a pair keep equally many tokens of the prompt.
    """
    first, is_preference = records[0], config.kind not in ("answers", "labeled")
    counts.conversations += first.messages is not None
    counts.unanswered += (first.messages or ({},))[-1].get("role") == "user"
    encodings = [tokenize_record(record, config) for record in records]
    if _are_equal(encodings):
        name = "the tokenizer" if config.template is None else config.template.name
        raise UserError(f"{first.where}: {name} renders chosen and rejected as the same tokens; fix or remove this row")
    longest, limit = max(len(encoding.ids) for encoding in encodings), config.max_seq_length + (not config.is_scored)
    counts.measure(longest, source, number)
    is_long = longest > limit
    if is_long and config.on_long == "error":
        choices = "truncate, drop or split" if config.kind == "answers" else "truncate or drop"
        raise UserError(
            f"{first.where}: {longest:,} tokens, but a row has room for {limit:,} (--train.max_seq_length"
            f"{'' if config.is_scored else ' + 1'}); "
            f"increase it, or choose --data.on_long {choices}"
        )
    if is_long and config.on_long == "drop":
        counts.too_long += 1
        return []
    if is_preference:
        pieces = cut_prompts(encodings, limit, config.tokenizer.bos_id, counts) if is_long else encodings
        trained = [] if _are_equal(pieces) or not all(map(_is_trained, pieces)) else pieces
    elif config.is_scored:
        pieces = trained = [cut_end(encodings[0], limit, config.tokenizer)]
    else:
        pieces = list(_fit_to_row(encodings[0], limit, split=config.on_long == "split"))
        trained = list(filter(_is_trained, pieces))
    if config.is_scored:
        pad, every_token = config.tokenizer.pad_id, config.kind == "compared_tokens"
        trained = [mark_scored(piece, pad, every_token) for piece in trained]
    counts.trained_tokens += sum(sum(piece.loss_mask[1:]) for piece in trained)
    counts.untrained += not trained
    if is_long and (trained or is_preference):
        counts.truncated += config.on_long == "truncate"
        counts.split += config.on_long == "split"
        counts.pieces_left_out += 0 if is_preference else len(pieces) - len(trained)
    return trained


def cut_end(encoding: Encoding, limit: int, tokenizer: Tokenizer) -> Encoding:
    """Cut a text at its end, but before what the tokenizer adds to a text, as transformers does."""
    (ids, mask), after = encoding, tokenizer.missing_ends([], False, None)[1]
    n_text = len(ids) - (len(after) if ids[-len(after) :] == after else 0)
    stop = min(n_text, limit - len(ids) + n_text)
    return Encoding(ids[:stop] + ids[n_text:], mask[:stop] + mask[n_text:])


def mark_scored(encoding: Encoding, pad: int | None, every_token: bool) -> Encoding:
    """Return a text with labels where scores are read: at each token with loss, or only at the last one.

    As in transformers, the last one is before tokens ``pad`` at the end. A token 0 at the end is never an input: the
    label of a position is in the next one.
    """
    ids, loss_mask = encoding
    if every_token:
        return Encoding([*ids, 0], [False, *loss_mask])
    end = next((i for i in range(len(ids), 1, -1) if ids[i - 1] != pad), 1)
    return Encoding([*ids[:end], 0], [*[False] * end, True])


def _are_equal(encodings: list[Encoding]) -> bool:
    """Whether the completions of a pair are the same tokens."""
    return len(encodings) == 2 and encodings[0].ids == encodings[1].ids


def _is_trained(encoding: Encoding) -> bool:
    return any(encoding.loss_mask[1:])


def cut_prompts(pieces: list[Encoding], limit: int, bos: int | None, counts: Counts) -> list[Encoding]:
    """Cut completions with their prompt to ``limit`` tokens: the prompt from the left, then completions from the right.

    The token bos and at least one token of the prompt stay.
    """
    starts = [[*mask, True].index(True) for _, mask in pieces]
    longest = max(len(ids) - start for (ids, _), start in zip(pieces, starts, strict=True))
    counts.cut_prompts += max(starts) > max(1, limit - longest)
    cut = []
    for (ids, mask), start in zip(pieces, starts, strict=True):
        n_bos = int(ids[0] == bos and start > 1)
        first = max(n_bos, start - max(1, limit - n_bos - longest))
        ids, mask = ids[:n_bos] + ids[first:], mask[:n_bos] + mask[first:]
        counts.cut_completions += len(ids) > limit
        cut.append(Encoding(ids[:limit], mask[:limit]))
    return cut


def tokenize_record(record: Record, config: SFTConfig) -> Encoding:
    if record.messages is None:
        text = record.text or ""
        return encode_text(config.tokenizer, text, config.template, record.prompt_length, record.has_eos)
    if config.template is None:
        raise config.no_template or UserError("--data.prompt_style: conversations need a chat template")
    try:
        return config.template.encode(record.messages, config.train_on, record.tools)
    except UserError as error:
        raise type(error)(f"{record.where}: {error}") from error


def _fit_to_row(encoding: Encoding, limit: int, split: bool) -> Iterator[Encoding]:
    """Truncate a sample to ``limit`` tokens (max_seq_length + 1), or split it into pieces of that size.

    Consecutive pieces share one token, a label in the first and an input in the second, so that every token is
    predicted once.
    """
    last = len(encoding.ids) - 1 if split else 1
    for start in range(0, max(last, 1), limit - 1):
        end = start + limit
        yield Encoding(encoding.ids[start:end], encoding.loss_mask[start:end])
