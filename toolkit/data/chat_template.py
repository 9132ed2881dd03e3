"""From messages to tokens, and which of the tokens are the answers: chat templates and prompt styles."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from toolkit.data.schemas import EmptyAnswer, answer_weights
from toolkit.data.template_files import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    has_tool_template,
    own_template,
    prompt_styles,
    read_style,
    read_template,
)  # fmt: skip
from toolkit.data.template_process import ask
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit.data.instruct import TrainOn
    from toolkit.data.tokenizer import Tokenizer

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None

GENERATION_FILE = "generation_config.json"
# What a template that shows the date sees during training: a repeated or resumed run must read the same tokens.
TRAINING_DATE = datetime(2024, 7, 26)
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
        self._has_tool_template = False  # and this is not it
        self._named_tokens = tokenizer.special_tokens
        self._set_source(source)
        self._appends_eos = False  # after the last answer, where the template puts eos only between turns
        self._end_id = self._find_end()
        self._cuts_at_answers = self._must_cut_at_answers()
        texts = {i: text for text, i in tokenizer.added_tokens.items()}
        self.end_of_turn: str = texts[self._end_id]
        ends = {self._end_id, tokenizer.eos_id} - {None}
        self._ends = {i: texts[i] for i in sorted(ends) if i in texts}
        if "strftime_now" in source:
            self.notes.append(f"{name}: shows the date; in training always {TRAINING_DATE:%d %b %Y}, in a chat today's")

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt_style: str | None, file: str | None = None) -> ChatTemplate:
        """Take the prompt style of that name or the template in ``file``; without them the tokenizer's own template.

        Raises:
            UserError: if there is none, no such style or file, or the template is broken.
        """
        if prompt_style is not None:
            return cls(tokenizer, *read_style(tokenizer, prompt_style))
        if file is not None:
            return cls(tokenizer, *read_template(tokenizer, file))
        found = own_template(tokenizer)
        if found is None:
            raise UserError(
                f"--data.prompt_style: {tokenizer.name} has no chat template, so this must be given: "
                f"one of {', '.join(prompt_styles())}; or a --data.chat_template FILE"
            )
        own, source = found
        template = cls(tokenizer, source, name=f"{tokenizer.name}: {own}")
        template._has_tool_template = has_tool_template(tokenizer)
        return template

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools = None) -> str:
        """Return the text of a conversation as training sees it.

        Raises:
            UserError: if the template refuses the messages (such as the order of their roles) or breaks.
        """
        return self._render(messages, add_generation_prompt, TRAINING_DATE, tools)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to where the model is to answer.

        Raises:
            UserError: see :meth:`render`.
        """
        now = datetime.now()
        return self._tokenize(messages, self._render(messages, True, now), now)[0]

    def encode(self, messages: Sequence[Message], train_on: TrainOn, tools: Tools = None) -> Encoded:
        """Return the tokens of a whole conversation, and which of them are to be predicted.

        An answer reaches from the end of the prompt for it to its end-of-turn token. Tokens that lie on its border
        belong to it, and its tool calls are a part of it. A conversation without an answer has nothing to predict,
        unless ``train_on`` is "all". An answer with a ``weight`` of 0 is never predicted.

        Args:
            messages: Objects with ``role`` and ``content``.
            train_on: The messages of the assistant, the last of them, or every token.
            tools: JSON schemas of the tools that the assistant may call, for the template.

        Raises:
            EmptyAnswer: if an answer is empty.
            UserError: if the template refuses the messages or does not show the tools, an answer cannot be told from
                the rest of the text, or a weight is not one.
        """
        weights = answer_weights(messages, train_on)
        text, spans = self._locate_answers(messages, tools)
        ids, offsets = self._tokenize(messages, text, TRAINING_DATE, tools)
        starts = [start for start, _ in offsets]
        for number, (_, end) in enumerate(spans, 1):
            if ids[bisect_right(starts, end - 1) - 1] not in self._ends:
                raise self._error(f"answer {number} does not end with the token {self.end_of_turn}")
        answers = list(zip(spans, weights, strict=True))
        chosen = answers[-1:] if train_on == "last_answer" else answers
        marked = bytearray(len(text) + 1)  # what is trained, or of "all" what is not
        for (start, end), weight in chosen:
            if weight == (train_on != "all"):
                marked[start:end] = b"\1" * (end - start)
        return Encoded(ids, [(1 in marked[start:end]) == (train_on != "all") for start, end in offsets])

    def export_tokenizer(self) -> Tokenizer:
        """The tokenizer with this template, and with a generation_config.json that stops at the end of an answer."""
        changed = {}
        own = own_template(self._tokenizer, strict=False)
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
        self.source = source
        self._ask(None, TRAINING_DATE)

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, now: datetime, tools: Tools = None
    ) -> str:
        # Templates handle a missing key, but show None as text. A weight is for training, not for the model.
        shown = [
            {key: value for key, value in message.items() if value is not None and key != "weight"}
            for message in messages
        ]
        values = {"messages": shown, "add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None}
        return self._ask(self._named_tokens | values, now)

    def _ask(self, values: dict[str, Any] | None, now: datetime) -> str:
        """The template's text, or "" without values, for which it is only compiled."""
        try:
            answer = ask({"source": self.source, "values": values, "now": now.isoformat()})
        except RecursionError as error:
            raise self._error("the messages are nested too deeply") from error
        if "error" in answer:
            raise self._error(answer["error"])
        return answer["text"]

    def _tokenize(
        self, messages: Sequence[Message], text: str, now: datetime, tools: Tools = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets of a text, cut in front of each answer where that is needed."""
        borders = {0, len(text)}
        if self._cuts_at_answers:
            answers = (i for i, message in enumerate(messages) if message.get("role") == "assistant")
            borders |= {self._prompt_end(messages[:i], text, tools, now) or 0 for i in answers}
        ids, offsets = [], []
        for start, end in pairwise(sorted(borders)):
            more, places = self._tokenizer.encode_with_offsets(text[start:end])
            ids += more
            offsets += [(start + first, start + last) for first, last in places]
        return ids, offsets

    def _prompt_end(
        self, earlier: Sequence[Message], text: str, tools: Tools = None, now: datetime = TRAINING_DATE
    ) -> int | None:
        """Where the prompt for the next answer ends in ``text``, if the text begins with that prompt."""
        try:
            prompt = self._render(earlier, True, now, tools)
        except UserError:  # such as no message at all before the answer
            return None
        return len(prompt) if text.startswith(prompt) else None

    def _locate_answers(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and [start, end) of every answer with its end-of-turn token."""
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        for i in answers:
            content = messages[i].get("content")
            if not messages[i].get("tool_calls") and (not isinstance(content, str) or not content.strip()):
                raise EmptyAnswer(f"empty answer (message {i + 1} of {len(messages)}): give it text or remove it")
        text = self.render(messages, tools=tools)
        if tools:
            self._require_tools_shown(shown=text != self.render(messages))
        eos = ""
        if self._appends_eos and answers[-1:] == [len(messages) - 1]:
            eos = self.end_of_turn
            text += eos
        return text, [self._locate(messages, i, text, eos, tools) for i in answers]

    def _locate(self, messages: Sequence[Message], i: int, text: str, eos: str, tools: Tools) -> tuple[int, int]:
        """[start, end) of answer ``i`` in the whole ``text``, told by rendering it with another answer in its place."""
        before, after = self._around(messages, i, text, tools)
        after += eos
        if not text.endswith(after):
            raise self._error(f"what follows message {i + 1} depends on its text, so that its end cannot be told")
        end_of_content = len(text) - len(after)
        start = self._start(messages[:i], text[:end_of_content], before, tools)
        self._require_tool_calls(messages, i, text[start:end_of_content])
        if (messages[i].get("content") or "").strip() not in text[start:end_of_content]:
            self._note(
                "changes answers (such as those that think, in earlier turns); they are trained as it shows them"
            )
        return start, end_of_content + self._length_of_end(after, i)

    def _require_tools_shown(self, shown: bool) -> None:
        hint = "choose one that does by --data.chat_template FILE, or remove the tools"
        if self._has_tool_template:
            raise self._error(f"another template, tool_use, is for rows with tools; {hint}")
        if not shown:
            raise self._error(f"the template does not show the row's tools; {hint}")

    def _require_tool_calls(self, messages: Sequence[Message], i: int, shown: str) -> None:
        """Raise UserError unless the text of answer ``i`` names all tools that it calls."""
        for call in messages[i].get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or name not in shown:
                raise self._error(
                    f"the template does not show all tool_calls of message {i + 1} of {len(messages)}, so they cannot "
                    "be trained; choose a template that does, or take them out"
                )

    def _around(self, messages: Sequence[Message], i: int, text: str = "", tools: Tools = None) -> tuple[str, str]:
        """The text before and after message ``i``: its content and tool calls."""
        number = 0
        while (mark := f"answer{number}placeholder") in text:
            number += 1
        other = [*messages[:i], {**messages[i], "content": mark, "tool_calls": None}, *messages[i + 1 :]]
        before, found, after = self.render(other, tools=tools).partition(mark)
        if not found or mark in after:
            raise self._error(f"the template shows message {i + 1} {'more than once' if found else 'not at all'}")
        return before, after

    def _start(self, earlier: Sequence[Message], text: str, before: str, tools: Tools) -> int:
        """Where an answer begins: at the end of the prompt for it, if the conversation contains that."""
        end = self._prompt_end(earlier, text, tools)
        if end is not None:
            return end
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
        if eos not in self._tokenizer.added_tokens.values():
            raise self._error(
                f"answers are to end with the tokenizer's eos {self._named_tokens['eos_token']}, an ordinary entry of "
                "its vocabulary; make it an added (special) token in tokenizer.json"
            )
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

    def _must_cut_at_answers(self) -> bool:
        """Whether a prompt alone has other tokens than at the beginning of a conversation, and cutting there helps.

        So it is where newlines at the end of a prompt are one token, but several in front of an answer.
        """
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        text = self.render(turn)
        end = self._prompt_end(turn[:1], text)
        if end is None:
            return False
        whole, prompt, answer = (
            self._tokenizer.encode_with_offsets(part)[0] for part in (text, text[:end], text[end:])
        )
        if whole[: len(prompt)] == prompt:
            return False
        if self._tokenizer.decode(prompt + answer, False) != self._tokenizer.decode(whole, False):
            self._note("prompts have other tokens alone, as a model that answers gets them, than in training")
            return False
        self._note(
            "a prompt alone would have other tokens than together with its answer; the two are encoded apart, "
            "in training as in a chat"
        )
        return True

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


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
