"""The HTTP application: routes, checks and responses."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, one_line
from toolkit.inference.batcher import Batcher, Sampling
from toolkit.inference.text import encode_prompt, require_embedded, stop_tokens
from toolkit.serving.answer import AnswerFormat, CompletionFormat, Piece, Prompt, read_pieces
from toolkit.serving.protocol import FIELDS, ApiError, Body, ChatBody, CompletionBody

MAX_BODY_BYTES = 4 * 2**20


@dataclass
class Service:
    """A model and the limits of its requests.

    Args:
        name: The model's name in requests.
        batcher: Computes the answers.
        tokenizer: The model's tokenizer.
        template: Chat template, or the reason that there is none.
        sampling: Settings of requests that do not have their own.
        max_new_tokens: Tokens of an answer, unless the request has its own.
        max_length: Maximum number of tokens of prompt and answer.
        max_active: Maximum number of requests in the batch and waiting.
    """

    name: str
    batcher: Batcher
    tokenizer: Tokenizer
    template: ChatTemplate | UserError
    sampling: Sampling
    max_new_tokens: int
    max_length: int
    max_active: int
    n_active: int = 0

    def __post_init__(self) -> None:
        self._created, self._eos_ids = int(time.time()), set(stop_tokens(self.tokenizer))

    async def complete(self, body: CompletionBody, http: Request) -> Response:
        await self._check(body)
        ids = await asyncio.to_thread(self._encode, body.prompt)
        prompt = self._prompt(body, ids, self._eos_ids, body.max_tokens)
        return await self._respond(body, http, prompt, CompletionFormat(self.tokenizer, ids[-1]))

    async def chat(self, body: ChatBody, http: Request) -> Response:
        await self._check(body)
        if isinstance(self.template, UserError):
            raise ApiError(400, str(self.template), "messages")
        messages = [message.plain() for message in body.messages]
        ids = await asyncio.to_thread(self.template.encode_prompt, messages)
        require_embedded(ids, self.batcher.model.config, self.tokenizer.name)
        eos_ids = {*self._eos_ids, self.tokenizer.added_tokens[self.template.end_of_turn]}
        prompt = self._prompt(body, ids, eos_ids, body.max_completion_tokens or body.max_tokens)
        return await self._respond(body, http, prompt, AnswerFormat(self.tokenizer, ids[-1]))

    # async, because FastAPI would call other functions in a thread
    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        if name != self.name:
            raise ApiError(404, f"model: {name} is not served here; use {self.name}", "model", "model_not_found")
        return {"id": name, "object": "model", "created": self._created, "owned_by": "toolkit"}

    async def health(self) -> dict[str, Any]:
        running = len(self.batcher.running)
        return {"status": "ok", "running": running, "waiting": max(0, self.n_active - running)}

    async def _check(self, body: Body) -> None:
        await self.model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream true", "stream_options")

    def _encode(self, prompt: str | list[int] | list[str]) -> list[int]:
        config = self.batcher.model.config
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = encode_prompt(self.tokenizer, prompt, config)
        elif all(isinstance(part, int) for part in prompt):
            ids = [part for part in prompt if isinstance(part, int)]
            require_embedded(ids, config, "prompt")
        else:
            raise ApiError(400, f"prompt: has {len(prompt)} texts; send one per request", "prompt")
        if not ids:
            raise ApiError(400, "prompt: is empty", "prompt")
        return ids

    def _prompt(self, body: Body, ids: list[int], eos_ids: Collection[int], max_tokens: int | None) -> Prompt:
        if len(ids) >= self.max_length:
            message = f"the prompt has {len(ids)} tokens, but must have fewer than {self.max_length}; shorten it"
            raise ApiError(400, message, "prompt" if isinstance(body, CompletionBody) else "messages",
                           "context_length_exceeded")  # fmt: skip
        wanted = {name: value for name in Sampling._fields if (value := getattr(body, name)) is not None}
        count = min(max_tokens or self.max_new_tokens, self.max_length - len(ids))
        sampling = self.sampling._replace(**wanted)
        return Prompt(ids, count, sampling, body.seed, eos_ids, body.n_top, body.stops)

    async def _respond(self, body: Body, http: Request, prompt: Prompt, form: AnswerFormat) -> Response:
        if self.n_active >= self.max_active:
            raise ApiError(429, f"{self.n_active} requests are running or waiting; try again later", None, "queue_full")
        head = {"id": f"{form.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        pieces = self._read(prompt)
        if body.stream:
            events = self._events(pieces, body, prompt, form, head | {"object": form.chunk_object})
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        answer = asyncio.ensure_future(_collect(pieces))
        left = asyncio.ensure_future(_until_disconnect(http))
        try:
            await asyncio.wait([answer, left], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=499)  # nobody reads it
            whole = answer.result()
        finally:
            answer.cancel()
            left.cancel()
        choice = form.complete(whole.text) | _rest(whole, prompt, form)
        usage = _usage(prompt, len(whole.tokens))
        return JSONResponse(head | {"object": form.object, "choices": [choice], "usage": usage})

    async def _read(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        self.n_active += 1
        pieces = read_pieces(self.batcher, self.tokenizer, prompt)
        try:
            async for piece in pieces:
                yield piece
        finally:
            self.n_active -= 1
            await pieces.aclose()

    async def _events(
        self, pieces: AsyncGenerator[Piece, None], body: Body, prompt: Prompt, form: AnswerFormat, head: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        """Yield server-sent events."""
        count, include_usage = 0, body.stream_options is not None and bool(body.stream_options.include_usage)
        extra = {"usage": None} if include_usage else {}
        try:
            if (first := form.first()) is not None:
                choice = first | {"index": 0, "logprobs": None, "finish_reason": None}
                yield _event(head | extra | {"choices": [choice]})
            async for piece in pieces:
                count += len(piece.tokens)
                if piece.text or piece.finish_reason or prompt.n_top is not None:
                    yield _event(head | extra | {"choices": [form.chunk(piece.text) | _rest(piece, prompt, form)]})
            if include_usage:
                yield _event(head | {"choices": [], "usage": _usage(prompt, count)})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event({"error": error.body})
        finally:
            await pieces.aclose()


def _rest(piece: Piece, prompt: Prompt, form: AnswerFormat) -> dict[str, Any]:
    log_probs = None if prompt.n_top is None else form.log_probs(piece.tokens)
    return {"index": 0, "logprobs": log_probs, "finish_reason": piece.finish_reason}


def _usage(prompt: Prompt, count: int) -> dict[str, int]:
    n_prompt = len(prompt.ids)
    return {"prompt_tokens": n_prompt, "completion_tokens": count, "total_tokens": n_prompt + count}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _collect(pieces: AsyncGenerator[Piece, None]) -> Piece:
    """Return the complete answer."""
    text, tokens, reason = [], [], None
    try:
        async for piece in pieces:
            text.append(piece.text)
            tokens += piece.tokens
            reason = piece.finish_reason
    finally:
        await pieces.aclose()
    return Piece("".join(text), tokens, reason)


async def _until_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Gatekeeper:
    """Middleware that checks the API key and the Host header before the body is read, and limits the body.

    Args:
        app: The application.
        api_key: The key that all requests must have, except to /health; None: no key.
        hosts: Without a key, valid hosts: a web page must not reach a local server through a name of its own.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts
        self._expected = None if api_key is None else b"Bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._find_error(scope)) is not None:
            await _error_response(error)(scope, receive, send)
        else:
            await self._app(scope, _limit_body(receive), send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self._expected is None:
            host = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1"))
            return None if host in self._hosts else ApiError(403, one_line(f"host {host}: is not served here"))
        if scope["path"] == "/health" or hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return None
        return ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")


def _limit_body(receive: Receive) -> Receive:
    size = 0

    async def receive_limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return message

    return receive_limited


def make_app(service: Service, api_key: str | None, hosts: Collection[str]) -> FastAPI:
    """Return the application; see :class:`Gatekeeper` for ``api_key`` and ``hosts``."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(Gatekeeper, api_key=api_key, hosts=hosts)
    for error_class in (ApiError, RequestValidationError, AnyHTTPException, UserError, Exception):
        app.add_exception_handler(error_class, _handle)
    app.get("/health")(service.health)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/completions")(service.complete)
    app.post("/v1/chat/completions")(service.chat)
    return app


def _handle(http: Request, error: Exception) -> Response:
    return _error_response(_to_api_error(error))


def _error_response(error: ApiError) -> Response:
    return JSONResponse({"error": error.body}, error.status)


def _to_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        first = max(error.errors(), key=lambda found: len(found["loc"]))  # in the union member that fits best
        if first["type"] == "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}")
        param = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in FIELDS) or None
        return ApiError(400, one_line(f"{param or 'the body'}: {first['msg']}"), param)
    if isinstance(error, AnyHTTPException):
        return ApiError(error.status_code, one_line(error.detail))
    if isinstance(error, UserError):
        return ApiError(400, one_line(error))
    return ApiError(500, "internal error; see the server's messages")
