"""Parse rows of instruction data into records (conversations or plain text). Columns determine the schema."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from toolkit.data.base import Values
from toolkit.data.sft.messages import (
    EmptyAnswerError,
    Messages,
    describe_columns,
    describe_type,
    parse_conversation,
    parse_functions,
    parse_messages,
    require_string,
    require_unicode,
)
from toolkit.errors import UserError, did_you_mean

# Column names by meaning. The first schema whose columns are present is used.
CONVERSATION = ("messages", "conversations")
QUESTION = ("instruction", "prompt")
INPUT = ("input", "context")
ANSWER = ("output", "completion", "response", "answer")
PAIR = ("chosen", "rejected")
LABEL = ("label",)
OTHERS = (("text",), ("system",), ("tools",), ("history",), ("margin",))
GROUPS = (CONVERSATION, QUESTION, INPUT, ANSWER, *OTHERS, PAIR[:1], PAIR[1:], LABEL)
_MEDIA = ("image", "images", "videos", "audios")
_REFUSED = dict.fromkeys(_MEDIA, "only text is supported; remove the column, or such rows")
_REFUSED["functions"] = """provide tools, with --data.columns '{"tools": "functions"}'"""
Columns = dict[str, str] | None  # --data.columns: column in the row by known name
KNOWN_COLUMNS = tuple(name for group in GROUPS for name in group)
_MAPPING = """names for them, such as --data.columns '{"prompt": "question", "completion": "answer"}'"""
_NO_PROMPT = "{}: has no prompt, and chosen and rejected begin differently; add a prompt"
_SCHEMAS = "messages, conversations, instruction with output, prompt with completion, or text"


@dataclass(frozen=True, slots=True)
class Record:
    """A sample before tokenization. Exactly one of ``messages`` and ``text`` is set.

    Args:
        messages: Messages with role and content. A user message built from an instruction also has "instruction" and
            "input", for templates that distinguish them.
        text: Plain text.
        where: File and line or row, for error messages.
        tools: Tools available to the assistant, for the template; None without a tools column.
        is_good: In preferences, whether to prefer the completion. Answers of its prompt have weight 0.
        prompt_length: Characters of ``text`` that are the prompt; -1 if there is none.
        has_eos: Whether the tokens of ``text`` end with eos.
        label: The label of a classification as the file has it; of a completion to score, the margin of its pair.
    """

    messages: Messages | None
    text: str | None
    where: str
    tools: list[Values] | None = None
    is_good: bool = True
    prompt_length: int = -1
    has_eos: bool = True
    label: Any = None


class EqualAnswersError(EmptyAnswerError):
    """Raised when the chosen and the rejected answer are equal."""


def require_columns(columns: Columns) -> None:
    """Raise UserError unless every key in ``--data.columns`` is a known column."""
    for name in columns or {}:
        if name not in KNOWN_COLUMNS:
            near = did_you_mean(name, KNOWN_COLUMNS) or f"; known columns: {', '.join(KNOWN_COLUMNS)}"
            raise UserError(f"--data.columns {name}: unknown column{near}")


def to_record(row: Any, where: str, columns: Columns = None) -> Record:
    """Parse a row into a record.

    Args:
        row: A dict with the columns of one schema. None values count as missing columns.
        where: File and line or row, for error messages.
        columns: Maps known column names to names in the row.
    """
    values = _read_values(row, where, columns, _SCHEMAS)
    if {*PAIR} <= row.keys() and not columns:
        raise UserError(
            f"{where}: is a pair of answers to prefer and to avoid ({describe_columns(row)}); use --objective DPO. "
            "--data.columns '{completion: chosen}' trains on the chosen answers alone, as examples"
        )
    for name in {*PAIR, *LABEL} & (columns or {}).keys():
        raise UserError(f"--data.columns.{name}: has no effect without an objective for preferences, such as DPO")
    messages, _ = _parse_turns(values, where)
    if messages:
        return _make_record(messages, values, where)
    if values.get("text") is None:
        raise UserError(f"{where}: has no known column; {describe_columns(row)}; needs {_SCHEMAS}, or {_MAPPING}")
    return Record(None, _require_answer(values, "text", where), where)


def to_completions(row: Any, where: str, columns: Columns, rated: bool) -> list[Record]:
    """Parse a row of preferences: the chosen and the rejected completion of a prompt.

    With ``rated``, rows may also have a prompt, one completion and a ``label``: true for a good one.

    Prompt and completions are strings or lists of messages. Without a prompt, it is what the completions have in
    common: messages, or text up to the last word.

    Raises:
        EmptyAnswerError: An answer is empty.
        EqualAnswersError: Both are equal.
    """
    schemas = f"prompt, chosen and rejected{', or prompt, completion and label' * rated}"
    values = _read_values(row, where, columns, schemas)
    if all(values.get(name) is None for name in PAIR) and rated and values.get("label") is not None:
        return [_parse_rated(values, where)]
    for name in PAIR:
        if name not in values:
            raise UserError(f"{where}: has no {name} answer; {describe_columns(row)}; needs {schemas}")
    answers = [_parse_answer(values, name, where) for name in PAIR]
    if answers[0] == answers[1]:
        raise EqualAnswersError(f"{where}: chosen and rejected are equal; fix or remove this row")
    question = _find_column(values, QUESTION, where)
    if question is None and all(isinstance(values[name], str) for name in PAIR):
        return _split_texts([values[name] for name in PAIR], where)
    # with complete conversations, the prompt repeats their first message
    if question is None or (isinstance(values[question], str) and answers[0][0]["role"] != "assistant"):
        n = min(_count_common(answers), *(len(answer) - 1 for answer in answers))
        if not n:
            raise UserError(_NO_PROMPT.format(where))
        prompt, answers = answers[0][:n], [answer[n:] for answer in answers]
    else:
        prompt = _parse_prompt(values, question, where)
    return [_complete(prompt, answer, values, where, not i) for i, answer in enumerate(answers)]


def read_margin(row: Values, where: str, columns: Columns) -> float:
    """Return how much better the chosen completion of a pair is, for a reward model; 0 without the column."""
    value = row.get((columns or {}).get("margin", "margin"), 0)
    if (margin := as_number(value)) is None:
        raise UserError(f"{where}: margin {value!r:.40}: must be a number")
    return margin


def as_number(value: Any) -> float | None:
    """Return a finite number, also from text, or None."""
    with suppress(ValueError, TypeError):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    return None


def unread_columns(row: Values, columns: Columns, parse: Callable[[Any], Any]) -> set[str]:
    """Return the columns that have a value and are not read: without them, ``parse`` returns the same."""

    def is_read(column: str) -> bool:
        try:
            return parse({name: value for name, value in row.items() if name != column}) != parse(row)
        except UserError:
            return True

    present = {name for name, value in row.items() if value not in (None, "", [])}
    known = present & {*KNOWN_COLUMNS, *(columns or {}).values()}
    return present - {column for column in known if is_read(column)}


def _read_values(row: Any, where: str, columns: Columns, schemas: str) -> Values:
    """Return the row's values by known column name. A mapped column replaces its synonyms."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: is {describe_type(row)}, not an object; every row needs {schemas}")
    columns = columns or {}
    for name, hint in _REFUSED.items():
        if row.get(name) and name not in columns.values():
            raise UserError(f"{where}: {name}: {hint}")
    values = {name: row[name] for name in KNOWN_COLUMNS if name in row}
    for name, column in columns.items():
        if column not in row:
            raise UserError(f"{where}: has no column {column} (--data.columns); {describe_columns(row)}")
        (synonyms,) = (group for group in GROUPS if name in group)
        values = {name: value for name, value in values.items() if name not in synonyms}
    values |= {name: row[column] for name, column in columns.items()}
    for name, value in values.items():
        require_unicode(value, f"{where}: {name}")
    return values


