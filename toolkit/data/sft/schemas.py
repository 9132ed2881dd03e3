"""Parse rows of instruction data into records (conversations or plain text). Columns determine the schema."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

Values = dict[str, Any]  # of a row, by column
# Column names by meaning. The first schema whose columns are present is used.
CONVERSATION = ("messages", "conversations")
QUESTION = ("instruction", "prompt")
INPUT = ("input", "context")
ANSWER = ("output", "completion", "response", "answer")
PAIR = ("chosen", "rejected")
LABEL = ("label",)
OTHERS = (("text",), ("system",), ("tools",), ("history",))
GROUPS = (CONVERSATION, QUESTION, INPUT, ANSWER, *OTHERS, PAIR[:1], PAIR[1:], LABEL)
_MEDIA = ("image", "images", "videos", "audios")
_REFUSED = dict.fromkeys(_MEDIA, "only text is supported; remove the column, or such rows")
_REFUSED["functions"] = """provide tools, with --data.columns '{"tools": "functions"}'"""
KNOWN_COLUMNS = tuple(name for group in GROUPS for name in group)
_MAPPING = """names for them, such as --data.columns '{"prompt": "question", "completion": "answer"}'"""
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
    """

    messages: Messages | None
    text: str | None
    where: str
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt with a completion to prefer or to avoid.

    Args:
        record: Messages, in which the answers of the prompt have weight 0; or text.
        is_good: Whether to prefer the completion.
        prompt_length: Characters of the text that are the prompt.
    """

    record: Record
    is_good: bool
    prompt_length: int = 0


class EqualAnswersError(EmptyAnswerError):
    """Raised when the chosen and the rejected answer are equal."""


def require_columns(columns: dict[str, str] | None) -> None:
    """Raise UserError unless every key in ``--data.columns`` is a known column."""
    for name in columns or {}:
        if name not in KNOWN_COLUMNS:
            near = did_you_mean(name, KNOWN_COLUMNS) or f"; known columns: {', '.join(KNOWN_COLUMNS)}"
            raise UserError(f"--data.columns {name}: unknown column{near}")


def to_record(row: Any, where: str, columns: dict[str, str] | None = None) -> Record:
    """Parse a row into a record.

    Args:
        row: A dict with the columns of one schema. None values count as missing columns.
        where: File and line or row, for error messages.
        columns: Maps known column names to names in the row.
    """
    values = _read_values(row, where, columns, _SCHEMAS)
    messages, text = None, None
    if {*PAIR} <= row.keys() and not columns:
        raise UserError(
            f"{where}: is a pair of answers to prefer and to avoid ({describe_columns(row)}); use --objective DPO. "
            "--data.columns '{completion: chosen}' trains on the chosen answers alone, as examples"
        )
    for name in {*PAIR, *LABEL} & (columns or {}).keys():
        raise UserError(f"--data.columns.{name}: has no effect without an objective for preferences, such as DPO")
    if column := _find_column(values, CONVERSATION, where):
        messages = parse_conversation(values[column], f"{where}: {column}")
    elif column := _find_column(values, QUESTION, where):
        messages = _build_turn(values, column, where)
    elif "text" in values and values["text"] is not None:
        text = require_string(values["text"], f"{where}: text")
        if not text.strip():
            raise EmptyAnswerError(f"{where}: text is empty; fix or remove this row")
    else:
        raise UserError(f"{where}: has no known column; {describe_columns(row)}; needs {_SCHEMAS}, or {_MAPPING}")
    return _make_record(messages, text, values, where)


def to_completions(row: Any, where: str, columns: dict[str, str] | None, rated: bool) -> list[Completion]:
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
        if not values[name] or (isinstance(values[name], str) and not values[name].strip()):
            raise EmptyAnswerError(f"{where}: has an empty answer ({name}); fix or remove this row")
    both = [[value] if isinstance(value, dict) else value for value in (values[name] for name in PAIR)]
    if both[0] == both[1]:
        raise EqualAnswersError(f"{where}: chosen and rejected are equal; fix or remove this row")
    question = _find_column(values, QUESTION, where)
    texts = [value for value in both if isinstance(value, str)]
    if question is None and len(texts) == len(both):
        return _split_texts(texts, values, where)
    answers = [_parse_answer(value, f"{where}: {name}") for name, value in zip(PAIR, both, strict=True)]
    # with complete conversations, the prompt repeats their first message
    if question is None or (isinstance(values[question], str) and answers[0][0]["role"] != "assistant"):
        prompt, answers = _common_messages(answers, where)
    else:
        prompt = _parse_prompt(values, question, where)
    return [_complete(prompt, answer, values, where, not i) for i, answer in enumerate(answers)]


def unread_columns(row: Values, columns: dict[str, str] | None, parse: Callable[[Any], Any]) -> set[str]:
    """Return the columns that have a value and are not read: without them, ``parse`` returns the same."""

    def is_read(column: str) -> bool:
        try:
            return parse({name: value for name, value in row.items() if name != column}) != parse(row)
        except UserError:
            return True

    present = {name for name, value in row.items() if value not in (None, "", [])}
    known = present & {*KNOWN_COLUMNS, *(columns or {}).values()}
    return present - {column for column in known if is_read(column)}


def _read_values(row: Any, where: str, columns: dict[str, str] | None, schemas: str) -> Values:
    if not isinstance(row, dict):
        raise UserError(f"{where}: is {describe_type(row)}, not an object; every row needs {schemas}")
    for name, hint in _REFUSED.items():
        if row.get(name) and name not in (columns or {}).values():
            raise UserError(f"{where}: {name}: {hint}")
    values = _map_columns(row, where, columns or {})
    for name, value in values.items():
        require_unicode(value, f"{where}: {name}")
    return values


def _make_record(messages: Messages | None, text: str | None, values: Values, where: str) -> Record:
    """Return a record with the row's system message and tools."""
    if messages and values.get("system"):
        messages = _add_system_message(messages, require_string(values["system"], f"{where}: system"), where)
    tools = parse_functions(values["tools"], f"{where}: tools") if values.get("tools") else None
    if tools and messages is None:
        raise UserError(f"{where}: tools: require a conversation, but this row is plain text; remove either")
    return Record(messages, text, where, tools)


