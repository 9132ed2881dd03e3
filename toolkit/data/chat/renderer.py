"""Render conversations with a jinja chat template, find the tokens that end its answers, and check what it renders."""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property, partial

from toolkit.data.base import Values
from toolkit.data.chat.sandbox_process import send_request
from toolkit.data.sft.messages import ROLES, WEIGHTS, Conversation, Message, map_arguments
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, one_line

Tools = Sequence[Values] | None

REQUIRED_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")  # text that must not be dropped
_CHECKED_ELSEWHERE = {*WEIGHTS, "role", "tool_calls", "instruction", "input"}  # the last two are parts of content
# Fixed date for templates in training, so that repeated and resumed runs produce the same tokens.
TRAINING_DATE = datetime(2024, 7, 26)
EXAMPLE = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
GENERATION_FILE = "generation_config.json"
# Prefix for templates without an end-of-turn token. It appends eos to every assistant message.
_ANSWERS_WITH_EOS = """\
{%- set answers = namespace(messages=[]) %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{%- set answers.messages = answers.messages + [dict(message, content=message['content'] + eos_token)] %}
{%- else %}
{%- set answers.messages = answers.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = answers.messages %}
"""


class TemplateRenderer:
    """A jinja chat template and its tokenizer.

    Attributes:
        name: Origin of the template, for messages.
        source: The jinja source.
        end_of_turn: Text of the end-of-turn token.
        stop_ids: Tokens that end an answer: eos, the list in generation_config.json, and the template's.
        notes: Log lines about unexpected behavior of the template with this tokenizer.
        unread_fields: Names of message fields that it did not render.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, name: str, notes: Sequence[str] = ()) -> None:
        self.name = name
        self.notes = list(notes)
        self._tokenizer = tokenizer
        self._named_tokens = tokenizer.special_tokens
        self._has_tool_template = False  # whether tools use a separate template
        self._control_tokens: tuple[str, ...] = ()  # added tokens that the template writes
        self.unread_fields: set[str] = set()
        self._checked_fields: set[tuple[str, str]] = set()  # with role
        self._set_source(source)
        self._texts = {i: text for text, i in tokenizer.added_tokens.items()}
        listed = tokenizer.settings(GENERATION_FILE).get("eos_token_id")
        listed = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_id]
        self._eos_ids = [i for i in listed if type(i) is int]
        # Ends of a last answer, of text and of tool calls, if the template emits them only between turns.
        self._appended: list[str] = []
        end_ids = self._find_ends()
        self.end_of_turn: str = self._texts[end_ids[-1]]
        self.stop_ids: list[int] = list(dict.fromkeys([*self._eos_ids, *end_ids]))
        self._ends = {i: self._texts[i] for i in self.stop_ids if i in self._texts}
        leading = "".join(f"(?:{re.escape(self._texts[i])})?" for i in end_ids[:-1])
        self._stop = re.compile("|".join(map(re.escape, self._ends.values())))
        self._end = re.compile(rf"\s*{leading}(?:{self._stop.pattern})?")

    def render(
        self,
        messages: Conversation,
        add_generation_prompt: bool = False,
        tools: Tools = None,
        now: datetime = TRAINING_DATE,
    ) -> str:
        """Render a conversation, by default with the training date."""
        values = {
            "messages": [self._clean(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }
        return self._call_jinja(self._named_tokens | values, now)

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.name}: {one_line(problem)}")

    def _set_source(self, source: str) -> None:
        self.source = source
        self._call_jinja(None, TRAINING_DATE)

    def _clean(self, message: Message) -> Message:
        """Drop None values, which templates would render as text, and the loss weight, which is not rendered."""
        cleaned = {key: value for key, value in message.items() if value is not None and key not in WEIGHTS}
        if cleaned.get("tool_calls") and self._concatenates_arguments:
            to_text = partial(json.dumps, ensure_ascii=False)
            cleaned["tool_calls"] = [map_arguments(call, to_text) for call in cleaned["tool_calls"]]
        return cleaned

    @cached_property
    def _concatenates_arguments(self) -> bool:
        """Whether arguments of tool calls must be text: the template fails on objects, or renders them as Python."""
        self._concatenates_arguments = False  # while rendering
        call = {"id": "call00000", "type": "function", "function": {"name": "name", "arguments": {"key": "value"}}}
        question, answer = EXAMPLE
        try:
            return "{'key': 'value'}" in self.render([question, {**answer, "content": "", "tool_calls": [call]}])
        except UserError as error:
            return "TypeError: can only concatenate" in str(error)

    def _require_rendered(self, messages: Conversation, tools: Tools, text: str) -> None:
        """Raise UserError unless ``text``, the rendered conversation, has the tools and all text of the messages."""
        hint = "provide one that does with --data.chat_template FILE"
        hermes = f"choose --data.prompt_style hermes, or {hint}"
        if tools and self._has_tool_template:
            raise self._error(f"conversations with tools need the separate tool_use template; {hermes}")
        if tools and text == self.render(messages):
            raise self._error(f"the template does not render the row's tools; {hermes}")
        for i, message in enumerate(messages):
            role, content, place = message["role"], message.get("content") or "", f"message {i + 1} ({message['role']})"
            if role not in ROLES:
                self._note(f"role {role!r:.40} is not known, so its messages are not trained on as answers")
            if role != "assistant" and content.startswith(self._control_tokens):
                raise self._error(
                    f"{place} begins with a token of the template, {content!r:.30}: is it rendered already? Remove "
                    "such tokens, or provide the complete text in a column text"
                )
            for name, without in _optional_fields(message):
                if (role, name) not in self._checked_fields:
                    self._checked_fields.add((role, name))
                    if self._has_effect(messages, i, without, tools):
                        continue
                    if name in (*REQUIRED_FIELDS, "tool_calls.arguments"):
                        raise self._error(f"the template does not render the {name} of {place}; {hint}, or remove it")
                    self.unread_fields.add(name)

    def _has_effect(self, messages: Conversation, i: int, without: Message, tools: Tools) -> bool:
        """Whether a field changes the text, or would at the end: templates may drop thinking in earlier turns."""
        without = {**without, "instruction": None, "input": None}
        try:
            return any(
                self.render([*messages[: i + 1], *rest], tools=tools)
                != self.render([*messages[:i], without, *rest], tools=tools)
                for rest in (messages[i + 1 :], ())
            )
        except UserError:  # the template needs the field
            return True

    def _require_tool_calls(self, messages: Conversation, i: int, rendered: str) -> None:
        for call in messages[i].get("tool_calls") or ():
            function = call.get("function", call)
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or name not in rendered:
                raise self._error(
                    f"the template does not render all tool_calls of message {i + 1} of {len(messages)}, so they "
                    "cannot be trained on; choose a template that does, such as --data.prompt_style hermes"
                )

    def _call_jinja(self, values: Values | None, now: datetime) -> str:
        """Render the template. If ``values`` is None, only compile it and return ""."""
        try:
            answer = send_request({"source": self.source, "values": values, "now": now.isoformat()})
        except RecursionError as error:
            raise self._error("the messages are nested too deeply") from error
        if "error" in answer:
            raise self._error(answer["error"])
        return answer["text"]

    def _prompt_end(
        self, earlier: Conversation, text: str, tools: Tools = None, now: datetime = TRAINING_DATE
    ) -> int | None:
        """Return the length of the rendered prompt for ``earlier``; None if ``text`` does not start with it."""
        try:
            prompt = self.render(earlier, True, tools, now)
        except UserError:  # such as when no message precedes the answer
            return None
        return len(prompt) if text.startswith(prompt) else None

    def _surrounding_text(self, messages: Conversation, i: int, text: str = "", tools: Tools = None) -> tuple[str, str]:
        """Return the rendered text before and after the content and tool calls of message ``i``."""
        number = 0
        while (placeholder := f"answer{number}placeholder") in text:
            number += 1
        other = [*messages[:i], {**messages[i], "content": placeholder, "tool_calls": None}, *messages[i + 1 :]]
        before, found, after = self.render(other, tools=tools).partition(placeholder)
        if not found or placeholder in after:
            raise self._error(f"the template renders message {i + 1} {'more than once' if found else 'not at all'}")
        return before, after

    def _note(self, note: str) -> None:
        note = f"{self.name}: {note}"
        if note not in self.notes:
            self.notes.append(note)

    def _length_of_end(self, after: str, i: int) -> int:
        match = self._end.match(after)
        if match and match[0].strip():
            return match.end()
        rest = after.lstrip()
        if token := next(filter(rest.startswith, self._texts.values()), None):
            self._note(f"{token} follows some answers, but does not end a chat, so it is not trained on")
            return 0
        raise self._error(
            f"assistant turn (message {i + 1}) has no end-of-turn token; the model would not learn to stop; "
            "choose a --data.prompt_style, or use conversations with one answer"
        )

    def _find_ends(self) -> list[int]:
        """Return the tokens that end an answer, in order. If the template has none, make it append eos to answers."""
        eos = self._tokenizer.eos_id
        if last := self._probe():
            return last
        if eos is None:
            raise self._error(
                "the template has no end-of-turn token, and the tokenizer has no eos token; "
                + self._tokenizer.missing_hint("eos")
            )
        if eos not in self._texts:
            raise self._error(
                f"answers must end with the tokenizer's eos {self._named_tokens['eos_token']}, but it is an ordinary "
                "vocabulary entry; make it an added (special) token in tokenizer.json"
            )
        if between := self._probe("user"):
            try:
                after_call = self._probe("tool") or between
            except UserError:  # the template does not know the role
                after_call = between
            self._appended = ["".join(self._texts[i] for i in ids) for ids in (between, after_call)]
            return between
        self._set_source(_ANSWERS_WITH_EOS + self.source)
        if self._probe() != [eos]:
            raise self._error("the template has no end-of-turn token; choose a --data.prompt_style")
        self._note(f"has no end-of-turn token; {self._named_tokens['eos_token']} is appended to every answer")
        return [eos]

    def _probe(self, next_role: str | None = None) -> list[int]:
        """Return the tokens that end an answer, in order: the added tokens directly after it through the first eos.

        Without eos, the first added token ends a last answer, and none an answer before a message of ``next_role``.
        """
        more = [{"role": next_role, "content": "question"}, EXAMPLE[1]] if next_role else []
        after = self._surrounding_text([*EXAMPLE, *more], 1)[1]
        ids: list[int] = []
        for id_, (start, end) in zip(*self._tokenizer.encode_with_offsets(after), strict=True):
            if id_ in self._texts:
                ids.append(id_)
                if id_ in self._eos_ids:
                    return ids
            elif ids or after[start:end].strip():
                break
        return [] if next_role else ids[:1]


def _optional_fields(part: Values) -> Iterator[tuple[str, Values]]:
    """Yield the name of each field that a template may ignore, also in tool calls, and ``part`` without the field."""
    for name, value in part.items():
        if name == "tool_calls" and value:
            for i, call in enumerate(value):
                for field, without in _optional_fields(call):
                    yield f"tool_calls.{field}", {**part, name: [*value[:i], without, *value[i + 1 :]]}
        elif name == "function" and isinstance(value, dict):
            yield from ((field, {**part, name: without}) for field, without in _optional_fields(value))
        elif name not in _CHECKED_ELSEWHERE and value not in (None, [], {}, "function") and str(value).strip():
            yield name, {key: other for key, other in part.items() if key != name}
