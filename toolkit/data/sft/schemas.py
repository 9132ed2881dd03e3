"""The one way in for rows: parse a row of a data module, a command or a metric into records, by its columns.

No other module reads the columns of a row: what a record does not use, its ``unread`` names.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from toolkit.data.base import RowKind, Values
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
OTHERS = (("text",), ("system",), ("tools",), ("history",), ("margin",), ("label",), ("choices",))
GROUPS = (CONVERSATION, QUESTION, INPUT, ANSWER, *OTHERS, PAIR[:1], PAIR[1:])
_MEDIA = ("image", "images", "videos", "audios")
_REFUSED = dict.fromkeys(_MEDIA, "only text is supported; remove the column, or such rows")
_REFUSED["functions"] = """provide tools, with --data.columns '{"tools": "functions"}'"""
Columns = dict[str, str] | None  # --data.columns: column in the row by known name
KNOWN_COLUMNS = tuple(name for group in GROUPS for name in group)
_MAPPING = """names for them, such as --data.columns '{"prompt": "question", "completion": "answer"}'"""
_NO_PROMPT = "{}: has no prompt, and chosen and rejected begin differently; add a prompt"
_SCHEMAS = "messages, conversations, instruction with output, prompt with completion, or text"
_PREFERENCES = "prompt, chosen and rejected"

ParseKind = RowKind | Literal["prompt", "unlabeled"]
"""What a row is: for training, or a prompt of a metric, whose answer may be missing, or a text to label."""


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
        has_eos: Whether the tokens of ``text`` end with eos. None: if the tokenizer adds it.
        label: The label of a classification as the file has it; of a completion to score, the margin of its pair; of
            a prompt, its choices.
        unread: The row's columns that have a value and are not used.
    """

    messages: Messages | None
    text: str | None
    where: str
    tools: list[Values] | None = None
    is_good: bool = True
    prompt_length: int = -1
    has_eos: bool | None = True
    label: Any = None
    unread: frozenset[str] = frozenset()


class _Row(dict[str, Any]):
    """The values of a row by known column name. Notes which columns are not read.

    Args:
        row: The row as it is.
        names: Column in the row by known name.
        mapped: Those that an option names.
        kind: What the row is.
    """

    def __init__(self, row: Values, where: str, names: Values, mapped: Values, kind: "_Kind") -> None:
        super().__init__({name: row[column] for name, column in names.items()})
        self.where, self.names, self.mapped, self.kind = where, names, mapped, kind
        self.columns = describe_columns(row)
        self.unread = {column for column, value in row.items() if value not in (None, "", [])}

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(self.names[name])
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.names else default

    def find(self, group: tuple[str, ...]) -> str | None:
        """Return the column of a group that has a value."""
        names = [name for name in group if self.get(name) is not None]
        if len(names) > 1:
            hint = f"choose one, such as --data.columns.{names[0]} {names[0]}"
            raise UserError(f"{self.where}: has both {names[0]} and {names[1]}; {hint}")
        return names[0] if names else None


class _Kind(NamedTuple):
    """How to parse a kind of row.

    Args:
        parse: Returns the row's records.
        needs: The columns that it needs, for messages.
        option: The option that names the column of a known name.
    """

    parse: Callable[[_Row], list[Record]]
    needs: str
    option: str = "--data.columns"


class EqualAnswersError(EmptyAnswerError):
    """Raised when the chosen and the rejected answer are equal."""


def require_columns(columns: Columns) -> None:
    """Raise UserError unless ``--data.columns`` maps known columns to different ones of the rows."""
    columns = columns or {}
    for name, column in columns.items():
        if name not in KNOWN_COLUMNS:
            near = did_you_mean(name, KNOWN_COLUMNS) or f"; known columns: {', '.join(KNOWN_COLUMNS)}"
            if column in KNOWN_COLUMNS:
                near = f"""; did you mean '{{"{column}": "{name}"}}'?"""
            raise UserError(f"--data.columns {name}: unknown column{near}")
        if other := next((other for other in columns if columns[other] == column and other != name), None):
            raise UserError(f"--data.columns: {name} and {other} are both column {column}; give each its own")


def known_columns(row: Any, columns: Columns) -> dict[str, str]:
    """Return the column of a row by known name. A mapped column replaces its synonyms."""
    columns = columns or {}
    present = [name for name in KNOWN_COLUMNS if isinstance(row, dict) and name in row]
    replaced = {name for group in GROUPS if columns.keys() & group for name in group}
    return {name: name for name in present if name not in replaced} | columns


