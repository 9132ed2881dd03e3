"""A conversation with a model: its messages, and the keys and values of what it has read of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from toolkit.data.chat_template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.generate import generate
from toolkit.inference.kv_cache import KVCache
from toolkit.inference.text import TextStream, require_embedded, stop_tokens

if TYPE_CHECKING:
    from toolkit.models.gpt import GPT


def find_template(tokenizer: Tokenizer, prompt_style: str | None, flag: str = "--prompt_style") -> ChatTemplate:
    """The prompt style of that name, or the tokenizer's own template.

    Raises:
        UserError: there is neither, or the template is broken; ``flag`` is named.
    """
    in_training = "--data.prompt_style"
    try:
        template = ChatTemplate.from_tokenizer(tokenizer, prompt_style)
    except UserError as error:
        raise UserError(str(error).replace(in_training, flag)) from error
    template.name = template.name.replace(in_training, flag)
    template.notes = [note.replace(in_training, flag) for note in template.notes]
    return template


class Conversation:
    """Questions and answers in turn. Of a question's prompt only what is new is computed.

    Args:
        model: In evaluation mode.
        tokenizer: Its own.
        template: Makes the prompt of the messages.
        system: A message before the first question; None leaves it to the template.
        max_new_tokens: Of an answer.
        sampling: ``temperature``, ``top_k`` and ``top_p``, see :func:`toolkit.inference.sampling.sample`.
        seed: Of the first answer; each further one has the next number.
        notice: Takes one line for people.

    Raises:
        UserError: the template takes no such messages.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        system: str | None,
        max_new_tokens: int,
        sampling: dict[str, Any],
        seed: int,
        notice: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ) -> None:
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.new_tokens = 0  # of the last answer
        self._model, self._tokenizer, self._template, self._notice = model, tokenizer, template, notice
        self._max_new_tokens, self._sampling, self._seed = max_new_tokens, sampling, seed
        self._eos_ids = {*stop_tokens(tokenizer), tokenizer.added_tokens[template.end_of_turn]}
        weight = model.transformer.wte.weight
        self._cache = KVCache(model.config, 1, 0, weight.device, weight.dtype)
        self._read: list[int] = []  # the tokens whose keys and values the cache holds
        template.encode_prompt([*self.messages, {"role": "user", "content": "question"}])

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer piece by piece.

        An answer that is closed or interrupted counts as far as it came; with none at all the question is forgotten.

        Raises:
            UserError: at the call: the context has no room for the answer, or the model does not know a token; the
                conversation is as it was before.
            GuardError: the logits are not finite.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        ids, limit = self._template.encode_prompt(messages), self._model.config.block_size
        require_embedded(ids, self._model.config, self._tokenizer.name)
        if len(ids) >= limit:
            raise UserError(
                f"the conversation has {len(ids)} tokens with this question; the model's context of {limit} leaves no "
                "room for an answer: ask something shorter, or begin a new chat"
            )
        settings = {"max_new_tokens": self._max_new_tokens, "seed": self._seed, **self._sampling}
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, self._read, strict=False)))
        self._cache.truncate(min(known, self._cache.length, len(ids) - 1))
        self._seed += 1
        tokens = generate(
            self._model,
            torch.tensor(ids),
            eos_ids=self._eos_ids,
            cache=self._cache,
            notice=self._notice,
            **settings,
        )
        return self._answer(messages, ids, tokens)

    def _answer(self, messages: list[dict[str, Any]], ids: list[int], tokens: Iterator[int]) -> Iterator[str]:
        stream, said = TextStream(self._tokenizer, ids), []
        self.new_tokens = 0
        try:
            for token in tokens:
                said.append(token)
                self.new_tokens = len(said)
                yield stream.push(token)
            yield stream.finish()
            if len(said) == self._max_new_tokens:
                self._notice(f"stopped after {len(said)} tokens; --max_new_tokens allows no more")
        finally:
            self._read = [*ids, *said][: self._cache.length]
            text = self._tokenizer.decode(said)
            if text.strip():
                self.messages = [*messages, {"role": "assistant", "content": text}]
