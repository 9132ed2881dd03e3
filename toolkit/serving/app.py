"""The HTTP application: routes, checks and errors."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.batcher import Batcher, Request, Sampling
from toolkit.inference.text import encode_prompt, require_embedded, stop_tokens
from toolkit.serving.answer import ChatFormat, CompletionFormat, Piece, read_pieces
from toolkit.serving.protocol import FIELDS, ApiError, Body, ChatBody, CompletionBody

MAX_BODY_BYTES = 4 * 2**20


@dataclass
class Service:
    """The endpoints of a model, and the limits of requests.

    Args:
        name: The model's name in requests.
        batcher: Computes the answers.
        tokenizer: The model's tokenizer.
        template: Chat template, or the reason that there is none.
        sampling: Settings of requests that do not have their own.
        max_new_tokens: Tokens of an answer, unless the request has its own.
        max_active: Maximum number of requests in the batch and waiting.
    """

    name: str
    batcher: Batcher
    tokenizer: Tokenizer
    template: ChatTemplate | UserError
    sampling: Sampling
    max_new_tokens: int
    max_active: int

    def __post_init__(self) -> None:
        self._created, self._eos_ids = int(time.time()), set(stop_tokens(self.tokenizer))

    async def complete(self, body: CompletionBody, http: HttpRequest) -> Response:
        await self.model(body.model)
        prompt, config = body.prompt, self.batcher.model.config
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(encode_prompt, self.tokenizer, prompt, config)
        else:
            ids = [part for part in prompt if isinstance(part, int)]
            if not prompt or len(ids) < len(prompt):
                raise ApiError(400, f"prompt: has {len(prompt)} texts, but a request must have one", "prompt")
            if max(ids) >= config.padded_vocab_size:
                raise ApiError(
                    400, f"prompt: has token {max(ids)}; the last is {config.padded_vocab_size - 1}", "prompt"
                )
        return await self._answer(body, http, ids, self._eos_ids, CompletionFormat)

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        await self.model(body.model)
        if isinstance(self.template, UserError):
            raise ApiError(400, str(self.template), "messages")
        messages = [message.plain() for message in body.messages]
        ids = await asyncio.to_thread(self.template.encode_prompt, messages)
        require_embedded(ids, self.batcher.model.config, self.tokenizer.name)
        eos_ids = {*self._eos_ids, *self.template.stop_ids}
        return await self._answer(body, http, ids, eos_ids, ChatFormat)

    # async, because FastAPI would call other functions in a thread
    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        if name != self.name:
            raise ApiError(404, f"model: {name} is not served here; use {self.name}", "model", "model_not_found")
        return {"id": name, "object": "model", "created": self._created, "owned_by": "toolkit"}

    async def health(self) -> dict[str, Any]:
        running = len(self.batcher.running)
        return {"status": "ok", "running": running, "waiting": max(0, self.batcher.n_active - running)}

    async def _answer(
        self, body: Body, http: HttpRequest, ids: list[int], eos_ids: Collection[int], format_class: type[ChatFormat]
    ) -> Response:
        limit, n_active = self.batcher.max_length, self.batcher.n_active
        if len(ids) >= limit:
            field = "prompt" if isinstance(body, CompletionBody) else "messages"
            message = f"the prompt has {len(ids)} tokens, but must have fewer than {limit}; shorten it"
            raise ApiError(400, message, field, "context_length_exceeded")
        if n_active >= self.max_active:
            raise ApiError(429, f"{n_active} requests are running or waiting; try again later", None, "queue_full")
        count = min(body.max_answer or self.max_new_tokens, limit - len(ids))
        settings = {name: value for name in Sampling._fields if (value := getattr(body, name)) is not None}
        request = Request(ids, count, self.sampling._replace(**settings), body.seed, eos_ids, body.n_top)
        form = format_class(self.tokenizer, request, self.name)
        pieces = read_pieces(self.batcher, self.tokenizer, request, body.stops)
        if body.stream:
            return StreamingResponse(form.events(pieces, body.include_usage), media_type="text/event-stream")
        answer, end = asyncio.ensure_future(_collect(pieces)), asyncio.ensure_future(_until_disconnect(http))
        try:
            await asyncio.wait([answer, end], return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(form.response(answer.result())) if answer.done() else Response(status_code=499)
        finally:
            answer.cancel()
            end.cancel()


async def _collect(pieces: AsyncGenerator[Piece, None]) -> Piece:
    """Return the complete answer."""
    async with aclosing(pieces):
        texts, tokens, reasons = zip(*[piece async for piece in pieces], strict=True)
    return Piece("".join(texts), list(chain.from_iterable(tokens)), reasons[-1])


async def _until_disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Gatekeeper:
    """Middleware that checks the API key and the Host header before the body is read, and limits the body.

    Args:
        app: The application.
        api_key: The key that all requests must have, except to /health; None: no key.
        hosts: Without a key, valid hosts: a web page must not reach a local server through another name.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts
        self._expected = None if api_key is None else b"Bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        error = self._find_error(scope) if scope["type"] == "http" else None
        await (self._app if error is None else _error_response(error))(scope, receive_limited, send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":  # a web page may post other types without asking
            return ApiError(415, "the header Content-Type must be application/json")
        if self._expected is None:
            host = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1"))
            return None if host in self._hosts else ApiError(403, f"host {host}: is not served here")
        if scope["path"] == "/health" or hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return None
        return ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")


def make_app(service: Service, api_key: str | None, hosts: Collection[str]) -> FastAPI:
    """Return the application; see :class:`Gatekeeper` for ``api_key`` and ``hosts``."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(Gatekeeper, api_key=api_key, hosts=hosts)
    for error_class in (ApiError, RequestValidationError, AnyHTTPException, UserError, Exception):
        app.add_exception_handler(error_class, lambda http, error: _error_response(_to_api_error(error)))
    app.get("/health")(service.health)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/completions")(service.complete)
    app.post("/v1/chat/completions")(service.chat)
    return app


def _error_response(error: ApiError) -> Response:
    return JSONResponse({"error": error.body}, error.status)


def _to_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        # in the union member that fits best: where a part of the value is wrong, or its size, but not its type
        first = max(error.errors(), key=lambda found: (len(found["loc"]), not found["type"].endswith("_type")))
        if first["type"] == "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}")
        if first["type"] == "missing" and first["loc"] == ("body",):
            return ApiError(400, "the body is empty, but must be a JSON object")
        param = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in FIELDS) or None
        return ApiError(400, f"{param or 'the body'}: {first['msg']}", param)
    if isinstance(error, AnyHTTPException) and error.status_code == 404:
        return ApiError(404, "no such path; there are /v1/chat/completions, /v1/completions, /v1/models and /health")
    if isinstance(error, AnyHTTPException):
        is_body = isinstance(error.__cause__, RecursionError | ValueError)  # FastAPI's message has no reason
        reason = "the body nests too deeply or has a number that is too long"
        return ApiError(error.status_code, reason if is_body else str(error.detail))
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    return ApiError(500, "internal error; see the server's messages")
