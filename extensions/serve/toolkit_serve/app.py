"""The HTTP application: routes, checks and errors."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.sampling import Sampling
from toolkit.inference.text import encode_prompt, require_embedded, stop_tokens
from toolkit_serve.answer import ChatFormat, CompletionFormat, Items, Json, Piece, read_pieces
from toolkit_serve.batcher import Batcher, Request
from toolkit_serve.protocol import FIELDS, ApiError, Body, ChatBody, CompletionBody


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

    Attributes:
        active: Items of the requests that are parsed, waiting or in the batch.
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
        self.active: set[Items] = set()
        self.preparing = asyncio.Semaphore(2)  # it takes memory, and pydantic blocks all threads

    @property
    def max_body(self) -> int:
        """Maximum number of bytes of a body: 32 for each token, which has 4 on average, and 64 KiB, at most 4 MiB."""
        return min(2**22, 2**16 + 32 * self.batcher.max_length)

    def stop(self) -> None:
        """End all requests with an error."""
        for items in self.active:
            items.put_nowait(ApiError(503, "the server is stopping"))

    def encode_text(self, body: CompletionBody) -> Request:
        prompt, config = body.prompt, self.batcher.model.config
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = encode_prompt(self.tokenizer, prompt, config)
        else:
            ids = [part for part in prompt if isinstance(part, int)]
            if len(ids) < len(prompt):
                raise ApiError(400, f"prompt: has {len(prompt)} texts, but a request must have one", "prompt")
            if max(ids) >= (size := config.padded_vocab_size):
                raise ApiError(400, f"prompt: has token {max(ids)}; the last is {size - 1}", "prompt")
        return self._request(body, ids, self._eos_ids, "prompt")

    def encode_chat(self, body: ChatBody) -> Request:
        if isinstance(self.template, UserError):
            raise ApiError(400, str(self.template), "messages")
        ids = self.template.encode_prompt([message.plain() for message in body.messages])
        require_embedded(ids, self.batcher.model.config.padded_vocab_size, self.tokenizer.name)
        return self._request(body, ids, {*self._eos_ids, *self.template.stop_ids}, "messages")

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self.describe(self.name)]})

    async def model(self, http: HttpRequest) -> Response:
        return JSONResponse(self.describe(http.path_params["name"]))

    def describe(self, name: str) -> Json:
        """Return the model's description. Raises ApiError for another name."""
        if name != self.name:
            raise ApiError(404, f"model: {name} is not served here; use {self.name}", "model", "model_not_found")
        return {"id": name, "object": "model", "created": self._created, "owned_by": "toolkit"}

    async def health(self, http: HttpRequest) -> Response:
        running = len(self.batcher.running)
        return JSONResponse({"status": "ok", "running": running, "waiting": max(0, len(self.active) - running)})

    def _request(self, body: Body, ids: list[int], eos_ids: Collection[int], field: str) -> Request:
        limit = self.batcher.max_length
        if len(ids) >= limit:
            message = f"the prompt has {len(ids)} tokens, but must have fewer than {limit}; shorten it"
            raise ApiError(400, message, field, "context_length_exceeded")
        count = min(body.max_answer or self.max_new_tokens, limit - len(ids))
        changes = body.model_dump(include={"temperature", "top_k", "top_p"}, exclude_none=True)
        sampling = replace(self.sampling, **changes)
        return Request(ids, count, sampling, body.seed, eos_ids, body.n_top)