def _parse_rated(values: Values, where: str) -> Completion:
    label = values["label"]
    label = {"true": True, "false": False, "1": True, "0": False}.get(str(label).lower().removesuffix(".0"))
    if label is None:
        raise UserError(f"{where}: label {values['label']!r:.40}: must be true (a good completion) or false")
    if column := _find_column(values, CONVERSATION, where):
        messages = parse_conversation(values[column], f"{where}: {column}")
        return _complete(messages[:-1], messages[-1:], values, where, label)
    if (question := _find_column(values, QUESTION, where)) is None:
        raise UserError(f"{where}: has no prompt for the completion; {describe_columns(values)}; see --data.columns")
    messages = _build_turn(values, question, where)
    n_prompt = len(_parse_prompt(values, question, where))
    return _complete(messages[:n_prompt], messages[n_prompt:], values, where, label)


def _split_texts(texts: list[str], values: Values, where: str) -> list[Completion]:
    n = len(os.path.commonprefix(texts))
    while n and not texts[0][n - 1].isspace():
        n -= 1
    if not texts[0][:n].strip():
        raise UserError(f"{where}: has no prompt, and chosen and rejected begin with different texts; add a prompt")
    records = [_make_record(None, text, values, where) for text in texts]
    return [Completion(record, not i, n) for i, record in enumerate(records)]


def _parse_answer(value: Any, where: str) -> Messages:
    return ({"role": "assistant", "content": value},) if isinstance(value, str) else parse_messages(value, where)


def _parse_prompt(values: Values, question: str, where: str) -> Messages:
    parse = _parse_prompt_messages if isinstance(values[question], list) else _build_user_message
    earlier = parse_conversation(values["history"], f"{where}: history") if values.get("history") else ()
    return (*earlier, *parse(values, question, where))


