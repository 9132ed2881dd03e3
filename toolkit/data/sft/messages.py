"""Parse the messages and tools of a row."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from toolkit.data.base import Values
from toolkit.errors import UserError, one_line

Message = Values
Messages = tuple[Message, ...]
Conversation = Sequence[Message]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. Only the assistant's are answers; templates may have others."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
# The loss weight, and other tools' names for it.
WEIGHTS = {"weight", "train", "training", "trainable", "loss_mask", "masked"}

_TYPES = {
    type(None): "null", list: "a list", dict: "an object", str: "a string", bool: "true or false", int: "a number",
    float: "a number",
}  # fmt: skip


class EmptyAnswerError(UserError):
    """Raised when a row has an empty answer."""


def parse_conversation(value: Any, where: str) -> Messages:
    """Parse a list of messages, a list of strings with alternating roles (LIMA), or either as JSON text (CSV).

    A list of pairs, a question and an answer each, is also valid.
    """
    if isinstance(value, str):
        value = _parse_json_cell(value, where, "a list of messages")
    if isinstance(value, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        value = [text for turn in value for text in turn]
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        value = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(value)]
    return parse_messages(value, where)


def parse_messages(value: Any, where: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: is {describe_type(value)}; it must be a list of messages with role and content")
    return tuple(_parse_message(message, f"{where}: message {i}") for i, message in enumerate(value, 1))


def _parse_message(message: Any, where: str) -> Message:
    """Parse a message with role and content. Other fields, such as tool calls, are kept for the template."""
    if not isinstance(message, dict):
        raise UserError(f"{where}: is {describe_type(message)}, not an object with role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.pop("role", None) or fields.pop("from", None)
    if not isinstance(role, str):
        raise UserError(f"{where}: has no role; {describe_columns(message)}")
    content = fields.pop("content") if "content" in fields else fields.pop("value", None)
    if role == "function_call":
        fields["function_call"], content = content, None
    role = _SHAREGPT_ROLES.get(role, role)
    if fields.get("tool_calls"):
        fields["tool_calls"] = parse_functions(fields["tool_calls"], f"{where} ({role}): tool_calls", "tool call")
    if fields.get("function_call"):  # ShareGPT's role, or OpenAI's older field
        calls = parse_functions(fields.pop("function_call"), f"{where}: function_call", "tool call")
        fields["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    _parse_weight(fields, where)
    if isinstance(content, list):
        content = _join_parts(content, where)
    if content is None and not fields.get("tool_calls"):
        present = {name: value for name, value in message.items() if value is not None}
        raise UserError(f"{where} ({role}): has no content; {describe_columns(present)}")
    content = require_string(content or "", f"{where} ({role}): content")
    if role == "assistant" and not content.strip() and not fields.get("tool_calls"):
        raise EmptyAnswerError(f"{where}: is an empty answer; fix or remove this row")
    return {"role": role, "content": content, **fields}


def _parse_weight(fields: Message, where: str) -> None:
    """Set the loss weight, 0 or 1, if the message has it under any name."""
    for name in sorted(fields.keys() & WEIGHTS):
        value = fields[name]
        weight = (value != 1) if name == "masked" else value
        if value not in (0, 1) or fields.setdefault("weight", int(weight)) != weight:
            hint = "must be 0 or false (masked), or 1 or true (trained), and agree with other names of the weight"
            raise UserError(f"{where}: {name} {value!r:.40}: {hint}")


def _parse_json_cell(text: str, where: str, what: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = f": {one_line(error)}" if text.strip()[:1] in ("{", "[") else ""
        raise UserError(f"{where}: is a string, not {what}{reason}") from None
    require_unicode(value, where)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> Values:
    """Return an object of JSON text. Raise ValueError for a duplicate key, of which the last would count."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"duplicate key {Counter(name for name, _ in pairs).most_common(1)[0][0]}; remove one")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _join_parts(parts: list[Any], where: str) -> str:
    """Join content parts in the format ``[{"type": "text", "text": ...}]``."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) < len(parts):
        raise UserError(f"{where}: has non-text content; only text is supported")
    return "".join(strings)


def require_unicode(value: Any, where: str) -> None:
    """Raise UserError for an unpaired surrogate, which is valid in JSON (``\\ud800``) but not in UTF-8."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f"{where}: contains an unpaired surrogate ({surrogate}); fix or remove this row") from error
    except RecursionError as error:
        raise UserError(f"{where}: is nested too deeply") from error


def require_string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: is {describe_type(value)}; it must be a string")
    return value


def describe_columns(row: Values) -> str:
    return f"it has {', '.join(map(str, row)) or 'nothing'}"


def describe_type(value: Any) -> str:
    return "an empty list" if value == [] else _TYPES.get(type(value), f"a {type(value).__name__}")


def parse_functions(value: Any, where: str, what: str = "tool") -> list[Values]:
    """Parse a list of tools or tool calls. It may be JSON text (CSV), and so may parameters and arguments (OpenAI)."""
    if isinstance(value, str):
        value = _parse_json_cell(value, where, f"a list of {what}s")
    if isinstance(value, dict) and what == "tool call":
        value = [value]
    if not isinstance(value, list):
        raise UserError(f"{where}: is {describe_type(value)}; it must be a list of objects")

    def parse(text: Any) -> Any:
        is_text = isinstance(text, str)
        return _parse_json_cell(text or "{}", f"{where}: arguments {text!r:.40}", "JSON") if is_text else text

    for i, item in enumerate(value, 1):
        if not isinstance(item, dict):
            raise UserError(f"{where}: {what} {i} is {describe_type(item)}; it must be an object")
    return [map_arguments(item, parse) for item in value]


def map_arguments(item: Values, change: Callable[[Any], Any]) -> Values:
    """Return a tool or tool call with ``change`` applied to its parameters or arguments."""
    function = item.get("function", item)
    if not isinstance(function, dict):
        return item
    changed = function | {name: change(function[name]) for name in ("parameters", "arguments") if name in function}
    return changed if function is item else {**item, "function": changed}


def answer_weights(messages: Conversation, train_on: str) -> list[int]:
    """Return the loss weight of each answer: 0 masks the answer, 1 (the default) trains on it."""
    for number, message in enumerate(messages, 1):
        weight, role = message.get("weight"), message.get("role")
        if weight is not None and role != "assistant" and weight != (train_on == "all"):
            trained = "every message" if train_on == "all" else "answers only"
            name = min(message.keys() & WEIGHTS - {"weight"}, default="weight")  # as in the row
            hint = f"--data.train_on {train_on} trains {trained}; remove the {name}"
            raise UserError(f"message {number} ({role}): {name} {message[name]}: {hint}")
    return [message.get("weight", 1) for message in messages if message.get("role") == "assistant"]
