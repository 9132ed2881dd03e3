"""What a client may make the server do is bounded: bodies, stop texts, connections. Without a model."""

import asyncio
import json
import random
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers.cases import check_each
from helpers.talker import TEMPLATE

from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import train_bpe
from toolkit.distributed.signals import restore_handlers_on_exit
from toolkit.inference.sampling import Sampling

pytest.importorskip("starlette")
from pydantic import ValidationError
from toolkit_serve import server
from toolkit_serve.answer import StopFinder
from toolkit_serve.app import Service, make_app
from toolkit_serve.protocol import ApiError, ChatBody, CompletionBody

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "


@pytest.fixture(scope="module")
def service():
    """With a context of 8,192 tokens."""
    tokenizer = train_bpe(["abc"], vocab_size=257).with_files({"chat_template.jinja": TEMPLATE.encode()})
    batcher = SimpleNamespace(
        max_length=2**13, running=[], model=SimpleNamespace(config=SimpleNamespace(padded_vocab_size=257))
    )
    template = ChatTemplate.from_tokenizer(tokenizer, None)
    return Service("m", batcher, tokenizer, template, Sampling(0.0, None, 1.0), 5, max_active=3)


def post(service, path: str, body: bytes) -> tuple[int, dict]:
    """The status and the parsed body of the application's response. The body arrives in two parts."""
    sent, parts = [], [body[len(body) // 2 :], body[: len(body) // 2]]

    async def receive():
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    asyncio.run(make_app(service, None, {"localhost"})(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


# ---- bodies


def test_large_hostile_bodies_are_refused_in_little_time_with_a_short_answer(service):
    """With an error for each item, 4 MB took 100 s and 3.7 GB."""

    def check(path, key, item, message, end=b""):
        begin = b'{"model": "m", "%s": [' % key
        body = begin + b",".join([item] * (2**18 // (len(item) + 1))) + end + b"]}"
        started_at = time.process_time()
        status, answer = post(service, path, body)
        assert status == 400 and message in answer["error"]["message"], answer
        assert len(json.dumps(answer)) < 4000 and time.process_time() - started_at < 2
        with suppress(ApiError):
            try:
                bodies[path].model_validate_json(body)
            except ValidationError as error:
                assert error.error_count() < 10

    text, chat = "/v1/completions", "/v1/chat/completions"
    bodies = {text: CompletionBody, chat: ChatBody}
    check_each(
        check,
        [
            (text, b"prompt", b"-1", "prompt.0: Input should be greater than or equal to 0"),
            (text, b"prompt", b"{}", "prompt.0: Input should be a valid"),
            (text, b"prompt", b'""', "texts, but a request must have one"),
            (text, b"prompt", b"1", "131072 tokens, but must have fewer than 8192"),
            (text, b"prompt", b'"a"', "prompt.0: Input should be a valid integer", b",1"),
            (text, b"stop", b'"a"', "at most 4 items"),
            (text, b"stop", b"1", "stop.0: Input should be a valid string"),
            (chat, b"messages", b"{}", "messages.0.role: Field required"),
            (chat, b"messages", b'{"role": "user", "content": ""}', "messages: List should have at most 2048 items"),
            (chat, b"messages", b'{"role": "user", "content": [{}]}', "content.0.type: Field required"),
            (chat, b"unknown", b"[]", "messages: Field required"),
        ],
    )
    fields = b",".join(b'"%d": 1' % i for i in range(25_000))
    status, answer = post(service, chat, b'{"model": "m", "messages": [{"role": "user", "content": ""}], %s}' % fields)
    assert status == 400 and answer["error"]["message"] == "0: is not supported; remove it"


def test_a_body_is_as_long_as_the_context_can_use(service):
    for max_length, most in ((128, 2**16 + 2**12), (2**30, 2**22), (2**13, 2**16 + 2**18)):
        service.batcher.max_length = max_length
        assert post(service, "/v1/completions", b" " * most)[0] == 400
        status, answer = post(service, "/v1/completions", b" " * (most + 1))
        assert status == 413 and f"more than {most} bytes" in answer["error"]["message"]


def test_requests_are_counted_before_they_are_parsed(service):
    service.active |= {0, 1, 2}
    try:
        status, answer = post(service, "/v1/completions", b"not even JSON")
    finally:
        service.active.clear()
    assert status == 429 and answer["error"]["code"] == "queue_full"
    assert post(service, "/v1/completions", b"not even JSON")[0] == 400 and not service.active


# ---- stop texts


def test_the_text_before_the_first_stop_text_does_not_depend_on_its_pieces():
    chance = random.Random(0)

    def text(most):
        return "".join(chance.choices("ab", k=chance.randint(1, most)))

    for _ in range(2000):
        whole, stops = text(12), [text(5) for _ in range(chance.randint(1, 3))]
        finder, shown, is_stopped = StopFinder(stops), "", False
        for character in whole:
            new, is_stopped = finder.push(character)
            shown += new
            if is_stopped:
                break
            tail = shown + finder.held  # held is the longest end that a stop text may continue
            assert whole.startswith(tail)
            starts = [i for i in range(len(tail) + 1) if any(stop.startswith(tail[i:]) for stop in stops)]
            assert len(shown) == starts[0], (whole, stops)
        ends = [whole.index(stop) + len(stop) for stop in stops if stop in whole]
        assert is_stopped == bool(ends), (whole, stops)
        if ends:
            first = min(ends)
            assert shown == min((whole[:first].removesuffix(s) for s in stops if whole[:first].endswith(s)), key=len)


def test_long_stop_texts_take_linear_time():
    finder, started_at = StopFinder(["b" * 1000 + "a" + "b" * i for i in (20, 21, 22, 23)]), time.process_time()
    for _ in range(20_000):
        assert not finder.push("b")[1]
    assert finder.push("a" + "b" * 20) == ("", True) and time.process_time() - started_at < 2


# ---- connections


@pytest.fixture
def serve(monkeypatch):
    """Return a function that runs a scenario, a coroutine function that is called with the server and its port."""

    async def run(running, sockets, scenario):
        task = asyncio.ensure_future(running.serve(sockets))
        try:
            await scenario(running, sockets[0].getsockname()[1])
        finally:
            running.handle_exit(signal.SIGINT, None)
            await asyncio.wait_for(task, 60)

    def start(scenario):
        monkeypatch.setattr(server.gc, "freeze", lambda: None)  # this process runs other tests, too
        monkeypatch.setattr(server.Server, "run", lambda self, sockets: asyncio.run(run(self, sockets, scenario)))
        with restore_handlers_on_exit(), pytest.raises(KeyboardInterrupt):
            server.run_server(respond, server.open_socket("127.0.0.1", 0), 0, lambda: None)

    return start


async def respond(scope, receive, send):
    """Read the request; answer /late after a second, /long with 20 MB, /keep with nothing."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/keep":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        return await send({"type": "http.response.body", "body": b""})
    await asyncio.sleep(scope["path"] == "/late")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    for _ in range(20 if scope["path"] == "/long" else 1):
        await send({"type": "http.response.body", "body": b"x" * 10**6, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def get(port, path, pause=0.0, n_sent=0) -> int:
    """The number of bytes of a response, read in steps of a megabyte, to a body that is sent 100 bytes at a time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=10**6)
    writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path, n_sent))
    for _ in range(0, n_sent, 100):
        writer.write(b"x" * 100)
        await asyncio.sleep(0.05)
    size = 0
    while new := await reader.read(10**6):
        size += len(new)
        await asyncio.sleep(pause)
    writer.close()
    return size


def test_clients_that_neither_send_nor_read_are_disconnected(serve, monkeypatch):
    """Others are not, however long their answers take."""
    monkeypatch.setattr(server, "CLIENT_TIMEOUT", 0.2)

    async def is_disconnected(running, port, first, then):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(first)
        for _ in range(50):
            await asyncio.sleep(0.1)
            if not running.server_state.connections:
                break
            writer.write(then)
        writer.transport.abort()
        assert not running.server_state.connections, first

    async def scenario(running, port):
        starts = b"", HEAD, HEAD + b"100\r\n\r\n", b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n"
        steps = [(start, b"") for start in starts] + [(b"GET / HTTP/1.1\r\nX: ", b"y"), (starts[2], b"y")]
        steps.append((b"GET /keep HTTP/1.1\r\nHost: localhost\r\n\r\n", b"y"))  # the next request
        await asyncio.gather(*(is_disconnected(running, port, *step) for step in steps))
        sizes = await asyncio.gather(get(port, b"/late"), get(port, b"/long", pause=0.05), get(port, b"/", n_sent=2000))
        assert sizes[0] > 10**6 and sizes[1] > 20 * 10**6 and sizes[2] > 10**6

    serve(scenario)


def test_new_clients_get_in_when_there_are_too_many_connections(serve, monkeypatch):
    monkeypatch.setattr(server.resource, "getrlimit", lambda kind: (64, 64))

    async def scenario(running, port):
        late = asyncio.ensure_future(get(port, b"/late"))  # being answered, so not ended although it is the oldest
        opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(100)))
        half_open = [writer for _, writer in opened]
        for writer in half_open:
            writer.write(HEAD)
        assert await get(port, b"/") > 10**6 and await late > 10**6
        assert 10 < len(running.server_state.connections) < 30
        for writer in half_open:
            writer.close()

    serve(scenario)


def test_a_client_in_the_middle_of_a_request_does_not_delay_the_end(serve, monkeypatch):
    monkeypatch.setattr(server, "CLIENT_TIMEOUT", 10_000)
    opened = []

    async def scenario(running, port):
        opened.append(await asyncio.open_connection("127.0.0.1", port))
        opened[0][1].write(HEAD + b"100\r\n\r\n{")
        while not any(connection.cycle for connection in running.server_state.connections):
            await asyncio.sleep(0.01)

    serve(scenario)
