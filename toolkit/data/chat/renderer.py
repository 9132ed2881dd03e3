"""Render conversations with a jinja chat template, in a separate process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from toolkit.data.chat.sandbox_process import send_request
from toolkit.errors import UserError, one_line

if TYPE_CHECKING:
    from toolkit.data.tokenizer import Tokenizer

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None

# Fixed date for templates in training, so that repeated and resumed runs produce the same tokens.
TRAINING_DATE = datetime(2024, 7, 26)


class TemplateRenderer:
    """A jinja chat template and its tokenizer.

    Attributes:
        name: Origin of the template, for messages.
        source: The jinja source.
        notes: Log lines about unexpected behavior of the template with this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, name: str, notes: Sequence[str] = ()) -> None:
        self.name = name
        self.notes = list(notes)
        self._tokenizer = tokenizer
        self._named_tokens = tokenizer.special_tokens
        self._set_source(source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools = None) -> str:
        """Render a conversation with the training date."""
        return self._render(messages, add_generation_prompt, TRAINING_DATE, tools)

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.name}: {one_line(problem)}")

    def _set_source(self, source: str) -> None:
        self.source = source
        self._call_jinja(None, TRAINING_DATE)

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, now: datetime, tools: Tools = None
    ) -> str:
        # Drop None values, which templates would render as text, and the loss weight, which is not rendered.
        cleaned = [
            {key: value for key, value in message.items() if value is not None and key != "weight"}
            for message in messages
        ]
        values = {
            "messages": cleaned,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }
        return self._call_jinja(self._named_tokens | values, now)

    def _call_jinja(self, values: dict[str, Any] | None, now: datetime) -> str:
        """Render the template. If ``values`` is None, only compile it and return ""."""
        try:
            answer = send_request({"source": self.source, "values": values, "now": now.isoformat()})
        except RecursionError as error:
            raise self._error("the messages are nested too deeply") from error
        if "error" in answer:
            raise self._error(answer["error"])
        return answer["text"]

    def _prompt_end(
        self, earlier: Sequence[Message], text: str, tools: Tools = None, now: datetime = TRAINING_DATE
    ) -> int | None:
        """Return the length of the rendered prompt for ``earlier``; None if ``text`` does not start with it."""
        try:
            prompt = self._render(earlier, True, now, tools)
        except UserError:  # such as when no message precedes the answer
            return None
        return len(prompt) if text.startswith(prompt) else None

    def _surrounding_text(
        self, messages: Sequence[Message], i: int, text: str = "", tools: Tools = None
    ) -> tuple[str, str]:
        """Return the rendered text before and after the content and tool calls of message ``i``."""
        number = 0
        while (placeholder := f"answer{number}placeholder") in text:
            number += 1
        other = [*messages[:i], {**messages[i], "content": placeholder, "tool_calls": None}, *messages[i + 1 :]]
        before, found, after = self.render(other, tools=tools).partition(placeholder)
        if not found or placeholder in after:
            raise self._error(f"the template renders message {i + 1} {'more than once' if found else 'not at all'}")
        return before, after

    def _first_token(self, text: str) -> int | None:
        """Return the id of the added token at the start of ``text``, ignoring whitespace; None if there is none."""
        added = set(self._tokenizer.added_tokens.values())
        for id_, (start, end) in zip(*self._tokenizer.encode_with_offsets(text), strict=True):
            if id_ in added or text[start:end].strip():
                return id_ if id_ in added else None
        return None

    def _note(self, note: str) -> None:
        note = f"{self.name}: {note}"
        if note not in self.notes:
            self.notes.append(note)
