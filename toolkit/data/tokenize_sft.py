"""Records to tokens: each sample through the chat template, cut to length, written to a file, and counted."""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.data.cache import HEARTBEAT
from toolkit.data.chat_template import ChatTemplate, Encoded, encode_text
from toolkit.data.readers import RowSource, Splits, place
from toolkit.data.schemas import EmptyAnswer, Record, to_record
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.data.instruct import OnLong, Packing, TrainOn
    from toolkit.data.tokenizer import Tokenizer

LONGEST = 5  # samples that are remembered for people
_BATCH = 1 << 20  # tokens that are held before they are written


@dataclass(frozen=True)
class Job:
    """Rows and the options for their preparation; see :class:`toolkit.data.instruct.InstructionData`.

    Args:
        module: Begins the name of the folder in the cache.
        option: How the user named the rows, such as ``--data.json_path faq.jsonl``.
        splits: The rows.
        tokenizer: Makes the tokens.
        template: Makes the text of conversations; None where there is none, for ``no_template`` says why.
        no_template: What to raise for the first conversation without a template.
        skip_empty: Leave rows with an empty answer out, instead of refusing them.
        max_seq_length: Input tokens of a row.
        val_fraction: Share of the training samples to hold out.
    """

    module: str
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

    def facts(self) -> dict[str, Any]:
        """The options that decide about the rows, for the key of the cache."""
        names = ("columns", "skip_empty", "train_on", "on_long", "packing", "max_seq_length", "val_fraction")
        return {name: getattr(self, name) for name in names}


@dataclass
class Counts:
    """What became of the samples; all numbers count samples but those that say otherwise.

    Args:
        samples: Rows that were read.
        conversations: Those of them that are conversations.
        truncated: Cut to the length of a row.
        split: Cut into several pieces.
        too_long: Dropped for their length.
        untrained: Dropped, because nothing of what fits into a row is to be learned.
        empty: Dropped for their empty answer.
        pieces_left_out: Pieces of split samples in which nothing is to be learned.
        trained_tokens: Tokens to be predicted, in what is kept.
        longest: (tokens, number of the source, number of the row), the longest first.
    """

    samples: int = 0
    conversations: int = 0
    truncated: int = 0
    split: int = 0
    too_long: int = 0
    untrained: int = 0
    empty: int = 0
    pieces_left_out: int = 0
    trained_tokens: int = 0
    longest: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return self.too_long + self.untrained + self.empty

    def measure(self, tokens: int, source: int, number: int) -> None:
        """Remember a sample if it is among the longest; of equal ones the first."""
        heapq.heappush(self.longest, (tokens, -source, -number))
        if len(self.longest) > LONGEST:
            heapq.heappop(self.longest)

    def facts(self) -> dict[str, Any]:
        longest = [(tokens, -source, -number) for tokens, source, number in sorted(self.longest, reverse=True)]
        return asdict(self) | {"dropped": self.dropped, "longest": longest}


class SampleWriter:
    """Appends samples to two files: the tokens, and for each a byte whether it is to be predicted."""

    def __init__(self, tokens: Path, trained: Path, dtype: np.dtype) -> None:
        self._files = open(tokens, "wb"), open(trained, "wb")  # noqa: SIM115  (closed by finish)
        self._held: tuple[list[int], list[bool]] = [], []
        self._types = dtype, np.dtype(np.bool_)
        self.offsets, self.sources, self.numbers = array("q", [0]), array("q"), array("q")

    def add(self, ids: list[int], trained: list[bool], source: int, number: int) -> None:
        self._held[0].extend(ids)
        self._held[1].extend(trained)
        self.offsets.append(self.offsets[-1] + len(ids))
        self.sources.append(source)
        self.numbers.append(number)
        if len(self._held[0]) >= _BATCH:
            self._write()

    def finish(self) -> dict[str, np.ndarray]:
        """Close the files; return where the samples begin (and the last ends), and which rows they come from."""
        self._write()
        for file in self._files:
            file.close()
        return {name: np.asarray(getattr(self, name), np.int64) for name in ("offsets", "sources", "numbers")}

    def _write(self) -> None:
        for held, file, dtype in zip(self._held, self._files, self._types, strict=True):
            np.array(held, dtype).tofile(file)
            held.clear()


