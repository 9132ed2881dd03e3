"""Tokenize conversations with a chat template or prompt style, with a loss mask for assistant turns."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from toolkit.data.base import TrainOn
from toolkit.data.chat.renderer import (
    EXAMPLE,
    GENERATION_FILE,
    REQUIRED_FIELDS,
    TRAINING_DATE,
    TemplateRenderer,
    Tools,
)
from toolkit.data.chat.sources import (
    TEMPLATE_FILE,
    has_tool_template,
    prompt_styles,
    read_style,
    read_template,
    tokenizer_template,
)
from toolkit.data.hf_tokenizer import CONFIG_FILE, to_json
from toolkit.data.sft.messages import Conversation, EmptyAnswerError, Message, answer_weights
from toolkit.data.tokenizer import Spans, Tokenizer
from toolkit.errors import UserError

_HINT = "--data.chat_template FILE specifies another template"


class Encoding(NamedTuple):
    """Token ids and loss mask of equal length. True marks a prediction target."""

    ids: list[int]
    loss_mask: list[bool]


def encode_text(
    tokenizer: Tokenizer,
    text: str,
    template: ChatTemplate | None = None,
    prompt_length: int = -1,
    eos: bool | None = True,
) -> Encoding:
    """Tokenize plain text with loss after ``prompt_length`` characters, the prompt. -1: on every token.

    Adds eos, unless the text ends with it or another end token of ``template``, and bos if the tokenizer adds it. None
    adds eos only if the tokenizer adds it.
    """
    ids, offsets = tokenizer.encode_with_offsets(text)
    is_ended = template is not None and ids[-1:] != [] and ids[-1] in template.stop_ids
    start, end = tokenizer.missing_ends(ids, eos=eos and not is_ended)
    mask = [last > prompt_length for _, last in offsets]
    return Encoding([*start, *ids, *end], [*(prompt_length < 0 for _ in start), *mask, *(True for _ in end)])


class ChatTemplate(TemplateRenderer):
    """A jinja chat template and its tokenizer. Create it with :meth:`from_tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, source: str, name: str, notes: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, source, name, notes)
        self._heads: set[str] = set()  # texts between generation prompts and answers
        self._should_split_prompts = self._detect_split_prompts()
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

    def encode_prompt(self, messages: Conversation) -> list[int]:
        """Return the token ids of a conversation and the generation prompt, with the current date."""
        now = datetime.now()
        text = self.render(messages, True, now=now)
        # without offsets, which need gigabytes for the megabytes that a server may be sent
        return self._tokenize(messages, text, now, None, lambda text: (self._tokenizer.encode(text, bos=False), []))[0]

    def encode(self, messages: Conversation, train_on: TrainOn, tools: Tools = None) -> Encoding:
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
        messages = [self._without_end(message) for message in messages]
        text, spans = self._locate_answers(messages, tools)
        ids, offsets = self._tokenize(messages, text, TRAINING_DATE, tools)
        starts = [start for start, _ in offsets]
        for number, (_, end) in enumerate(spans, 1):
            is_ended = text.endswith(tuple(self._ends.values()), 0, end)
            if is_ended and ids[bisect_right(starts, end - 1) - 1] not in self._ends:
                raise self._error(f"answer {number} does not end with the end-of-turn token {self.end_of_turn}")
        answers = list(zip(spans, weights, strict=True))
        selected = answers[-1:] if train_on == "last_answer" else answers
        marked = bytearray(len(text) + 1)  # 1 for characters with loss; for "all", 1 for masked characters
        for (start, end), weight in selected:
            if weight == (train_on != "all"):
                marked[start:end] = b"\1" * (end - start)
        return Encoding(ids, [(1 in marked[start:end]) == (train_on != "all") for start, end in offsets])

    def export_tokenizer(self) -> Tokenizer:
        """Return the tokenizer with this template, and with ``stop_ids`` as eos in generation_config.json."""
        changed = {}
        saved = tokenizer_template(self._tokenizer)
        if saved is None or saved[1] != self.source:
            changed[TEMPLATE_FILE] = self.source.encode()
            config = self._tokenizer.settings(CONFIG_FILE)
            if "chat_template" in config:  # older transformers versions read only this file
                changed[CONFIG_FILE] = to_json(config | {"chat_template": self.source})
        generation = self._tokenizer.settings(GENERATION_FILE)
        generation["eos_token_id"] = self.stop_ids
        if self._tokenizer.bos_id is not None:
            generation.setdefault("bos_token_id", self._tokenizer.bos_id)
        changed[GENERATION_FILE] = to_json(generation)
        return self._tokenizer.with_files(changed)

    def _without_end(self, message: Message) -> Message:
        """Remove an end token from an answer, since the template adds one."""
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, str):
            return message
        if (text := re.sub(rf"(?:{self._stop.pattern})\s*\Z", "", content)) != content:
            self._note(f"adds {self.end_of_turn}; the end token that some answers have already is removed")
        return {**message, "content": text}

    def _tokenize(
        self, messages: Conversation, text: str, now: datetime, tools: Tools = None, encode: Any = None
    ) -> tuple[list[int], Spans]:
        """Return token ids and offsets of ``text``. If prompts are tokenized separately, split before each answer."""
        borders = {0, len(text)}
        if self._should_split_prompts:
            borders |= {self._prompt_end(messages[:i], text, tools, now) or 0 for i in _answers(messages)}
        ids: list[int] = []
        offsets = []
        for start, end in pairwise(sorted(borders)):
            more, places = (encode or self._tokenizer.encode_with_offsets)(text[start:end])
            ids += more
            offsets += [(start + first, start + last) for first, last in places]
        return ids, offsets

    def _locate_answers(self, messages: Conversation, tools: Tools) -> tuple[str, Spans]:
        """Return the rendered text and the span [start, end) of each answer, including the end-of-turn token."""
        answers = _answers(messages)
        for i in answers:
            content = messages[i].get("content")
            if not messages[i].get("tool_calls") and (not isinstance(content, str) or not content.strip()):
                raise EmptyAnswerError(
                    f"empty answer (message {i + 1} of {len(messages)}): fill it in or remove the row"
                )
        text = self.render(messages, tools=tools)
        self._require_rendered(messages, tools, text)
        eos = ""
        if self._appended and answers[-1:] == [len(messages) - 1]:
            eos = self._appended[bool(messages[-1].get("tool_calls"))]
            text += eos
        spans = [self._locate(messages, i, text, eos, tools) for i in answers]
        self._require_own_text(messages, [text[start:end] for start, end in spans], eos, tools)
        return text, spans

    def _require_own_text(self, messages: Conversation, parts: list[str], eos: str, tools: Tools) -> None:
        """Raise UserError if a part with loss has text of another role: other text around it changes it."""
        placeholders = {
            i: f"message{i}placeholder"
            for i, message in enumerate(messages)
            if message["role"] != "assistant" and (message.get("content") or "").strip()
        }
        other = [{**one, "content": placeholders.get(i, one.get("content"))} for i, one in enumerate(messages)]
        try:
            text = rest = self.render(other, tools=tools) + eos
            for part in filter(None, parts):
                _, found, rest = rest.partition(part)
                if not found:
                    break
            else:
                return
            # A template may read the text, such as /no_think, and begin answers in another way.
            spans = [self._locate(other, i, text, eos, tools) for i in _answers(other)]
        except UserError:  # the template needs the text
            return
        for i, placeholder in placeholders.items():
            if any(placeholder in text[start:end] for start, end in spans):
                raise self._error(
                    f"the text of message {i + 1} ({messages[i]['role']}) is in an answer, where it would be trained "
                    "on; choose a --data.prompt_style, or provide another --data.chat_template"
                )

    def _locate(self, messages: Conversation, i: int, text: str, eos: str, tools: Tools) -> tuple[int, int]:
        """Return the span [start, end) of message ``i``, located by rendering a placeholder instead of the answer."""
        try:
            before, after = self._surrounding_text(messages, i, text, tools)
            after += eos
            if not text.endswith(after):
                raise self._error(
                    f"the text after message {i + 1} depends on that message, so its end cannot be located"
                )
            content_end = len(text) - len(after)
            if messages[i].get("tool_calls") and messages[i + 1 :]:  # a tool's answer may be dropped without its call
                limit = self._surrounding_text(messages, i + 1, text, tools)[0]
                if text.startswith(limit) and content_end > len(limit):
                    raise self._error(f"the text of message {i + 2} depends on message {i + 1}")
            end = content_end + self._length_of_end(after, i)
        except UserError:
            if not messages[i].get("tool_calls"):
                raise
            before, content_end, end = "", len(text), 0  # such as if a tool's answer is rejected without its call
        start = self._start(messages, i, text, content_end, before, tools)
        if not end:  # the last end-of-turn token before the content of the next message
            limit = self._surrounding_text(messages, i + 1, text, tools)[0] if messages[i + 1 :] else text
            ends = self._stop.finditer(commonprefix([text, limit]), start)
            content_end = end = max((match.end() for match in ends), default=start)
            if end == start:
                raise self._error(
                    f"the tool calls of message {i + 1} end with none of {', '.join(self._ends.values())}; add the "
                    f"token that ends them to eos_token_id in {GENERATION_FILE}"
                )
        self._require_tool_calls(messages, i, text[start:content_end])
        if before and text.startswith(before) and not any(map(messages[i].get, REQUIRED_FIELDS[1:])):
            self._heads.add(before[start:])
        if len(self._heads) > 1:
            head = max(self._heads, key=len)
            self._note(f"writes {head!r} before some answers only, such as the last; see --data.train_on last_answer")
        for name in REQUIRED_FIELDS:
            content = str(messages[i].get(name) or "").strip()
            rendered = text[max(0, start - len(content)) : end]  # the generation prompt may have the first characters
            if content in rendered:
                continue
            if not _answers(messages[i + 1 :]) and "".join(content.split()) not in "".join(rendered.split()):
                self._note(f"changes the last answer too, such as dropping its reasoning; {_HINT}")
            else:
                self._note("modifies some answers (such as thinking in earlier turns); the rendered text is trained on")
        return start, end

    def _start(self, messages: Conversation, i: int, text: str, content_end: int, before: str, tools: Tools) -> int:
        """Return the start of an answer: the end of the generation prompt, else the end of ``before``."""
        prompt_end = self._prompt_end(messages[:i], text[:content_end], tools)
        if prompt_end is not None:
            return prompt_end
        # Some templates change earlier turns, such as dropping thinking or moving the system message.
        earlier, prompt = 0, ""  # end of the content before this message; the generation prompt
        with suppress(UserError):
            rest = self._surrounding_text(messages, i - 1, text, tools)[1]
            without, whole = (self.render(messages[:i], adds_prompt, tools) for adds_prompt in (False, True))
            earlier, prompt = text.rfind(rest), whole[len(commonprefix([without, whole])) :]
        if prompt and (start := text.find(prompt, earlier, content_end)) >= 0:
            return start + len(prompt)
        # ``before`` may contain an empty thought, which the template writes only for answers without thinking.
        start = len(commonprefix([text[:content_end], before]))
        if start < len(before or text) and not 0 < earlier <= start:
            raise self._error(
                f"the text before message {i + 1} depends on that message, so its start cannot be located"
            )
        if prompt:
            self._note(f"chat prompts end with {prompt!r}, which does not precede every answer in training; {_HINT}")
        return start

    def _detect_split_prompts(self) -> bool:
        """Whether a prompt tokenizes differently with and without its answer, and splitting between them fixes it.

        For example, newlines at the end of a prompt may merge into one token, but not before an answer.
        """
        text = self.render(EXAMPLE)
        self._control_tokens = tuple(token for token in self._texts.values() if token in text)
        end = self._prompt_end(EXAMPLE[:1], text)
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


def _answers(messages: Conversation) -> list[int]:
    return [i for i, message in enumerate(messages) if message.get("role") == "assistant"]


def eos_tokens(tokenizer: Tokenizer) -> int | list[int] | None:
    """Return EOS ids: from generation_config.json, else EOS and what ends the chat template's answers."""
    eos = tokenizer.settings(GENERATION_FILE).get("eos_token_id")
    if eos is not None:
        return eos
    try:
        ids = ChatTemplate.from_tokenizer(tokenizer, None).stop_ids
    except UserError:  # no template, or one without an end-of-turn token
        return tokenizer.eos_id
    return ids if len(ids) > 1 else ids[0]
