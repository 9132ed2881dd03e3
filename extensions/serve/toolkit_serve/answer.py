"""The answer to one request: its pieces, and the JSON that both endpoints write of them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from toolkit.data.tokenizer import UNFINISHED, Tokenizer
from toolkit.errors import CommandError
from toolkit.inference.text import TextStream
from toolkit_serve.batcher import Batcher, NewToken, Request
from toolkit_serve.protocol import ApiError

Json = dict[str, Any]
Items = asyncio.Queue[NewToken | str | Exception]
"""What a batcher emits for a request; see :class:`Request`. An ApiError ends the answer."""


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
    """Cuts a stream of text before the first stop text, which may be spread over several pieces.

    The time is linear in the length of the text: a start that no stop text continues from is not tried again.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self.held = stops, ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that no stop text can start in, and whether one follows. The rest is in ``held``."""
        text = self.held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        end = min(places, default=0)
        while end < len(text) and not places and not any(stop.startswith(text[end:]) for stop in self._stops):
            end += 1
        self.held = text[end:]
        return text[:end], bool(places)


async def read_pieces(
    batcher: Batcher, tokenizer: Tokenizer, request: Request, stops: Sequence[str], items: Items
) -> AsyncGenerator[Piece, None]:
    """Yield the answer, which arrives in ``items``. Closing the generator removes the request from the batch."""
    loop = asyncio.get_running_loop()
    request.emit = lambda item: loop.call_soon_threadsafe(items.put_nowait, item)
    stream, finder = TextStream(tokenizer, request.ids), StopFinder(stops)
    batcher.waiting.put(request)
    try:
        while isinstance(item := await items.get(), NewToken):
            text, is_stopped = finder.push(stream.push(item.id))
            yield Piece(text, [item], "stop" if is_stopped else None)
            if is_stopped:
                return
            await asyncio.sleep(0)  # after a pause of the client there may be many items; others must get their turn
        if isinstance(item, ApiError):
            raise item
        if isinstance(item, Exception):
            message = str(item) if isinstance(item, CommandError) else "the request failed; see the server's messages"
            raise ApiError(500, message) from item
        text, is_stopped = finder.push(stream.finish())
        yield Piece(text if is_stopped else text + finder.held, [], "stop" if is_stopped else item)
    finally:
        request.is_done = True


class ChatFormat:
    """Writes chat completions.

    Args:
        tokenizer: Writes the tokens of log-probabilities.
        request: The request.
        model: The model's name.
    """

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    first_choice: Json | None = {"delta": {"role": "assistant", "content": ""}}

    def __init__(self, tokenizer: Tokenizer, request: Request, model: str) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._last_id = request.ids[-1]  # some tokenizers drop the leading space of a token without one before it
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def response(self, answer: Piece) -> Json:
        """Return the complete answer."""
        choice = self.complete(answer.text) | self._common(answer)
        return self._head | {"object": self.object, "choices": [choice], "usage": self._usage(len(answer.tokens))}

    async def events(self, pieces: AsyncGenerator[Piece, None], include_usage: bool) -> AsyncGenerator[str, None]:
        """Yield the answer as server-sent events."""
        head, n_tokens = self._head | {"object": self.chunk_object} | ({"usage": None} if include_usage else {}), 0
        async with aclosing(pieces):
            try:
                if self.first_choice is not None:
                    common = {"index": 0, "logprobs": None, "finish_reason": None}
                    yield _event(head | {"choices": [self.first_choice | common]})
                async for piece in pieces:
                    n_tokens += len(piece.tokens)
                    if piece.text or piece.finish_reason or self._request.n_top is not None:
                        yield _event(head | {"choices": [self.chunk(piece.text) | self._common(piece)]})
                if include_usage:
                    yield _event(head | {"choices": [], "usage": self._usage(n_tokens)})
            except ApiError as error:
                yield _event({"error": error.body})
            yield "data: [DONE]\n\n"

    def chunk(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def complete(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def log_probs(self, tokens: list[NewToken]) -> Json:
        """Return the log-probabilities of the next tokens and of their alternatives."""
        content = []
        for new in tokens:
            alternatives = [self._entry(*pair) for pair in new.top]
            content.append(self._entry(new.id, new.log_prob) | {"top_logprobs": alternatives})
            self._last_id = new.id
        return {"content": content, "refusal": None}

    def _entry(self, token: int, log_prob: float) -> Json:
        text, content = self._read(token)
        return {"token": text, "logprob": log_prob, "bytes": list(content)}

    def _read(self, token: int) -> tuple[str, bytes]:
        """Return a token's text and bytes. As in OpenAI's answers, the text of a part of a character is bytes:\\xe2."""
        before = self._tokenizer.decode([self._last_id], skip_special_tokens=False)
        text = self._tokenizer.decode([self._last_id, token], skip_special_tokens=False).removeprefix(before)
        if text and UNFINISHED not in text:
            return text, text.encode()
        content = self._tokenizer.bytes_of(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content

    def _common(self, piece: Piece) -> Json:
        log_probs = None if self._request.n_top is None else self.log_probs(piece.tokens)
        return {"index": 0, "logprobs": log_probs, "finish_reason": piece.finish_reason}

    def _usage(self, n_tokens: int) -> dict[str, int]:
        n_prompt = len(self._request.ids)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}


class CompletionFormat(ChatFormat):
    """Writes text completions."""

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    first_choice = None
    _offset = 0

    def chunk(self, text: str) -> Json:
        return {"text": text}

    complete = chunk

    def log_probs(self, tokens: list[NewToken]) -> Json:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for new in tokens:
            text, content = self._read(new.id)
            top = {text: new.log_prob}
            for token, log_prob in new.top:
                if token != new.id:
                    name = self._read(token)[0]  # tokens may have one text: a byte and the letter
                    top[f"token_id:{token}" if name in top else name] = log_prob
            for column, value in zip(columns.values(), (text, new.log_prob, top, self._offset), strict=True):
                column.append(value)
            self._offset += sum(byte & 0xC0 != 0x80 for byte in content)  # without the bytes that continue a character
            self._last_id = new.id
        return columns


def _event(content: Json) -> str:
    return f"data: {json.dumps(content)}\n\n"
