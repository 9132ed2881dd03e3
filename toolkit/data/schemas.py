"""Rows of instruction data to records: conversations or plain text, told apart by their columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import UserError, did_you_mean

# Columns by what they mean. A row is read by the first of the forms whose columns it has.
CONVERSATION = ("messages", "conversations")
QUESTION = ("instruction", "prompt")
INPUT = ("input", "context")
ANSWER = ("output", "completion", "response", "answer")
TEXT = ("text",)
SYSTEM = ("system",)
TOOLS = ("tools",)
GROUPS = (CONVERSATION, QUESTION, INPUT, ANSWER, TEXT, SYSTEM, TOOLS)
KNOWN = tuple(name for group in GROUPS for name in group)
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_FORMS = "messages, conversations, instruction with output, prompt with completion, or text"


@dataclass(frozen=True, slots=True)
class Record:
    """A sample before it becomes tokens; exactly one of ``messages`` and ``text`` is given.

    Args:
        messages: Messages with role and content, in the order of the conversation. One that was made from an
            instruction also carries "instruction" and "input", for templates that tell them apart.
        text: Plain text.
        where: The file and the line or row, for people.
        tools: The tools that the assistant may call, for the template; None where the row has no such column.
    """

    messages: tuple[dict[str, Any], ...] | None
    text: str | None
    where: str
    tools: list[dict[str, Any]] | None = None


class EmptyAnswer(UserError):
    """A row whose answer holds nothing that could be learned."""


def require_columns(columns: dict[str, str] | None) -> None:
    """Raise UserError unless every key of ``--data.columns`` is a column that has a meaning."""
    for name in columns or {}:
        if name not in KNOWN:
            near = did_you_mean(name, KNOWN) or f"; known are {', '.join(KNOWN)}"
            raise UserError(f"--data.columns {name}: no such column{near}")


def to_record(row: Any, where: str, columns: dict[str, str] | None = None) -> Record:
    """Read one row.

    Args:
        row: An object with one of the known sets of columns; null means that a column is not there.
        where: Its place, for messages.
        columns: Columns of other names: known name -> name in the row.

    Raises:
        EmptyAnswer: the answer is empty.
        UserError: the row is not an object, or a column is missing or not what it should be.
    """
    if not isinstance(row, dict):
        raise UserError(f"{where}: is {_kind(row)}, not an object; every row needs {_FORMS}")
    values = _renamed(row, where, columns or {})
    for name, value in values.items():
        _require_unicode(value, f"{where}: {name}")
    messages, text = None, None
    if name := _column(values, CONVERSATION, where):
        messages = _conversation(values[name], f"{where}: {name}")
    elif name := _column(values, QUESTION, where):
        messages = _question_and_answer(values, name, where)
    elif "text" in values and values["text"] is not None:
        text = _text(values["text"], f"{where}: text")
        if not text.strip():
            raise EmptyAnswer(f"{where}: has an empty text; give it one or take the row out")
    else:
        raise UserError(f"{where}: has no column that is known; {_has(row)}; needs {_FORMS}, or --data.columns")
    if messages and values.get("system"):
        messages = _with_system(messages, _text(values["system"], f"{where}: system"), where)
    tools = _tools(values.get("tools"), f"{where}: tools")
    if tools and messages is None:
        raise UserError(f"{where}: tools: belong to a conversation, and this row is plain text; remove one of the two")
    return Record(messages, text, where, tools)


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """A list of objects; JSON text is read, for CSV files and for tables whose rows have tools of unlike shapes."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _parse(value, where, "a list of tools")
    if not isinstance(value, list):
        raise UserError(f"{where}: is {_kind(value)}; it must be a list of objects")
    for i, tool in enumerate(value, 1):
        if not isinstance(tool, dict):
            raise UserError(f"{where}: tool {i} is {_kind(tool)}; it must be an object")
    return value


def answer_weights(messages: Sequence[dict[str, Any]], train_on: str) -> list[int]:
    """The weight of each answer: 0 masks it, 1 (and none) trains it. Elsewhere a weight may only confirm what holds.

    Raises:
        UserError: a weight is another one, or asks of another message what ``train_on`` does not do.
    """
    for number, message in enumerate(messages, 1):
        weight, role = message.get("weight"), message.get("role")
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            raise UserError(f"message {number}: weight {weight!r:.40}: must be 0 (masked) or 1 (trained)")
        if weight is not None and role != "assistant" and weight != (train_on == "all"):
            trained = "every message" if train_on == "all" else "answers only"
            hint = f"--data.train_on {train_on} trains {trained}; remove the weight"
            raise UserError(f"message {number} ({role}): weight {weight}: {hint}")
    weights = [message.get("weight") for message in messages if message.get("role") == "assistant"]
    return [1 if weight is None else int(weight) for weight in weights]


def _with_system(messages: tuple[dict[str, Any], ...], system: str, where: str) -> tuple[dict[str, Any], ...]:
    if messages[0]["role"] != "system":
        return ({"role": "system", "content": system}, *messages)
    if messages[0]["content"].strip() != system.strip():
        raise UserError(f"{where}: has a system column and another system message; take one of them out")
    return messages