def parse_row(row: Any, where: str, columns: Columns = None, kind: ParseKind = "answers") -> list[Record]:
    """Parse a row into its record, or of a pair, the chosen and the rejected completion.

    Args:
        row: A dict with the columns of one schema. None values count as missing columns.
        where: File and line or row, for error messages.
        columns: Maps known column names to names in the row. Only by it has a text to label a ``text_pair``.
        kind: What the row is.

    Raises:
        EmptyAnswerError: An answer, a text or a label is empty.
        EqualAnswersError: Both answers of a pair are equal.
    """
    of_kind = _KINDS[kind]
    if not isinstance(row, dict):
        raise UserError(f"{where}: is {describe_type(row)}, not an object; every row needs {of_kind.needs}")
    columns = columns or {}
    for name, hint in _REFUSED.items():
        if row.get(name) and name not in columns.values():
            raise UserError(f"{where}: {name}: {hint}")
    for name, column in columns.items():
        if column not in row:
            raise UserError(f"{where}: has no column {column} ({of_kind.option.format(name)}); {describe_columns(row)}")
    values = _Row(row, where, known_columns(row, columns), columns, of_kind)
    for name, value in values.items():
        require_unicode(value, f"{where}: {name}")
    records = of_kind.parse(values)
    return [replace(record, unread=frozenset(values.unread)) for record in records]


def as_number(value: Any) -> float | None:
    """Return a finite number, also from text, or None."""
    with suppress(ValueError, TypeError, OverflowError):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    return None


# ---- kinds of rows


def _parse_answers(row: _Row) -> list[Record]:
    if {*PAIR} <= row.keys() and not row.mapped:
        raise UserError(
            f"{row.where}: is a pair of answers to prefer and to avoid ({row.columns}); use --objective DPO. "
            "--data.columns '{completion: chosen}' trains on the chosen answers alone, as examples"
        )
    for name in (*PAIR, "label", "margin"):
        if name in row.mapped:
            raise UserError(f"--data.columns.{name}: has no effect without an objective for preferences, such as DPO")
    messages, _ = _parse_turns(row)
    return [_make_record(messages, row) if messages else Record(None, _require_answer(row, "text"), row.where)]


def _parse_prompts(row: _Row) -> list[Record]:
    """Parse a row of a metric. The last message is the reference if it is the assistant's."""
    if {*PAIR} <= row.keys() and not row.mapped:
        record = _parse_pair(row)[0]
    else:
        messages, _ = _parse_turns(row, needs_answer=False)
        record = _make_record(messages, row) if messages else Record(None, None, row.where)
    if record.messages is None:
        raise UserError(f"{row.where}: is plain text without a prompt; give rows with prompts (see --data.columns)")
    return [replace(record, label=row.get("choices"))]


def _parse_pair(row: _Row) -> list[Record]:
    """Parse preferences: the chosen and the rejected completion of a prompt.

    Prompt and completions are strings or lists of messages. Without a prompt, it is what the completions have in
    common: messages, or text up to the last word.
    """
    for name in PAIR:
        if name not in row:
            raise UserError(f"{row.where}: has no {name} answer; {row.columns}; needs {row.kind.needs}")
    answers = [_parse_answer(row, name) for name in PAIR]
    if answers[0] == answers[1]:
        raise EqualAnswersError(f"{row.where}: chosen and rejected are equal; fix or remove this row")
    question = row.find(QUESTION)
    if question is None and all(isinstance(row[name], str) for name in PAIR):
        return _split_texts([row[name] for name in PAIR], row.where)
    # with complete conversations, the prompt repeats their first message
    if question is None or (isinstance(row[question], str) and answers[0][0]["role"] != "assistant"):
        n = min(_count_common(answers), *(len(answer) - 1 for answer in answers))
        if not n:
            raise UserError(_NO_PROMPT.format(row.where))
        prompt, answers = answers[0][:n], [answer[n:] for answer in answers]
    else:
        prompt = _parse_prompt(row, question)
    return [_complete(prompt, answer, row, not i) for i, answer in enumerate(answers)]


def _parse_compared(row: _Row) -> list[Record]:
    """Parse a pair, whose ``margin`` is how much better the chosen completion is; 0 without the column."""
    if (margin := as_number(row.get("margin", 0))) is None:
        raise UserError(f"{row.where}: margin {row['margin']!r:.40}: must be a number")
    return [replace(record, label=margin) for record in _parse_pair(row)]


def _parse_rated(row: _Row) -> list[Record]:
    """Parse a pair, or a prompt, one completion and a ``label``: true for a good one."""
    if any(row.get(name) is not None for name in PAIR) or row.get("label") is None:
        return _parse_pair(row)
    label = {"true": True, "false": False, "1": True, "0": False}.get(str(row["label"]).lower().removesuffix(".0"))
    if label is None:
        raise UserError(f"{row.where}: label {row['label']!r:.40}: must be true (a good completion) or false")
    messages, n = _parse_turns(row)
    if not messages:
        raise UserError(f"{row.where}: has no prompt for the completion; {row.columns}; see --data.columns")
    return [_complete(messages[:n], messages[n:], row, label)]


def _parse_unlabeled(row: _Row) -> list[Record]:
    """Parse a text, or messages, to label."""
    column = next((name for name in ("text", *CONVERSATION) if name in row), "text")
    value = _require_value(row, column)
    if isinstance(value, list) or row.names[column] in CONVERSATION:
        if "text_pair" in row:
            hint = f"remove {row.kind.option.format('text_pair')}"
            raise UserError(f"{row.where}: {row.names[column]} is a conversation, which has no pair; {hint}")
        messages = parse_conversation(value, f"{row.where}: {row.names[column]}")
        if any("weight" in message for message in messages):
            row.unread.add("weight of messages")
        return [_make_record(messages, row)]
    names = [column, *({"text_pair"} & row.keys())]
    texts = [require_string(_require_value(row, name), f"{row.where}: {row.names[name]}") for name in names]
    return [Record(None, "\n".join(texts), row.where, has_eos=None)]


