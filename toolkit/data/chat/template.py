"""Tokenize conversations with a chat template or prompt style, with a loss mask for assistant turns."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from toolkit.data.chat.renderer import TRAINING_DATE, Message, TemplateRenderer, Tools
from toolkit.data.chat.sources import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    has_tool_template,
    prompt_styles,
    read_style,
    read_template,
    tokenizer_template,
)
from toolkit.data.sft.messages import EmptyAnswerError, answer_weights
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.data.base import TrainOn
    from toolkit.data.tokenizer import Tokenizer

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


@dataclass(frozen=True)
class Encoding:
    """Token ids and loss mask of equal length. True marks a prediction target."""

    ids: list[int]
    loss_mask: list[bool]


def encode_text(tokenizer: Tokenizer, text: str) -> Encoding:
    """Tokenize plain text with loss on every token. Adds eos, and bos if the tokenizer adds it by default."""
    ids = tokenizer.encode(text, eos=True)
    if tokenizer.adds_bos and ids[:2] == [tokenizer.bos_id] * 2:  # the text already starts with bos
        ids = ids[1:]
    return Encoding(ids, [True] * len(ids))


class ChatTemplate(TemplateRenderer):
    """A jinja chat template and its tokenizer. Create it with :meth:`from_tokenizer`.

    Attributes:
        end_of_turn: Text of the end-of-turn token.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, name: str, notes: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, source, name, notes)
        self._has_tool_template = False  # whether tools use a separate template
        self._appends_eos = False  # whether to add eos after the last answer: the template emits it only between turns
        self._end_id = self._find_end()
        self._should_split_prompts = self._detect_split_prompts()
        texts = {i: text for text, i in tokenizer.added_tokens.items()}
        self.end_of_turn: str = texts[self._end_id]
        ends = {i for i in (self._end_id, tokenizer.eos_id) if i is not None}
        self._ends = {i: texts[i] for i in sorted(ends) if i in texts}
        if "strftime_now" in source:
            self.notes.append(f"{name}: renders the date: {TRAINING_DATE:%d %b %Y} in training, today in a chat")

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, prompt_style: str | None, file: str | None = None) -> ChatTemplate:
        """Load a prompt style by name, a template ``file``, or by default the tokenizer's template."""
        if prompt_style is not None:
            return cls(tokenizer, *read_style(tokenizer, prompt_style))
        if file is not None:
            return cls(tokenizer, *read_template(tokenizer, file))
        file_and_source = tokenizer_template(tokenizer)
        if file_and_source is None:
            raise UserError(
                f"--data.prompt_style: {tokenizer.name} has no chat template; choose one of "
                f"{', '.join(prompt_styles())}, or provide --data.chat_template FILE"
            )
        origin, source = file_and_source
        template = cls(tokenizer, source, name=f"{tokenizer.name}: {origin}")
        template._has_tool_template = has_tool_template(tokenizer)
        return template

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation and the generation prompt, with the current date."""
        now = datetime.now()
        return self._tokenize(messages, self._render(messages, True, now), now)[0]

    def encode(self, messages: Sequence[Message], train_on: TrainOn, tools: Tools = None) -> Encoding:
        """Tokenize a complete conversation and compute the loss mask.

        An answer spans from the end of the generation prompt through the end-of-turn token, including tool calls. A
        token that overlaps an answer belongs to the answer. Without answers, the loss mask is all False unless
        ``train_on`` is "all". An answer with ``weight`` 0 is always masked.

        Args:
            messages: Messages with ``role`` and ``content``.
            train_on: "answers", "last_answer" or "all" tokens.
            tools: JSON schemas of the available tools, passed to the template.

        Raises:
            EmptyAnswerError: An answer is empty.
        """
        weights = answer_weights(messages, train_on)
        text, spans = self._locate_answers(messages, tools)
        ids, offsets = self._tokenize(messages, text, TRAINING_DATE, tools)
        starts = [start for start, _ in offsets]
        for number, (_, end) in enumerate(spans, 1):
            if ids[bisect_right(starts, end - 1) - 1] not in self._ends:
                raise self._error(f"answer {number} does not end with the end-of-turn token {self.end_of_turn}")
        answers = list(zip(spans, weights, strict=True))
        selected = answers[-1:] if train_on == "last_answer" else answers
        marked = bytearray(len(text) + 1)  # 1 for characters with loss; for "all", 1 for masked characters
        for (start, end), weight in selected:
            if weight == (train_on != "all"):
                marked[start:end] = b"\1" * (end - start)
        return Encoding(ids, [(1 in marked[start:end]) == (train_on != "all") for start, end in offsets])

    def export_tokenizer(self) -> Tokenizer:
        """Return the tokenizer with this template, and with the end-of-turn token as eos in generation_config.json."""
        changed = {}
        saved = tokenizer_template(self._tokenizer, strict=False)
        if saved is None or saved[1] != self.source:
            changed[TEMPLATE_FILE] = self.source.encode()
            config = self._tokenizer.settings(CONFIG_FILE)
            if "chat_template" in config:  # older transformers versions read only this file
                changed[CONFIG_FILE] = _to_json(config | {"chat_template": self.source})
        generation = self._tokenizer.settings(GENERATION_FILE)
        eos = generation.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        ends = list(dict.fromkeys([*eos_ids, self._tokenizer.eos_id, self._end_id]))
        generation["eos_token_id"] = [i for i in ends if i is not None]
        if self._tokenizer.bos_id is not None:
            generation.setdefault("bos_token_id", self._tokenizer.bos_id)
        changed[GENERATION_FILE] = _to_json(generation)
        return self._tokenizer.with_files(changed)

    def _tokenize(
        self, messages: Sequence[Message], text: str, now: datetime, tools: Tools = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return token ids and offsets of ``text``. If prompts are tokenized separately, split before each answer."""
        borders = {0, len(text)}
        if self._should_split_prompts:
            answers = (i for i, message in enumerate(messages) if message.get("role") == "assistant")
            borders |= {self._prompt_end(messages[:i], text, tools, now) or 0 for i in answers}
        ids, offsets = [], []
        for start, end in pairwise(sorted(borders)):
            more, places = self._tokenizer.encode_with_offsets(text[start:end])
            ids += more
            offsets += [(start + first, start + last) for first, last in places]
        return ids, offsets

    def _locate_answers(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text and the span [start, end) of each answer, including the end-of-turn token."""
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        for i in answers:
            content = messages[i].get("content")
            if not messages[i].get("tool_calls") and (not isinstance(content, str) or not content.strip()):
                raise EmptyAnswerError(
                    f"empty answer (message {i + 1} of {len(messages)}): fill it in or remove the row"
                )
        text = self.render(messages, tools=tools)
        if tools:
            self._require_tools_rendered(text != self.render(messages))
        eos = ""
        if self._appends_eos and answers[-1:] == [len(messages) - 1]:
            eos = self.end_of_turn
            text += eos
        return text, [self._locate(messages, i, text, eos, tools) for i in answers]

    def _locate(self, messages: Sequence[Message], i: int, text: str, eos: str, tools: Tools) -> tuple[int, int]:
        """Return the span [start, end) of message ``i``, located by rendering a placeholder instead of the answer."""
        before, after = self._surrounding_text(messages, i, text, tools)
        after += eos
        if not text.endswith(after):
            raise self._error(f"the text after message {i + 1} depends on that message, so its end cannot be located")
        end_of_content = len(text) - len(after)
        start = self._start(messages[:i], text[:end_of_content], before, tools)
        self._require_tool_calls(messages, i, text[start:end_of_content])
        if (messages[i].get("content") or "").strip() not in text[start:end_of_content]:
            self._note("modifies some answers (such as thinking in earlier turns); the rendered text is trained on")
        return start, end_of_content + self._length_of_end(after, i)

    def _require_tools_rendered(self, is_rendered: bool) -> None:
        hint = "provide one that does with --data.chat_template FILE, or remove the tools"
        if self._has_tool_template:
            raise self._error(f"conversations with tools need the separate tool_use template; {hint}")
        if not is_rendered:
            raise self._error(f"the template does not render the row's tools; {hint}")

    def _require_tool_calls(self, messages: Sequence[Message], i: int, rendered: str) -> None:
        for call in messages[i].get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or name not in rendered:
                raise self._error(
                    f"the template does not render all tool_calls of message {i + 1} of {len(messages)}, so they "
                    "cannot be trained on; choose a template that does, or remove them"
                )

    def _start(self, earlier: Sequence[Message], text: str, before: str, tools: Tools) -> int:
        """Return the start of an answer: the end of the generation prompt, else the end of ``before``."""
        end = self._prompt_end(earlier, text, tools)
        if end is not None:
            return end
        # Some templates change earlier turns, such as dropping thinking or moving the system message.
        if text.startswith(before):
            return len(before)
        raise self._error(
            f"the text before message {len(earlier) + 1} depends on that message, so its start cannot be located"
        )

    def _length_of_end(self, after: str, i: int) -> int:
        rest = after.lstrip()
        for token in self._ends.values():
            if rest.startswith(token):
                return len(after) - len(rest) + len(token)
        raise self._error(
            f"assistant turn (message {i + 1}) has no end-of-turn token; the model would not learn to stop; "
            "choose a --data.prompt_style, or use conversations with one answer"
        )

    def _find_end(self) -> int:
        """Return the end-of-turn token id. If the template has none, make it append eos to answers."""
        eos = self._tokenizer.eos_id
        last, between = self._probe()
        if last is not None:
            return last
        if eos is None:
            raise self._error(
                "the template has no end-of-turn token, and the tokenizer has no eos token; set eos_token in "
                "tokenizer_config.json"
            )
        if eos not in self._tokenizer.added_tokens.values():
            raise self._error(
                f"answers must end with the tokenizer's eos {self._named_tokens['eos_token']}, but it is an ordinary "
                "vocabulary entry; make it an added (special) token in tokenizer.json"
            )
        if between == eos:
            self._appends_eos = True
            return eos
        self._set_source(_ANSWERS_WITH_EOS + self.source)
        last, _ = self._probe()
        if last != eos:
            raise self._error("the template has no end-of-turn token; choose a --data.prompt_style")
        self._note(f"has no end-of-turn token; {self._named_tokens['eos_token']} is appended to every answer")
        return eos

    def _probe(self) -> tuple[int | None, int | None]:
        """Return the added token after a last answer, and after an answer followed by a question."""
        question = {"role": "user", "content": "question"}
        turn = [question, {"role": "assistant", "content": "answer"}]
        return self._first_token(self._surrounding_text(turn, 1)[1]), self._first_token(
            self._surrounding_text([*turn, *turn], 1)[1]
        )

    def _detect_split_prompts(self) -> bool:
        """Whether a prompt tokenizes differently with and without its answer, and splitting between them fixes it.

        For example, newlines at the end of a prompt may merge into one token, but not before an answer.
        """
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        text = self.render(turn)
        end = self._prompt_end(turn[:1], text)
        if end is None:
            return False
        full, prompt, answer = (self._tokenizer.encode_with_offsets(part)[0] for part in (text, text[:end], text[end:]))
        if full[: len(prompt)] == prompt:
            return False
        if self._tokenizer.decode(prompt + answer, False) != self._tokenizer.decode(full, False):
            self._note("prompts tokenize differently at inference (without the answer) than in training")
            return False
        self._note(
            "prompts would tokenize differently without their answer; the two are tokenized separately, "
            "in training and in a chat"
        )
        return True


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
