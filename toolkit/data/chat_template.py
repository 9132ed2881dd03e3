"""From messages to tokens, and which of the tokens are the answers: chat templates and prompt styles."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from toolkit.data.records import EmptyAnswer
from toolkit.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from toolkit.data.tokenizer import Tokenizer

TrainOn = Literal["answers", "last_answer", "all"]
Message = dict[str, Any]

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
# What a template that shows the date sees during training: a repeated or resumed run must read the same tokens.
TRAINING_DATE = datetime(2024, 7, 26)
# The first lines of a prompt style of ours; they are changed to fit a tokenizer.
_BEGIN = "{%- set begin = bos_token %}"
_NO_BEGIN = "{%- set begin = '' %}"
_END = re.compile(r"\{%- set end_of_turn = '(.*)' %\}")
_END_WITH_EOS = "{%- set end_of_turn = eos_token %}"
_MARKUP = re.compile(r"<\|?[a-z_]+\|?>")
# In front of a template that ends answers with no token: every answer then brings one along.
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
class Encoded:
    """Tokens, and for each whether it is to be predicted. Both have the same length."""

    ids: list[int]
    trained: list[bool]


def prompt_styles() -> list[str]:
    """Names that ``--data.prompt_style`` takes."""
    folder = files("toolkit.data") / "prompt_styles"
    return sorted(file.name.removesuffix(".jinja") for file in folder.iterdir() if file.name.endswith(".jinja"))


def encode_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """Encode plain text, all of it to be predicted: bos where the tokenizer adds one, eos at the end.

    Raises:
        UserError: if the tokenizer has no eos.
    """
    ids = tokenizer.encode(text, eos=True)
    if tokenizer.adds_bos and ids[:2] == [tokenizer.bos_id] * 2:  # the text brought its own
        ids = ids[1:]
    return Encoded(ids, [True] * len(ids))


class ChatTemplate:
    """A jinja template with the tokenizer that it is for. Made by :meth:`of`.

    Attributes:
        name: Where the template comes from, for people.
        source: The template.
        end_of_turn: Text of the token that ends an answer.
        notes: Lines for people: what about this template and tokenizer they might not expect.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, name: str, notes: Sequence[str] = ()) -> None:
        """See :meth:`of`.

        Raises:
            UserError: if the template is broken, or ends answers with no token and the tokenizer has no eos.
        """
        self.name = name
        self.notes = list(notes)
        self._tokenizer = tokenizer
        self._named_tokens = tokenizer.special_tokens
        self._set_source(source)
        self._appends_eos = False  # after the last answer, where the template puts eos only between turns
        self._end_id = self._find_end()
        texts = {i: text for text, i in tokenizer.added_tokens.items()}
        self.end_of_turn: str = texts[self._end_id]
        ends = {self._end_id, tokenizer.eos_id} - {None}
        self._ends = {i: texts[i] for i in sorted(ends) if i in texts}
        if "strftime_now" in source:
            self.notes.append(f"{name}: shows the date; in training always {TRAINING_DATE:%d %b %Y}, in a chat today's")

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt_style: str | None) -> ChatTemplate:
        """Take the prompt style of that name, or without one the template among the tokenizer's files.

        Raises:
            UserError: if there is neither, no such style, or the template is broken.
        """
        if prompt_style is not None:
            return cls(tokenizer, *_read_style(tokenizer, prompt_style))
        found = _own_template(tokenizer)
        if found is None:
            raise UserError(
                f"--data.prompt_style: {tokenizer.name} has no chat template, so this must be given: "
                f"one of {', '.join(prompt_styles())}"
            )
        file, source = found
        return cls(tokenizer, source, name=f"{tokenizer.name}: {file}")

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation as training sees it.

        Raises:
            UserError: if the template refuses the messages (such as the order of their roles) or breaks.
        """
        return self._render(messages, add_generation_prompt, TRAINING_DATE)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to where the model is to answer.

        Raises:
            UserError: see :meth:`render`.
        """
        return self._tokenizer.encode_with_offsets(self._render(messages, True, datetime.now()))[0]

    def encode(self, messages: Sequence[Message], train_on: TrainOn) -> Encoded:
        """Return the tokens of a whole conversation, and which of them are to be predicted.

        An answer reaches from the end of the prompt for it to its end-of-turn token. Tokens that lie on its border
        belong to it. A conversation without an answer has nothing to predict, unless ``train_on`` is "all".

        Args:
            messages: Objects with ``role`` and ``content``.
            train_on: The messages of the assistant, the last of them, or every token.

        Raises:
            EmptyAnswer: if an answer is empty.
            UserError: if the template refuses the messages, or an answer cannot be told from the rest of the text.
        """
        text, spans = self._locate_answers(messages)
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        starts = [start for start, _ in offsets]
        for number, (_, end) in enumerate(spans, 1):
            if ids[bisect_right(starts, end - 1) - 1] not in self._ends:
                raise self._error(f"answer {number} does not end with the token {self.end_of_turn}")
        if train_on == "all":
            return Encoded(ids, [True] * len(ids))
        wanted = bytearray(len(text) + 1)
        for start, end in spans[-1:] if train_on == "last_answer" else spans:
            wanted[start:end] = b"\1" * (end - start)
        return Encoded(ids, [1 in wanted[start:end] for start, end in offsets])

    def export_tokenizer(self) -> Tokenizer:
        """The tokenizer with this template, and with a generation_config.json that stops at the end of an answer."""
        changed = {}
        own = _own_template(self._tokenizer, strict=False)
        if own is None or own[1] != self.source:
            changed[TEMPLATE_FILE] = self.source.encode()
            config = self._tokenizer.settings(CONFIG_FILE)
            if "chat_template" in config:  # older readers look only here
                changed[CONFIG_FILE] = _to_json(config | {"chat_template": self.source})
        generation = self._tokenizer.settings(GENERATION_FILE)
        said = generation.get("eos_token_id")
        known = said if isinstance(said, list) else [] if said is None else [said]
        ends = list(dict.fromkeys([*known, self._tokenizer.eos_id, self._end_id]))
        generation["eos_token_id"] = [i for i in ends if i is not None]
        if self._tokenizer.bos_id is not None:
            generation.setdefault("bos_token_id", self._tokenizer.bos_id)
        changed[GENERATION_FILE] = _to_json(generation)
        return self._tokenizer.with_files(changed)

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.name}: {' '.join(problem.split())}")

    def _set_source(self, source: str) -> None:
        from jinja2 import TemplateError

        from toolkit.data.template_sandbox import compile_template

        self.source = source
        try:
            self._template = compile_template(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" in line {line}"
            raise self._error(f"the template is broken{where}: {error.message}") from error

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, now: datetime) -> str:
        from toolkit.data.template_sandbox import RefusedError

        # Templates handle a missing key, but show None as text.
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                **self._named_tokens,
                messages=shown,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                strftime_now=now.strftime,
            )
        except RefusedError as error:
            raise self._error(f"the template refuses the messages: {error.message}") from error
        except Exception as error:  # a template is a program: it can fail in every way
            raise self._error(f"the template cannot show the messages: {type(error).__name__}: {error}") from error

    def _locate_answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and [start, end) of every answer with its end-of-turn token."""
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        for i in answers:
            content = messages[i].get("content")
            if not isinstance(content, str) or not content.strip():
                raise EmptyAnswer(f"empty answer (message {i + 1} of {len(messages)}): give it text or remove it")
        text = self.render(messages)
        eos = ""
        if self._appends_eos and answers[-1:] == [len(messages) - 1]:
            eos = self.end_of_turn
            text += eos
        return text, [self._locate(messages, i, text, eos) for i in answers]

    def _locate(self, messages: Sequence[Message], i: int, text: str, eos: str) -> tuple[int, int]:
        """[start, end) of answer ``i`` in the whole ``text``, told by rendering it with another answer in its place."""
        before, after = self._around(messages, i, text)
        after += eos
        if not text.endswith(after):
            raise self._error(f"what follows message {i + 1} depends on its text, so that its end cannot be told")
        end_of_content = len(text) - len(after)
        start = self._start(messages[:i], text[:end_of_content], before)
        if messages[i]["content"].strip() not in text[start:end_of_content]:
            self._note(
                "changes answers (such as those that think, in earlier turns); they are trained as it shows them"
            )
        return start, end_of_content + self._length_of_end(after, i)

    def _around(self, messages: Sequence[Message], i: int, text: str = "") -> tuple[str, str]:
        """The text before and after the content of message ``i``."""
        number = 0
        while (mark := f"answer{number}placeholder") in text:
            number += 1
        other = [*messages[:i], {**messages[i], "content": mark}, *messages[i + 1 :]]
        before, found, after = self.render(other).partition(mark)
        if not found or mark in after:
            raise self._error(f"the template shows message {i + 1} {'more than once' if found else 'not at all'}")
        return before, after

    def _start(self, earlier: Sequence[Message], text: str, before: str) -> int:
        """Where an answer begins: at the end of the prompt for it, if the conversation contains that."""
        try:
            prompt = self.render(earlier, add_generation_prompt=True)
        except UserError:  # such as no message at all before the answer
            prompt = None
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        # Templates whose prompt is not part of the whole, because they drop thoughts, or move the system message.
        if text.startswith(before):
            return len(before)
        raise self._error(f"what precedes message {len(earlier) + 1} depends on its text, so its start cannot be told")

    def _length_of_end(self, after: str, i: int) -> int:
        rest = after.lstrip()
        for token in self._ends.values():
            if rest.startswith(token):
                return len(after) - len(rest) + len(token)
        raise self._error(
            f"ends message {i + 1} with no token, so that a model would not learn to stop there; "
            "give a --data.prompt_style, or conversations of one answer"
        )

    def _find_end(self) -> int:
        """The id of the token that ends an answer; a template without one is made to end answers with eos."""
        eos = self._tokenizer.eos_id
        last, between = self._probe()
        if last is not None:
            return last
        if eos is None:
            raise self._error("the template ends answers with no token, and the tokenizer has no eos token")
        if between == eos:
            self._appends_eos = True
            return eos
        self._set_source(_ANSWERS_WITH_EOS + self.source)
        last, _ = self._probe()
        if last != eos:
            raise self._error("the template ends answers with no token; give a --data.prompt_style")
        self._note(f"ends answers with no token; {self._named_tokens['eos_token']} is put after each of them")
        return eos

    def _probe(self) -> tuple[int | None, int | None]:
        """The token that follows an answer: the last of a conversation, and one that a question follows."""
        question = {"role": "user", "content": "question"}
        turn = [question, {"role": "assistant", "content": "answer"}]
        return self._first_token(self._around(turn, 1)[1]), self._first_token(self._around([*turn, *turn], 1)[1])

    def _first_token(self, text: str) -> int | None:
        """The added token that ``text`` begins with, after spaces and newlines."""
        added = set(self._tokenizer.added_tokens.values())
        for id_, (start, end) in zip(*self._tokenizer.encode_with_offsets(text), strict=True):
            if id_ in added or text[start:end].strip():
                return id_ if id_ in added else None
        return None

    def _note(self, note: str) -> None:
        note = f"{self.name}: {note}"
        if note not in self.notes:
            self.notes.append(note)


def _read_style(tokenizer: Tokenizer, style: str) -> tuple[str, str, list[str]]:
    """Source, name and notes of a prompt style, fitted to the tokenizer. The vocabulary stays as it is."""
    known = prompt_styles()
    if style not in known:
        raise UserError(f"--data.prompt_style {style}: must be one of {', '.join(known)}{did_you_mean(style, known)}")
    source = (files("toolkit.data") / "prompt_styles" / f"{style}.jinja").read_text(encoding="utf-8")
    name, notes = f"--data.prompt_style {style}", []
    if _own_template(tokenizer, strict=False) is not None:
        notes.append(f"{name}: is used, and saved with the model, instead of the checkpoint's own chat template")
    if not tokenizer.adds_bos:
        source = source.replace(_BEGIN, _NO_BEGIN)
    end = _END.search(source)
    if end and end[1] not in tokenizer.added_tokens:
        source = source.replace(end[0], _END_WITH_EOS)
        eos = tokenizer.special_tokens.get("eos_token", "eos")
        notes.append(f"{name}: {end[1]} is no token of this vocabulary; turns end with {eos} instead")
    plain = sorted(set(_MARKUP.findall(source)) - set(tokenizer.added_tokens))
    if plain:
        notes.append(f"{name}: {', '.join(plain)}: no token of this vocabulary, encoded as ordinary text")
    return source, name, notes


def _own_template(tokenizer: Tokenizer, strict: bool = True) -> tuple[str, str] | None:
    """File and source of the template among the tokenizer's files; ``strict`` refuses one that cannot be read."""
    if (content := tokenizer.files.get(TEMPLATE_FILE)) is not None:
        try:
            return TEMPLATE_FILE, content.decode("utf-8")
        except UnicodeDecodeError as error:
            if strict:
                raise UserError(f"{tokenizer.name}: {TEMPLATE_FILE}: is not UTF-8") from error
            return None
    said = tokenizer.settings(CONFIG_FILE).get("chat_template")
    if isinstance(said, list):
        named = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, dict)}
        said = named.get("default", {})
    if said is None or isinstance(said, str):
        return None if said is None else (CONFIG_FILE, said)
    if strict:
        raise UserError(
            f"{tokenizer.name}: {CONFIG_FILE}: chat_template must be text or hold a template named 'default'; "
            "or give a --data.prompt_style"
        )
    return None


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
