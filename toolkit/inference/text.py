"""Encode prompts, find stop tokens and stream token ids as text."""

from collections.abc import Iterable, Iterator

from toolkit.data.chat.template import eos_tokens
from toolkit.data.tokenizer import UNFINISHED, Tokenizer
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig


class TextStream:
    """Decodes a stream of ids, without splitting characters that span several tokens.

    Args:
        tokenizer: An object with ``decode(ids) -> str``.
        context: Token ids before the stream. Decoding needs them, because some tokenizers drop a leading space.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = context[-8:]  # a few ids are enough context; decoding all each time would be slow
        self._shown = len(self._ids)  # number of ids already returned as text
        self._start = 0  # start of the ids that are decoded again as context

    def read(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the new text of each token, which may be empty, and then the remaining text."""
        yield from map(self.push, tokens)
        yield self.finish()

    def push(self, token: int) -> str:
        """Add a token and return the new complete text, which may be empty."""
        self._ids.append(token)
        return self._decode_new(finish=False)

    def finish(self) -> str:
        """Return the remaining text; incomplete bytes become the replacement character."""
        return self._decode_new(finish=True)

    def _decode_new(self, finish: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        after = self._tokenizer.decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(UNFINISHED) and not finish):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the stop tokens: from generation_config.json, else eos and what ends the chat template's answers."""
    eos = eos_tokens(tokenizer)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(f"{tokenizer.name}: generation_config.json: eos_token_id {eos}: must be an id or a list of ids")
    return ids


def encode_prompt(tokenizer: Tokenizer, text: str, config: ModelConfig) -> list[int]:
    """Return the token ids of a prompt; bos, or else eos, if the prompt is empty."""
    ids = tokenizer.encode(text) or [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    require_embedded(ids, config.padded_vocab_size, tokenizer.name)
    return ids


def require_embedded(ids: Iterable[int], n_embeddings: int, source: str) -> None:
    """Raise UserError for a token id without an embedding; the tokenizer's vocabulary may be larger.

    ``source`` is the origin of the ids, for the message.
    """
    largest = max(ids, default=0)
    if largest >= n_embeddings:
        raise UserError(
            f"{source}: encodes this text with token {largest}, but the model has embeddings only for 0 to "
            f"{n_embeddings - 1}; use the model's own tokenizer"
        )
