"""A conversation with a model: its messages, and a KV cache reused across turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile

import torch

from toolkit.data.base import Report
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.generate import generate
from toolkit.inference.sampling import Sampling
from toolkit.inference.text import TextStream, require_embedded, stop_tokens
from toolkit.models.gpt import GPT


def find_template(tokenizer: Tokenizer, prompt_style: str | None = None, file: str | None = None) -> ChatTemplate:
    """Return the chat template: a named prompt style, the template in ``file``, or the tokenizer's."""
    try:
        template = ChatTemplate.from_tokenizer(tokenizer, prompt_style, file)
    except UserError as error:
        raise UserError(_for_chat(str(error))) from error
    template.name = _for_chat(template.name)
    template.notes = [_for_chat(note) for note in template.notes]
    return template


def _for_chat(message: str) -> str:
    """Adapt a training message to ``toolkit chat``: replace flag names and drop the note about saving."""
    message = message.replace(", and is saved with the model", "")
    return message.replace("--data.prompt_style", "--prompt_style").replace("--data.chat_template", "--chat_template")


@dataclass
class Conversation:
    """A multi-turn chat. The KV cache is reused, so only new prompt tokens are computed.

    Args:
        model: The model, in evaluation mode.
        tokenizer: The model's tokenizer.
        template: Chat template that renders the messages.
        system: System message; None for the template's default.
        max_new_tokens: Maximum tokens of an answer.
        sampling: How to choose the tokens.
        seed: Seed of the first answer, incremented for each further answer.
        notice: Called with one line for the user.
    """

    model: GPT
    tokenizer: Tokenizer
    template: ChatTemplate
    _: KW_ONLY
    system: str | None
    max_new_tokens: int
    sampling: Sampling
    seed: int
    notice: Report

    def __post_init__(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.new_tokens = 0  # in the last answer
        self._eos_ids = {*stop_tokens(self.tokenizer), *self.template.stop_ids}
        self._cache = self.model.make_cache(1, 0)
        self._cached_ids: list[int] = []  # the tokens in the KV cache
        self.template.encode_prompt([*self.messages, {"role": "user", "content": "question"}])

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer as a stream of text.

        If the generator is closed or interrupted, the partial answer is kept. An empty answer drops the question.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        ids, limit = self.template.encode_prompt(messages), self.model.config.block_size
        require_embedded(ids, self.model.config.padded_vocab_size, self.tokenizer.name)
        if len(ids) >= limit:
            raise UserError(
                f"with this question the conversation has {len(ids)} tokens, but must have fewer than {limit} (the "
                "model's context length); shorten the question or start a new chat"
            )
        n_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, self._cached_ids, strict=False)))
        self._cache.truncate(min(n_common, self._cache.length, len(ids) - 1))
        tokens = generate(
            self.model, torch.tensor(ids), max_new_tokens=self.max_new_tokens, sampling=self.sampling, seed=self.seed,
            eos_ids=self._eos_ids, cache=self._cache, notice=self.notice,
        )  # fmt: skip
        self.seed += 1
        stream, answer = TextStream(self.tokenizer, ids), list[int]()
        self.new_tokens = 0
        try:
            for token in tokens:
                answer.append(token)
                self.new_tokens = len(answer)
                yield stream.push(token)
            yield stream.finish()
            if len(answer) == self.max_new_tokens:
                self.notice(f"stopped after {len(answer)} tokens: --max_new_tokens reached")
        finally:
            self._cached_ids = [*ids, *answer][: self._cache.length]
            text = self.tokenizer.decode(answer)
            if text.strip():
                self.messages = [*messages, {"role": "assistant", "content": text}]