def _renamed(row: dict[str, Any], where: str, columns: dict[str, str]) -> dict[str, Any]:
    """The known columns of a row by their known names; a mapped column stands for all that mean the same."""
    values = {name: row[name] for name in KNOWN if name in row}
    for known, own in columns.items():
        if own not in row:
            raise UserError(f"{where}: has no column {own} (--data.columns); {_has(row)}")
        values = {name: value for name, value in values.items() if not _mean_the_same(name, known)}
    return values | {known: row[own] for known, own in columns.items()}


def _mean_the_same(a: str, b: str) -> bool:
    return any(a in group and b in group for group in GROUPS)


def _column(values: dict[str, Any], group: tuple[str, ...], where: str) -> str | None:
    """The one column of a group that the row fills.

    Raises:
        UserError: it fills two.
    """
    found = [name for name in group if values.get(name) is not None]
    if len(found) > 1:
        raise UserError(
            f"{where}: has both {found[0]} and {found[1]}; choose one, such as --data.columns.{found[0]} {found[0]}"
        )
    return found[0] if found else None


def _question_and_answer(values: dict[str, Any], question: str, where: str) -> tuple[dict[str, Any], ...]:
    """A user's message and the assistant's; ``prompt`` and ``completion`` may also be lists of messages."""
    answer = _column(values, ANSWER, where)
    if answer is None:
        if null := [name for name in ANSWER if name in values]:
            raise EmptyAnswer(f"{where}: has an empty answer ({null[0]}); give it one or take the row out")
        usual = "completion" if question == "prompt" else "output"
        raise UserError(f"{where}: has no {usual} to the {question}; {_has(values)}; see --data.columns")
    asked, answered = values[question], values[answer]
    before = (_asked_before if isinstance(asked, list) else _asked)(values, question, where)
    if isinstance(answered, list):
        return before + _messages(answered, f"{where}: {answer}")
    if not _text(answered, f"{where}: {answer}").strip():
        raise EmptyAnswer(f"{where}: has an empty answer ({answer}); give it one or take the row out")
    return (*before, {"role": "assistant", "content": answered})


def _asked_before(values: dict[str, Any], question: str, where: str) -> tuple[dict[str, Any], ...]:
    """A ``prompt`` that is a list of messages."""
    name = _column(values, INPUT, where)
    if name is not None and values[name] != "":
        raise UserError(f"{where}: has {name} beside a {question} of messages; put it into one of them or take it out")
    return _messages(values[question], f"{where}: {question}")


def _asked(values: dict[str, Any], question: str, where: str) -> tuple[dict[str, Any], ...]:
    name = _column(values, INPUT, where)
    instruction = _text(values[question], f"{where}: {question}")
    extra = "" if name is None else _text(values[name], f"{where}: {name}")
    content = f"{instruction}\n\n{extra}" if extra else instruction
    if not content.strip():
        raise UserError(f"{where}: has an empty {question}; give it one or take the row out")
    message = {"role": "user", "content": content}
    parts = {"instruction": instruction, "input": extra} if extra or question == "instruction" else {}
    return ({**message, **parts},)


def _conversation(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """A list of messages, or of texts that take turns (as LIMA has it); JSON text is read, for CSV files."""
    if isinstance(value, str):
        value = _parse(value, where, "a list of messages")
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        value = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(value)]
    return _messages(value, where)


def _messages(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: is {_kind(value)}; it must be a list of messages with role and content")
    return tuple(_message(message, f"{where}: message {i}") for i, message in enumerate(value, 1))


def _message(message: Any, where: str) -> dict[str, Any]:
    """One message with role and content; what else it has (tool calls, a name) is kept for the template."""
    if not isinstance(message, dict):
        raise UserError(f"{where}: is {_kind(message)}, not an object with role and content")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.pop("role", None) or given.pop("from", None)
    if not isinstance(role, str):
        raise UserError(f"{where}: has no role; {_has(message)}")
    role = _ROLES.get(role, role)
    content = given.pop("content") if "content" in given else given.pop("value", None)
    if isinstance(content, list):
        content = _joined(content, where)
    if content is None and not given.get("tool_calls"):
        raise UserError(f"{where} ({role}): has no content; {_has(message)}")
    content = _text(content or "", f"{where} ({role}): content")
    if role == "assistant" and not content.strip() and not given.get("tool_calls"):
        raise EmptyAnswer(f"{where}: is an empty answer; give it a content or take the row out")
    return {"role": role, "content": content, **given}


def _parse(text: str, where: str, what: str) -> Any:
    """Read JSON text that stands in a cell."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: is a text, not {what}") from None
    _require_unicode(value, where)
    return value


def _joined(parts: list[Any], where: str) -> str:
    """The text of content that is given in parts, ``[{"type": "text", "text": ...}]``."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: has content that is not text; only text is trained on")
    return "".join(texts)


def _require_unicode(value: Any, where: str) -> None:
    """Raise UserError for half a character: JSON can hold one (as ``\\ud800``), a tokenizer takes none."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f"{where}: holds {half}, half a character; mend it or take the row out") from error
    except RecursionError as error:
        raise UserError(f"{where}: is nested too deeply") from error


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: is {_kind(value)}; it must be a text")
    return value


def _has(row: dict[str, Any]) -> str:
    return f"it has {', '.join(map(str, row)) or 'nothing'}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | dict) and not value:
        return "an empty list" if isinstance(value, list) else "an empty object"
    names = {list: "a list", dict: "an object", str: "a text", bool: "true or false", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else f"a {type(value).__name__}")