def _make_record(messages: Messages, values: Values, where: str, is_good: bool = True) -> Record:
    """Return a record with the row's system message and tools."""
    if values.get("system"):
        system = require_string(values["system"], f"{where}: system")
        if messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        elif messages[0]["content"].strip() != system.strip():
            raise UserError(f"{where}: has a system column and a different system message; remove one of them")
    tools = parse_functions(values["tools"], f"{where}: tools") if values.get("tools") else None
    return Record(messages, None, where, tools, is_good)


def _parse_turns(values: Values, where: str) -> tuple[Messages, int]:
    """Return the messages of a conversation, or of a question and its answer, and how many are the prompt."""
    if column := _find_column(values, CONVERSATION, where):
        messages = parse_conversation(values[column], f"{where}: {column}")
        return messages, len(messages) - 1
    if (question := _find_column(values, QUESTION, where)) is None:
        return (), 0
    answer = _find_column(values, ANSWER, where) or next((name for name in ANSWER if name in values), None)
    if answer is None:
        expected = "completion" if question == "prompt" else "output"
        raise UserError(
            f"{where}: has no {expected} for the {question}; {describe_columns(values)}; see --data.columns"
        )
    answers, prompt = _parse_answer(values, answer, where), _parse_prompt(values, question, where)
    return prompt + answers, len(prompt)


