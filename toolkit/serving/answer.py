"""One request from its token ids to the pieces of its answer, and how both endpoints write them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolkit.data.tokenizer import UNFINISHED, Tokenizer
from toolkit.errors import CommandError
from toolkit.inference.batcher import Batcher, NewToken, Request, Sampling
from toolkit.inference.text import TextStream
from toolkit.serving.protocol import ApiError


class Piece(NamedTuple):
    """A part of an answer.

    Args:
        text: New text, which may be empty.
        tokens: The tokens since the last piece.
        finish_reason: "stop" or "length" in the last piece.
    """

    text: str
    tokens: list[NewToken]
    finish_reason: str | None = None


class StopFinder:
    """Cuts a stream of text before the first stop text, which may be spread over several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that no stop text can start in, and whether a stop text was found after it."""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        sizes = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        cut = len(text) - max(sizes, default=0)
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._held


@dataclass(frozen=True)
class Prompt:
    """A prompt and the settings of its answer. See :class:`toolkit.inference.batcher.Request`."""

    ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int | None
    eos_ids: Collection[int]
    n_top: int | None
    stops: Sequence[str]


async def read_pieces(batcher: Batcher, tokenizer: Tokenizer, prompt: Prompt) -> AsyncGenerator[Piece, None]:
    """Yield the answer. Closing the generator removes the request from the batch."""
    loop, items = asyncio.get_running_loop(), asyncio.Queue[NewToken | str | Exception]()
    request = Request(
        prompt.ids,
        prompt.max_new_tokens,
        prompt.sampling,
        prompt.seed,
        prompt.eos_ids,
        prompt.n_top,
        emit=lambda item: loop.call_soon_threadsafe(items.put_nowait, item),
    )
    stream, stops = TextStream(tokenizer, prompt.ids), StopFinder(prompt.stops)
    batcher.waiting.put(request)
    try:
        while isinstance(item := await items.get(), NewToken):
            text, is_stopped = stops.push(stream.push(item.id))
            yield Piece(text, [item], "stop" if is_stopped else None)
            if is_stopped:
                return
            await asyncio.sleep(0)  # after a pause of the client there may be many items; others must get their turn
        if isinstance(item, CommandError):
            raise ApiError(500, str(item)) from item
        if isinstance(item, Exception):
            raise ApiError(500, "the request failed; see the server's messages") from item
        text, is_stopped = stops.push(stream.finish())
        yield Piece(text if is_stopped else text + stops.finish(), [], "stop" if is_stopped else item)
    finally:
        request.is_done = True


class AnswerFormat:
    """The parts of a response that differ between the endpoints; this class writes chat completions.

    Args:
        tokenizer: Writes the tokens of log-probabilities.
        last_id: The token before the next one; some tokenizers drop a leading space without one.
    """

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, last_id: int) -> None:
        self._tokenizer, self._last_id = tokenizer, last_id

    def first(self) -> dict[str, Any] | None:
        """Return the delta before the first piece of a stream."""
        return {"delta": {"role": "assistant", "content": ""}}

    def chunk(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def complete(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def log_probs(self, tokens: list[NewToken]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens and of their alternatives."""
        content = []
        for new in tokens:
            entry = self._entry(new.id, new.log_prob)
            content.append(entry | {"top_logprobs": [self._entry(*pair) for pair in new.top]})
            self._last_id = new.id
        return {"content": content, "refusal": None}

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": log_prob, "bytes": None if UNFINISHED in text else list(text.encode())}

    def _text(self, token: int) -> str:
        before = self._tokenizer.decode([self._last_id], skip_special_tokens=False)
        text = self._tokenizer.decode([self._last_id, token], skip_special_tokens=False).removeprefix(before)
        return text or self._tokenizer.decode([token], skip_special_tokens=False)  # incomplete after incomplete bytes


class CompletionFormat(AnswerFormat):
    """Writes text completions."""

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    _offset = 0

    def first(self) -> dict[str, Any] | None:
        return None

    def chunk(self, text: str) -> dict[str, Any]:
        return {"text": text}

    complete = chunk

    def log_probs(self, tokens: list[NewToken]) -> dict[str, Any]:
        written: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for new in tokens:
            text = self._text(new.id)
            written["tokens"].append(text)
            written["token_logprobs"].append(new.log_prob)
            written["top_logprobs"].append({self._text(i): log_prob for i, log_prob in new.top})
            written["text_offset"].append(self._offset)
            self._offset += len(text)
            self._last_id = new.id
        return written