def _common_messages(answers: list[Any], where: str) -> tuple[Any, list[Any]]:
    """Return the messages with which both conversations begin, and the rest of each."""
    n = next((i for i, (one, other) in enumerate(zip(*answers, strict=False)) if one != other), min(map(len, answers)))
    n = min(n, *(len(answer) - 1 for answer in answers))
    if not n:
        raise UserError(f"{where}: has no prompt, and chosen and rejected begin with different messages; add a prompt")
    return answers[0][:n], [answer[n:] for answer in answers]


def _complete(prompt: Any, answer: Any, values: Values, where: str, is_good: bool) -> Completion:
    if not prompt:
        raise UserError(f"{where}: has an empty prompt; fix or remove this row")
    if answer[-1]["role"] != "assistant":
        raise UserError(f"{where}: the completion ends with a message of the {answer[-1]['role']}, not the assistant")
    masked = tuple({**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt)
    return Completion(_make_record((*masked, *answer), None, values, where), is_good)


def _add_system_message(messages: Messages, system: str, where: str) -> Messages:
    if messages[0]["role"] != "system":
        return ({"role": "system", "content": system}, *messages)
    if messages[0]["content"].strip() != system.strip():
        raise UserError(f"{where}: has a system column and a different system message; remove one of them")
    return messages


def _map_columns(row: Values, where: str, columns: dict[str, str]) -> Values:
    """Return the row's values by known column name. A mapped column replaces its synonyms."""
    values = {name: row[name] for name in KNOWN_COLUMNS if name in row}
    for name, column in columns.items():
        if column not in row:
            raise UserError(f"{where}: has no column {column} (--data.columns); {describe_columns(row)}")
        (synonyms,) = (group for group in GROUPS if name in group)
        values = {name: value for name, value in values.items() if name not in synonyms}
    return values | {name: row[column] for name, column in columns.items()}


def _find_column(values: Values, group: tuple[str, ...], where: str) -> str | None:
    names = [name for name in group if values.get(name) is not None]
    if len(names) > 1:
        raise UserError(
            f"{where}: has both {names[0]} and {names[1]}; choose one, such as --data.columns.{names[0]} {names[0]}"
        )
    return names[0] if names else None


def _build_turn(values: Values, question: str, where: str) -> Messages:
    """Build a user and an assistant message. The question and the answer may also be lists of messages."""
    answer = _find_column(values, ANSWER, where)
    if answer is None:
        if null := [name for name in ANSWER if name in values]:
            raise EmptyAnswerError(f"{where}: has an empty answer ({null[0]}); fix or remove this row")
        expected = "completion" if question == "prompt" else "output"
        raise UserError(
            f"{where}: has no {expected} for the {question}; {describe_columns(values)}; see --data.columns"
        )
    completion, prompt_messages = values[answer], _parse_prompt(values, question, where)
    if isinstance(completion, list):
        return prompt_messages + parse_messages(completion, f"{where}: {answer}")
    if not require_string(completion, f"{where}: {answer}").strip():
        raise EmptyAnswerError(f"{where}: has an empty answer ({answer}); fix or remove this row")
    return (*prompt_messages, {"role": "assistant", "content": completion})


def _parse_prompt_messages(values: Values, question: str, where: str) -> Messages:
    name = _find_column(values, INPUT, where)
    if name is not None and values[name] != "":
        raise UserError(f"{where}: has both {name} and a {question} of messages; move it into a message or remove it")
    return parse_messages(values[question], f"{where}: {question}")


def _build_user_message(values: Values, question: str, where: str) -> Messages:
    name = _find_column(values, INPUT, where)
    instruction = require_string(values[question], f"{where}: {question}")
    extra = "" if name is None else require_string(values[name], f"{where}: {name}")
    content = f"{instruction}\n\n{extra}" if extra else instruction
    if not content.strip():
        raise UserError(f"{where}: has an empty {question}; fix or remove this row")
    message = {"role": "user", "content": content}
    parts = {"instruction": instruction, "input": extra} if extra or question == "instruction" else {}
    return ({**message, **parts},)