def _parse_rated(values: Values, where: str) -> Record:
    label = values["label"]
    label = {"true": True, "false": False, "1": True, "0": False}.get(str(label).lower().removesuffix(".0"))
    if label is None:
        raise UserError(f"{where}: label {values['label']!r:.40}: must be true (a good completion) or false")
    messages, n = _parse_turns(values, where)
    if not messages:
        raise UserError(f"{where}: has no prompt for the completion; {describe_columns(values)}; see --data.columns")
    return _complete(messages[:n], messages[n:], values, where, label)


def _split_texts(texts: list[str], where: str) -> list[Record]:
    n = _count_common(texts)
    while n and not texts[0][n - 1].isspace():
        n -= 1
    if not texts[0][:n].strip():
        raise UserError(_NO_PROMPT.format(where))
    return [Record(None, text, where, None, not i, n) for i, text in enumerate(texts)]


def _count_common(answers: Sequence[Sequence[Any]]) -> int:
    """Return the number of messages or characters with which both answers begin."""
    pairs = enumerate(zip(*answers, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(map(len, answers)))


def _require_answer(values: Values, name: str, where: str) -> str:
    """Return the text of a column. Raise EmptyAnswerError if it is empty."""
    if values[name] in (None, []) or not require_string(values[name], f"{where}: {name}").strip():
        raise EmptyAnswerError(f"{where}: has an empty answer ({name}); fix or remove this row")
    return str(values[name])


def _parse_answer(values: Values, name: str, where: str) -> Messages:
    """Parse an answer: a string, a message or a list of messages."""
    value = [values[name]] if isinstance(values[name], dict) else values[name]
    if isinstance(value, list) and value:
        return parse_messages(value, f"{where}: {name}")
    return ({"role": "assistant", "content": _require_answer(values, name, where)},)


def _parse_prompt(values: Values, question: str, where: str) -> Messages:
    """Parse a prompt, a string or a list of messages, after the earlier turns. An input is added to a string."""
    earlier = parse_conversation(values["history"], f"{where}: history") if values.get("history") else ()
    if isinstance(values[question], list):
        return (*earlier, *parse_messages(values[question], f"{where}: {question}"))
    name = _find_column(values, INPUT, where)
    instruction = require_string(values[question], f"{where}: {question}")
    extra = "" if name is None else require_string(values[name], f"{where}: {name}")
    content = f"{instruction}\n\n{extra}" if extra else instruction
    if not content.strip():
        raise UserError(f"{where}: has an empty {question}; fix or remove this row")
    parts = {"instruction": instruction, "input": extra} if extra or question == "instruction" else {}
    return (*earlier, {"role": "user", "content": content, **parts})


def _complete(prompt: Any, answer: Any, values: Values, where: str, is_good: bool) -> Record:
    if not prompt:
        raise UserError(f"{where}: has an empty prompt; fix or remove this row")
    if answer[-1]["role"] != "assistant":
        raise UserError(f"{where}: the completion ends with a message of the {answer[-1]['role']}, not the assistant")
    masked = tuple({**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt)
    return _make_record((*masked, *answer), values, where, is_good)


def _find_column(values: Values, group: tuple[str, ...], where: str) -> str | None:
    names = [name for name in group if values.get(name) is not None]
    if len(names) > 1:
        raise UserError(
            f"{where}: has both {names[0]} and {names[1]}; choose one, such as --data.columns.{names[0]} {names[0]}"
        )
    return names[0] if names else None
