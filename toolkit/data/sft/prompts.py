"""Prompts for metrics: rows of instruction data, cut before their last answer as in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from toolkit.data.base import Values
from toolkit.data.chat.template import ChatTemplate, Encoding
from toolkit.data.sft.datasets import InstructionData
from toolkit.data.sft.messages import Conversation, Message
from toolkit.data.sft.prepare import PackedDataset
from toolkit.data.sft.readers import KINDS, describe_row, find_splits
from toolkit.data.sft.schemas import ANSWER, CONVERSATION, PAIR, Columns, Record, to_completions, to_record
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError

# The answer of rows without one; the prompt ends before it.
_PLACEHOLDER: Message = {"role": "assistant", "content": "answer"}


class Prompt(NamedTuple):
    """The last question of a row.

    Args:
        where: File and row.
        row: The row of the data.
        record: The messages before the answer, and the tools.
        reference: The answer in the data; None without one.
        ids: Token ids that the answer follows.
        choices: For each of the row's ``choices``, the prompt with the choice, whose tokens have loss, without the end
            of the turn.
    """

    where: str
    row: Values
    record: Record
    reference: str | None
    ids: list[int]
    choices: list[Encoding]


def prompt_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a run's tokenizer, or for a base model, plain text that eos ends."""
    try:
        return ChatTemplate.from_tokenizer(tokenizer, None)
    except UserError:
        return ChatTemplate.from_tokenizer(tokenizer, "plain")


def read_prompts(
    data: Any, val: Any, path: str | None, template: ChatTemplate, max_rows: int | None, with_choices: bool
) -> list[Prompt]:
    """Return prompts of a file, or of held-out rows, at most ``max_rows``, evenly spaced.

    Args:
        data: The data module of the run.
        val: Its held-out rows.
        path: The file of ``--eval.metric_data``; None for the held-out rows.
        with_choices: Whether the rows need ``choices``, one of which is the reference.
    """
    columns = data.columns if isinstance(data, InstructionData) else None
    rows = list(_file_rows(path) if path is not None else _held_out_rows(data, val))
    n = min(len(rows), max_rows or len(rows))
    selected = [rows[i * len(rows) // n] for i in range(n)]
    return [_make_prompt(row, where, columns, template, with_choices) for where, row in selected]


def _file_rows(path: str) -> Iterator[tuple[str, Any]]:
    for source in find_splits(path, "--eval.metric_data", KINDS).train:
        yield from ((describe_row(source, number), row) for number, row in source.rows())


def _held_out_rows(data: Any, val: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(val, PackedDataset):
        reason = "has no held-out rows with answers" if isinstance(data, InstructionData) else "is no instruction data"
        raise UserError(f"--eval.metric: --data {type(data).__name__} {reason}; give --eval.metric_data FILE")
    _, splits = data.find_rows()
    origins = val.origins
    for position, source in enumerate([*splits.train, *(splits.val or [])]):
        rows = source.rows() if any(position == of_origin for of_origin, _ in origins) else []
        yield from ((describe_row(source, number), row) for number, row in rows if (position, number) in origins)


def _make_prompt(row: Any, where: str, columns: Columns, template: ChatTemplate, with_choices: bool) -> Prompt:
    record, has_answer = _read_record(row, where, columns)
    if record.messages is None:
        raise UserError(f"{where}: is plain text without a prompt; give --eval.metric_data FILE with prompts")
    *messages, last = record.messages
    if last["role"] != "assistant":
        messages, last, has_answer = [*record.messages], _PLACEHOLDER, False
    reference = last["content"] if has_answer else None
    ids, loss_mask = _encode(template, [*messages, {**last, "weight": 1}], record)
    choices = []
    if with_choices:
        texts = row.get("choices")
        is_valid = isinstance(texts, list) and len(texts) > 1 and all(isinstance(text, str) for text in texts)
        if not is_valid or reference is None or reference.strip() not in map(str.strip, texts):
            raise UserError(f"{where}: needs choices, a list of texts, one of which is the row's answer")
        for text in texts:
            ended, mask = _encode(template, [*messages, _PLACEHOLDER | {"content": text}], record)
            end = next((i for i in range(mask.index(True), len(ended)) if ended[i] in template.stop_ids), len(ended))
            choices.append(Encoding(ended[:end], mask[:end]))
    question = replace(record, messages=tuple(messages))
    return Prompt(where, row, question, reference, ids[: loss_mask.index(True)], choices)


def _read_record(row: Any, where: str, columns: Columns) -> tuple[Record, bool]:
    """Return a row, with a placeholder if it has only a question, and whether it has an answer."""
    if isinstance(row, dict) and {*PAIR} <= row.keys() and not columns:
        return to_completions(row, where, columns, rated=True)[0], True
    has_answer = not isinstance(row, dict) or bool({*CONVERSATION, *ANSWER, "text", *(columns or {}).values()} & {*row})
    return to_record(row if has_answer else row | {"completion": [_PLACEHOLDER]}, where, columns), has_answer


def _encode(template: ChatTemplate, messages: Conversation, record: Record) -> Encoding:
    try:
        return template.encode(messages, "last_answer", record.tools)
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from error