def _parse_labeled(row: _Row) -> list[Record]:
    return [replace(record, label=_require_value(row, "label")) for record in _parse_unlabeled(row)]


_KINDS: dict[ParseKind, _Kind] = {
    "answers": _Kind(_parse_answers, f"{_SCHEMAS}, or {_MAPPING}"),
    "prompt": _Kind(_parse_prompts, f"{_SCHEMAS}, or {_MAPPING}"),
    "pairs": _Kind(_parse_pair, _PREFERENCES),
    "rated": _Kind(_parse_rated, f"{_PREFERENCES}, or prompt, completion and label"),
    "compared": _Kind(_parse_compared, _PREFERENCES),
    "compared_tokens": _Kind(_parse_compared, _PREFERENCES),
    "labeled": _Kind(_parse_labeled, "a text and a label", "--data.{}_column"),
    "unlabeled": _Kind(_parse_unlabeled, "a text", "--{}_column"),
}


# ---- parts of rows


def _require_value(row: _Row, name: str) -> Any:
    if name not in row:
        raise UserError(f"{row.where}: has no column {name} ({row.kind.option.format(name)}); {row.columns}")
    if row[name] is None or not str(row[name]).strip():
        raise EmptyAnswerError(f"{row.where}: has an empty {row.names[name]}; fix or remove this row")
    return row[name]


def _make_record(messages: Messages, row: _Row, is_good: bool = True) -> Record:
    """Return a record with the row's system message and tools."""
    if row.get("system"):
        system = require_string(row["system"], f"{row.where}: system")
        if messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        elif messages[0]["content"].strip() != system.strip():
            raise UserError(f"{row.where}: has a system column and a different system message; remove one of them")
    tools = parse_functions(row["tools"], f"{row.where}: tools") if row.get("tools") else None
    return Record(messages, None, row.where, tools, is_good)


def _parse_turns(row: _Row, needs_answer: bool = True) -> tuple[Messages, int]:
    """Return the messages of a conversation, or of a question and its answer, and how many are the prompt."""
    if column := row.find(CONVERSATION):
        messages = parse_conversation(row[column], f"{row.where}: {column}")
        return messages, len(messages) - 1
    if (question := row.find(QUESTION)) is None:
        if row.get("text") is None:
            raise UserError(f"{row.where}: has no known column; {row.columns}; needs {row.kind.needs}")
        return (), 0
    answer = row.find(ANSWER) or next((name for name in ANSWER if name in row), None)
    if answer is None and needs_answer:
        expected = "completion" if question == "prompt" else "output"
        raise UserError(f"{row.where}: has no {expected} for the {question}; {row.columns}; see --data.columns")
    answers = () if answer is None else _parse_answer(row, answer)
    prompt = _parse_prompt(row, question)
    return prompt + answers, len(prompt)


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


def _require_answer(row: _Row, name: str) -> str:
    """Return the text of a column. Raise EmptyAnswerError if it is empty."""
    if row[name] in (None, []) or not require_string(row[name], f"{row.where}: {name}").strip():
        raise EmptyAnswerError(f"{row.where}: has an empty answer ({name}); fix or remove this row")
    return str(row[name])


def _parse_answer(row: _Row, name: str) -> Messages:
    """Parse an answer: a string, a message or a list of messages."""
    value = [row[name]] if isinstance(row[name], dict) else row[name]
    if isinstance(value, list) and value:
        return parse_messages(value, f"{row.where}: {name}")
    return ({"role": "assistant", "content": _require_answer(row, name)},)


def _parse_prompt(row: _Row, question: str) -> Messages:
    """Parse a prompt, a string or a list of messages, after the earlier turns. An input is added to a string."""
    earlier = parse_conversation(row["history"], f"{row.where}: history") if row.get("history") else ()
    if isinstance(row[question], list):
        return (*earlier, *parse_messages(row[question], f"{row.where}: {question}"))
    name = row.find(INPUT)
    instruction = require_string(row[question], f"{row.where}: {question}")
    extra = "" if name is None else require_string(row[name], f"{row.where}: {name}")
    content = f"{instruction}\n\n{extra}" if extra else instruction
    if not content.strip():
        raise UserError(f"{row.where}: has an empty {question}; fix or remove this row")
    parts = {"instruction": instruction, "input": extra} if extra or question == "instruction" else {}
    return (*earlier, {"role": "user", "content": content, **parts})


def _complete(prompt: Any, answer: Any, row: _Row, is_good: bool) -> Record:
    if not prompt:
        raise UserError(f"{row.where}: has an empty prompt; fix or remove this row")
    if answer[-1]["role"] != "assistant":
        raise UserError(
            f"{row.where}: the completion ends with a message of the {answer[-1]['role']}, not the assistant"
        )
    masked = tuple({**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt)
    return _make_record((*masked, *answer), row, is_good)
