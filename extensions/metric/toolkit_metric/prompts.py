"""Prompts for metrics: rows of instruction data, cut before their last answer as in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from toolkit.data.base import Report, Values
from toolkit.data.chat.template import ChatTemplate, Encoding
from toolkit.data.sft.datasets import InstructionData
from toolkit.data.sft.messages import Message
from toolkit.data.sft.prepare_sft import PackedDataset
from toolkit.data.sft.readers import KINDS, describe_row, find_splits
from toolkit.data.sft.schemas import Columns, Record, parse_row
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, join_first, notice
from toolkit.inference.text import TextStream, stop_tokens


class Prompt(NamedTuple):
    """The last question of a row.

    Args:
        where: File and row.
        row: The row as it is in the data.
        record: The messages before the answer, and the tools.
        reference: The answer in the data; None without one.
        ids: Token ids that the answer follows.
        answer: Token ids of the reference, with the end of the turn; empty without one.
        choices: For each of the row's ``choices``, the prompt with the choice, whose tokens have loss, without the end
            of the turn.
    """

    where: str
    row: Values
    record: Record
    reference: str | None
    ids: list[int]
    answer: list[int]
    choices: list[Encoding]


def prompt_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a run's tokenizer, or for a base model, plain text that eos ends."""
    try:
        return ChatTemplate.from_tokenizer(tokenizer, None)
    except UserError:
        return ChatTemplate.from_tokenizer(tokenizer, "plain")


def end_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end an answer."""
    return list(dict.fromkeys([*prompt_template(tokenizer).stop_ids, *stop_tokens(tokenizer)]))


def decode_answer(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """Return the text of an answer after its prompt."""
    return "".join(TextStream(tokenizer, prompt).read(answer))


def read_prompts(
    data: Any,
    val: Any,
    path: str | None,
    template: ChatTemplate,
    max_rows: int | None,
    with_choices: bool,
    report: Report = notice,
) -> list[Prompt]:
    """Return prompts of a file, or of held-out rows, at most ``max_rows``, evenly spaced.

    Args:
        data: The data module of the run.
        val: Its held-out rows.
        path: The file of ``--eval.metric_data``; None for the held-out rows.
        with_choices: Whether the rows need ``choices``, one of which is the reference.
    """
    columns = getattr(data, "columns", None)
    rows = list(_file_rows(path) if path is not None else _held_out_rows(data, val))
    n = min(len(rows), max_rows or len(rows))
    selected = [rows[i * len(rows) // n] for i in range(n)]
    prompts = [make_prompt(row, where, columns, template, with_choices) for where, row in selected]
    if unread := sorted({name for prompt in prompts for name in prompt.record.unread}):
        report(f"note: --eval.metric: not read in prompts: {join_first(unread, 20)}")
    return prompts


def _file_rows(path: str) -> Iterator[tuple[str, Any]]:
    for source in find_splits(path, "--eval.metric_data", KINDS).train:
        yield from ((describe_row(source, number), row) for number, row in source.rows())


def _held_out_rows(data: Any, val: Any) -> Iterator[tuple[str, Any]]:
    if prompts := getattr(val, "prompts", None):
        yield from ((prompt.where, prompt.row) for prompt in prompts)
        return
    if not isinstance(val, PackedDataset):
        reason = "has no held-out rows with answers" if isinstance(data, InstructionData) else "is no instruction data"
        raise UserError(f"--eval.metric: --data {type(data).__name__} {reason}; give --eval.metric_data FILE")
    _, splits = data.find_rows()
    origins = val.origins
    for position, source in enumerate([*splits.train, *(splits.val or [])]):
        rows = source.rows() if any(position == of_origin for of_origin, _ in origins) else []
        yield from ((describe_row(source, number), row) for number, row in rows if (position, number) in origins)


def make_prompt(row: Any, where: str, columns: Columns, template: ChatTemplate, with_choices: bool = False) -> Prompt:
    """Return the last question of a row, see :func:`read_prompts`."""
    (record,) = parse_row(row, where, columns, "prompt")
    *messages, last = record.messages or ()
    reference = last["content"] if last["role"] == "assistant" else None
    record = replace(record, messages=(*messages, *([last] if reference is None else [])))
    ids, loss_mask = _encode(template, record, "answer" if reference is None else last)
    choices = []
    if with_choices:
        texts = record.label
        is_valid = isinstance(texts, list) and len(texts) > 1 and all(isinstance(text, str) for text in texts)
        if not is_valid or reference is None or reference.strip() not in map(str.strip, texts):
            raise UserError(f"{where}: needs choices, a list of texts, one of which is the row's answer")
        for text in texts:
            ended, mask = _encode(template, record, text)
            end = next((i for i in range(mask.index(True), len(ended)) if ended[i] in template.stop_ids), len(ended))
            choices.append(Encoding(ended[:end], mask[:end]))
    start = loss_mask.index(True)
    return Prompt(where, row, record, reference, ids[:start], [] if reference is None else ids[start:], choices)


def _encode(template: ChatTemplate, prompt: Record, answer: str | Message) -> Encoding:
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    try:
        return template.encode([*(prompt.messages or ()), message | {"weight": 1}], "last_answer", prompt.tools)
    except UserError as error:
        raise UserError(f"{prompt.where}: {error}") from error