@dataclass
class Endpoint:
    """Answers the requests to a path. From its last byte to the end of its answer, a request is active.

    Args:
        service: The service.
        body_class: Class of the body.
        format_class: Writes the answer.
        encode: Method of the service that tokenizes a body.
    """

    service: Service
    body_class: type[Body]
    format_class: type[ChatFormat]
    encode: Callable[[Any], Request]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http, items, service = HttpRequest(scope, receive), Items(), self.service
        content = await http.body()
        if (n_active := len(service.active)) >= service.max_active:
            raise ApiError(429, f"{n_active} requests are running or waiting; try again later", None, "queue_full")
        service.active.add(items)
        try:
            async with service.preparing:
                body = await asyncio.to_thread(self.body_class.model_validate_json, content)
                service.describe(body.model or service.name)
                request = await asyncio.to_thread(self.encode, body)
            form = self.format_class(service.tokenizer, request, service.name)
            pieces = read_pieces(service.batcher, service.tokenizer, request, body.stops, items)
            if body.stream:
                events = form.events(pieces, body.include_usage)
                await StreamingResponse(events, media_type="text/event-stream")(scope, receive, send)
                return
            answer, end = asyncio.ensure_future(_collect(pieces)), asyncio.ensure_future(_until_disconnect(http))
            try:
                await asyncio.wait([answer, end], return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    # in a thread, because the log-probabilities of a long answer take seconds
                    response = await asyncio.to_thread(lambda: JSONResponse(form.response(answer.result())))
                    await response(scope, receive, send)
            finally:
                answer.cancel()
                end.cancel()
        finally:
            service.active.remove(items)


async def _collect(pieces: AsyncGenerator[Piece, None]) -> Piece:
    """Return the complete answer."""
    async with aclosing(pieces):
        texts, tokens, reasons = zip(*[piece async for piece in pieces], strict=True)
    return Piece("".join(texts), list(chain.from_iterable(tokens)), reasons[-1])


async def _until_disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


@dataclass
class Gatekeeper:
    """Middleware that checks the API key and the Host header before the body is read, and limits the body.

    Args:
        app: The application.
        api_key: The key that all requests must have, except to /health; None: no key.
        hosts: Without a key, valid hosts: a web page must not reach a local server through another name.
        max_body: Maximum number of bytes of a body.
    """

    app: ASGIApp
    api_key: str | None
    hosts: Collection[str]
    max_body: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise ApiError(413, f"the body has more than {self.max_body} bytes; shorten the prompt")
            return message

        error = self._find_error(scope)
        await (self.app if error is None else _error_response(error))(scope, receive_limited, send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":  # a web page may post other types without asking
            return ApiError(415, "the header Content-Type must be application/json")
        if self.api_key is None:
            host = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1"))
            return None if host in self.hosts else ApiError(403, f"host {host}: is not served here")
        if scope["path"] == "/health" or hmac.compare_digest(
            headers.get(b"authorization", b""), b"Bearer " + self.api_key.encode()
        ):
            return None
        return ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")


def make_app(service: Service, api_key: str | None, hosts: Collection[str]) -> Starlette:
    """Return the application; see :class:`Gatekeeper` for ``api_key`` and ``hosts``."""
    gatekeeper = Middleware(Gatekeeper, api_key=api_key, hosts=hosts, max_body=service.max_body)
    completions = Endpoint(service, CompletionBody, CompletionFormat, service.encode_text)
    chat = Endpoint(service, ChatBody, ChatFormat, service.encode_chat)
    routes = [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    errors = ApiError, ValidationError, HTTPException, UserError, ClientDisconnect, Exception
    handlers = {error: lambda http, error: _error_response(_to_api_error(error)) for error in errors}
    return Starlette(routes=routes, middleware=[gatekeeper], exception_handlers=handlers)


def _error_response(error: ApiError) -> Response:
    return JSONResponse({"error": error.body}, error.status)


def _to_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        errors = error.errors(include_input=False)
        # in the union member that fits best: where a part of the value is wrong, or its size, but not its type
        first = max(errors, key=lambda found: (len(found["loc"]), not found["type"].endswith("_type")))
        param = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in FIELDS) or None
        return ApiError(400, f"{param or 'the body'}: {first['msg']}", param)
    if isinstance(error, HTTPException) and error.status_code == 404:
        return ApiError(404, "no such path; there are /v1/chat/completions, /v1/completions, /v1/models and /health")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}: completions need POST, other paths GET")
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    return ApiError(500, "internal error; see the server's messages")