def encode_samples(
    job: Job, tokens: Path, trained: Path, dtype: np.dtype, report: Callable[[str], None]
) -> tuple[Counts, dict[str, np.ndarray]]:
    """Encode all rows of a job to two files.

    Returns:
        The counts, and int64 arrays: ``offsets`` (n + 1,) of the samples in the files, and for each sample ``sources``
        (n,), its place in ``job.sources``, and ``numbers`` (n,), its row there. Pieces of one sample follow each other.

    Raises:
        UserError: naming the row, if it is unusable or longer than ``on_long`` "error" allows.
    """
    writer, counts, last_line = SampleWriter(tokens, trained, dtype), Counts(), time.perf_counter()
    for position, source in enumerate(job.sources):
        for number, row in source.rows():
            counts.samples += 1
            for ids, mask in _sample(job, row, position, number, counts):
                writer.add(ids, mask, position, number)
            if time.perf_counter() - last_line > HEARTBEAT:
                report(f"Data: encoded {counts.samples:,} samples")
                last_line = time.perf_counter()
    return counts, writer.finish()


def _sample(job: Job, row: Any, source: int, number: int, counts: Counts) -> list[tuple[list[int], list[bool]]]:
    """The pieces of a row that are kept: one as a rule, none if the row is dropped."""
    where = place(job.sources[source], number)
    try:
        record = to_record(row, where, job.columns)
    except EmptyAnswer:
        if not job.skip_empty:
            raise
        counts.empty += 1
        return []
    counts.conversations += record.messages is not None
    encoded = encode_record(record, job)
    counts.measure(len(encoded.ids), source, number)
    limit = job.max_seq_length + 1
    is_long = len(encoded.ids) > limit
    if is_long and job.on_long == "error":
        raise UserError(
            f"{where}: {len(encoded.ids):,} tokens, but a row has room for {limit:,} (--train.max_seq_length + 1); "
            "raise that, or choose --data.on_long truncate, drop or split"
        )
    if is_long and job.on_long == "drop":
        counts.too_long += 1
        return []
    pieces = list(_pieces(encoded, limit, split=job.on_long == "split"))
    kept = [(ids, trained) for ids, trained in pieces if any(trained[1:])]
    counts.trained_tokens += sum(sum(trained[1:]) for _, trained in kept)
    if not kept:
        counts.untrained += 1
    elif is_long:
        counts.truncated += job.on_long == "truncate"
        counts.split += job.on_long == "split"
        counts.pieces_left_out += len(pieces) - len(kept)
    return kept


def encode_record(record: Record, job: Job) -> Encoded:
    """The tokens of a record.

    Raises:
        UserError: naming the row, if the template refuses it; without a template, that there is none.
    """
    if record.messages is None:
        return encode_text(job.tokenizer, record.text or "")
    if job.template is None:
        raise job.no_template or UserError("--data.prompt_style: conversations need a chat template")
    try:
        return job.template.encode(record.messages, job.train_on, record.tools)
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from error


def _pieces(encoded: Encoded, limit: int, split: bool) -> Iterator[tuple[list[int], list[bool]]]:
    """Cut a sample to ``limit`` tokens, one more than the inputs of a row.

    The last token of a piece is the first of the next: there it is an input, here the label of the one before it. So
    every token is predicted once.
    """
    ids, trained = encoded.ids, encoded.trained
    last = len(ids) - 1 if split else 1
    for start in range(0, max(last, 1), limit - 1):
        yield ids[start : start + limit], trained[start : start + limit]
