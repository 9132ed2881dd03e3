"""Text around a model that knows only ids: where it ends, and how it is shown while it grows."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.data.tokenizer import UNFINISHED, Tokenizer
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig


class TextStream:
    """Turns ids into text piece by piece, and never cuts a character that spans several tokens.

    Args:
        tokenizer: Anything with ``decode(ids) -> str``.
        context: Ids before the first piece, whose text is not shown: some tokenizers drop a space at the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = context[-8:]  # a few are context enough; decoding them all each time would be slow
        self._shown = len(self._ids)  # so many of the ids have been shown ...
        self._start = 0  # ... and these from here on are decoded again, as context of the next

    def push(self, token: int) -> str:
        """Add a token and return the text that is now complete, which may be empty."""
        self._ids.append(token)
        return self._take(finish=False)

    def finish(self) -> str:
        """Return what is left; bytes that never became a character show as the replacement character."""
        return self._take(finish=True)

    def _take(self, finish: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        after = self._tokenizer.decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(UNFINISHED) and not finish):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text: those of its generation_config.json, else the tokenizer's end of document.

    Raises:
        UserError: generation_config.json says something else than ids.
    """
    said = tokenizer.settings("generation_config.json").get("eos_token_id")
    found = tokenizer.eos_id if said is None else said
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) for i in ids):
        raise UserError(
            f"{tokenizer.name}: generation_config.json: eos_token_id {found}: must be an id or a list of ids"
        )
    return ids


def require_embedded(ids: Iterable[int], config: ModelConfig, source: str) -> None:
    """Refuse tokens that the model does not know, which a tokenizer can give that is larger than the model.

    Args:
        ids: To be read by the model.
        config: The model's.
        source: What they come from, for people.

    Raises:
        UserError: naming ``source``: the model has no embedding for one of them.
    """
    largest, known = max(ids, default=0), config.padded_vocab_size
    if largest >= known:
        raise UserError(
            f"{source}: makes the token {largest} of this text, and the model embeds only 0 to {known - 1}; "
            "use the model's own tokenizer"
        )
