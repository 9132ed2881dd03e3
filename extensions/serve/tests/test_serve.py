"""`toolkit serve` as a real process, with the openai client: answers, streams, limits, wrong requests, the end."""

import asyncio
import json
import signal
import socket
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import tokenizers
import torch
from helpers.cases import slow_except
from helpers.optional import importorskip_later
from helpers.processes import Forked, finish
from helpers.sealing import seal
from helpers.talker import make_talker
from toolkit_serve.batcher import NewToken, Request

from toolkit.checkpoints.adapters import AdapterInfo, write_adapter_files
from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.cli import main
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.inference.batch import continue_texts
from toolkit.inference.chat import Conversation, find_template
from toolkit.inference.load import load_checkpoint
from toolkit.inference.sampling import GREEDY, Sampling
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import add_lora, is_adapter
from toolkit.models.lora_config import LoRAConfig

pytest.importorskip("starlette")
from toolkit_serve.answer import ChatFormat, CompletionFormat, read_pieces

openai = importorskip_later("openai")

KEY = "a secret"
PROMPTS = ["Q1A", "abc", "Q3AdreiQ", "x", "Q" + "12" * 20, "SbeQ2A", "eins zwei drei", "Q2Azwei"]


@contextmanager
def serving(folder: Path, *options: str, **environ: str):
    """The process and its client; SIGTERM ends it, if it still runs."""
    process = Forked(["serve", str(folder), "--port", "0", "--temperature", "0", *options], **environ)
    try:
        process.first_line = process.stderr.readline()
        assert process.first_line.startswith("http://"), process.first_line + process.stderr.read()
        url = process.first_line.split()[0]
        key = environ.get("TOOLKIT_API_KEY", "none")
        yield process, openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.err = finish(process)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_talker(tmp_path_factory.mktemp("models") / "talker", block_size=128)


@pytest.fixture(scope="module")
def client(folder):
    with serving(folder, "--max_concurrent_requests", "3", TOOLKIT_API_KEY=KEY) as (process, client):
        client.model = str(folder)
        yield client
    assert process.returncode == 143 and process.err == "toolkit serve: stopped by SIGTERM\n"


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A random model without end-of-sequence tokens: an answer of 30,000 tokens takes as long as the test needs."""
    torch.manual_seed(0)
    config = ModelConfig(name="endless", block_size=32768, vocab_size=257, n_layer=1, n_head=2, n_embd=16)
    tokenizer = train_bpe(["abc"], vocab_size=257).with_files({"generation_config.json": b'{"eos_token_id": []}'})
    folder = tmp_path_factory.mktemp("models") / "endless"
    folder.mkdir()
    state = GPT(config).state_dict()
    write_model_files(folder, state_dict=state, config=config, hyperparameters=None, tokenizer=tokenizer)
    return seal(folder)


def complete(client, prompt, max_tokens=40, **options):
    return client.completions.create(model=client.model, prompt=prompt, max_tokens=max_tokens, **options)


def chat(client, question, **options):
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    return client.chat.completions.create(model=client.model, messages=messages, **options)


def send(client, path, body: bytes, headers=()) -> HTTPConnection:
    url = urlsplit(str(client.base_url))
    connection = HTTPConnection(url.hostname, url.port, timeout=60)
    auth = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    connection.request("POST", path, body, auth | dict(headers))
    return connection


def post(client, path, body: bytes, headers=()) -> tuple[int, dict]:
    """The status and the parsed body of a response to any bytes."""
    response = send(client, path, body, headers).getresponse()
    return response.status, json.loads(response.read())


def health(client) -> dict:
    url = urlsplit(str(client.base_url))
    with urllib.request.urlopen(f"http://{url.netloc}/health") as response:
        return json.loads(response.read())


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- answers


def generated(folder, prompts, sampling=GREEDY) -> list[str]:
    """What `toolkit generate` prints after each prompt."""
    options = {"max_new_tokens": 40, "seeds": [7], "batch_size": 1, "notice": print, "sampling": sampling}
    rows = continue_texts(load_model(folder).eval(), Tokenizer.load(folder), prompts, **options)
    return [row.text for row in rows]


@pytest.mark.parametrize("temperature", slow_except([1.2], [0, 1.2]))
def test_completions_are_what_generate_prints_alone_and_together(client, folder, temperature):
    """Eight requests on three rows: most of them join in the middle of the answers of others."""
    expected = generated(folder, PROMPTS, Sampling(temperature, 40, 0.95))
    options = {"temperature": temperature, "seed": 7, "top_p": 0.95, "extra_body": {"top_k": 40}}

    def ask(prompt):
        return complete(client, prompt, **options).choices[0].text

    assert [ask(prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, PROMPTS * 3)) == expected * 3
    assert len(set(expected)) == len(PROMPTS)


def test_a_conversation_is_what_chat_answers(client, folder):
    tokenizer = Tokenizer.load(folder)
    options = {"system": "be", "max_new_tokens": 512, "sampling": GREEDY, "seed": 0, "notice": print}
    conversation = Conversation(load_model(folder).eval(), tokenizer, find_template(tokenizer), **options)
    messages = [{"role": "developer", "content": "be"}]
    for question in ("2", "3", "2", "q"):
        parts = [{"type": "text", "text": part} for part in ("", question)]
        messages.append({"role": "user", "content": parts})
        answer = chat(client, messages)
        assert answer.choices[0].message.content == "".join(conversation.ask(question))
        messages.append(answer.choices[0].message.model_dump())  # with its null fields
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


def test_streams_are_the_answer_in_pieces(client):
    for prompt in PROMPTS:
        whole = complete(client, prompt, logprobs=2)
        options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 2}
        *chunks, last = complete(client, prompt, **options)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
        assert not last.choices and last.usage == whole.usage
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            pieces = [piece for chunk in chunks for piece in getattr(chunk.choices[0].logprobs, name)]
            assert pieces == getattr(whole.choices[0].logprobs, name), name
    deltas = [chunk.choices[0].delta for chunk in chat(client, "2", stream=True)]
    assert deltas[0].role == "assistant" and "".join(delta.content or "" for delta in deltas) == "zwei 🎉"
    assert {delta.content for delta in deltas} >= {"z", "🎉"}  # not in one piece, but complete characters


def test_stop_texts_end_an_answer_and_are_not_part_of_it(client):
    """Every byte is a token."""
    for stop, expected, reason in (
        ("ei", "zw", "stop"),
        (["nothing", "i 🎉", "🎉"], "zwe", "stop"),
        (["ei x", "x"], "zwei 🎉", "stop"),
        ("z", "", "stop"),
    ):
        answer, chunks = chat(client, "2", stop=stop), list(chat(client, "2", stop=stop, stream=True))
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, reason), stop
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chat(client, "2", stop="ei").usage.completion_tokens == 4
    cut = chat(client, "2", max_completion_tokens=3).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("zwe", "length")


@torch.no_grad()
def test_log_probabilities_are_the_models(client, folder):
    ids = Tokenizer.load(folder).encode("Q1Aeins")
    log_probs = load_model(folder).eval()(torch.tensor([ids]))[0, :, :257].log_softmax(-1)
    choice = chat(client, "1", logprobs=True, top_logprobs=3, temperature=1.5, max_tokens=4, seed=1).choices[0]
    greedy = chat(client, "1", logprobs=True, top_logprobs=3).choices[0]
    assert [entry.token for entry in greedy.logprobs.content] == list("eins")
    for entry, row in zip(greedy.logprobs.content, log_probs[2:], strict=False):
        assert entry.logprob == pytest.approx(row.max().item(), abs=1e-5)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
        assert bytes(entry.bytes) == entry.token.encode()
    first = choice.logprobs.content[0]  # not changed by the temperature
    assert first.top_logprobs[0].logprob == pytest.approx(log_probs[2].max().item(), abs=1e-5)


def test_alternatives_have_their_own_names_and_bytes():
    """Parts of a character, as OpenAI writes them, and tokens with equal texts."""
    word = tokenizers.Tokenizer(tokenizers.models.BPE({"<0xE2>": 0, "<0x82>": 1, "a": 2, "<0x61>": 3}, []))
    word.decoder = tokenizers.decoders.ByteFallback()
    byte_level = train_bpe(["abc"], vocab_size=257)
    first, second, _, letter = byte_level.encode("\u20aca", bos=False)
    fallback = Tokenizer({"tokenizer.json": word.to_str().encode()}, "fallback")
    for tokenizer, ids in ((byte_level, (first, second, letter)), (fallback, (0, 1, 2))):
        request = Request([ids[2]], 8, GREEDY, None, (), 3)
        tokens = [NewToken(ids[0], -0.5, [(ids[1], -0.25), (ids[2], -1.0), (ids[0], -0.5)])]
        (entry,) = ChatFormat(tokenizer, request, "m").log_probs(tokens)["content"]
        assert (entry["token"], entry["bytes"]) == ("bytes:\\xe2", [0xE2])
        assert [(top["token"], top["bytes"]) for top in entry["top_logprobs"]] == [
            ("bytes:\\x82", [0x82]), ("a", [0x61]), ("bytes:\\xe2", [0xE2]),
        ]  # fmt: skip
        answer = CompletionFormat(tokenizer, request, "m").log_probs([*tokens, NewToken(ids[1], -2.0, [])])
        assert answer["top_logprobs"][0] == {"bytes:\\xe2": -0.5, "bytes:\\x82": -0.25, "a": -1.0}
        assert answer["text_offset"] == [0, 1]
    request = Request([2], 8, GREEDY, None, (), 2)
    (top,) = CompletionFormat(fallback, request, "m").log_probs([NewToken(3, -2.0, [(2, -1.0)])])["top_logprobs"]
    assert top == {"a": -2.0, "token_id:2": -1.0}  # the sampled token's value is found under its text


def test_a_backlog_of_tokens_lets_other_requests_take_turns():
    """As after a pause of the client. The text is held until the end, as a stop text could begin anywhere in it."""
    turns = 0

    def put(request):
        for item in [NewToken(97)] * 100 + ["length"]:
            request.emit(item)

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read():
        task = asyncio.ensure_future(count_turns())
        batcher, tokenizer = SimpleNamespace(waiting=SimpleNamespace(put=put)), train_bpe(["abc"], 257)
        request = Request([1], 100, Sampling(0, None, 1))
        text = tokenizer.decode([97] * 101)
        pieces = [piece async for piece in read_pieces(batcher, tokenizer, request, [text], asyncio.Queue())]
        task.cancel()
        assert "".join(piece.text for piece in pieces) == text[:-1]
        return pieces

    assert len(asyncio.run(read())) == 101 and turns >= 100


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "bnb.nf4"])
def test_adapters_and_four_bits_are_loaded_as_generate_loads_them(quantize, folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    model, lora = load_model(folder), LoRAConfig(r=4, mlp=True)
    add_lora(model, lora)
    values = {name: torch.randn(p.shape) / 2 for name, p in model.named_parameters() if is_adapter(name)}
    write_adapter_files(tmp_path, values, AdapterInfo(lora, folder, base_fingerprint(folder)))
    files = {"state_dict": None, "config": model.config, "hyperparameters": None, "tokenizer": Tokenizer.load(folder)}
    write_model_files(tmp_path, **files)
    seal(tmp_path)
    options = {"base_checkpoint_dir": None, "accelerator": "cpu", "precision": None, "quantize": quantize}
    loaded = load_checkpoint(str(tmp_path), **options)
    settings = {"max_new_tokens": 40, "seeds": [7], "batch_size": 1, "notice": print, "sampling": GREEDY}
    expected = [row.text for row in continue_texts(loaded.model, loaded.tokenizer, PROMPTS, **settings)]
    with serving(tmp_path, *(["--quantize", quantize] if quantize else [])) as (_, client):
        client.model = str(tmp_path)
        with ThreadPoolExecutor(8) as pool:
            assert [answer.choices[0].text for answer in pool.map(lambda p: complete(client, p), PROMPTS)] == expected


# ---- wrong requests


def test_wrong_bodies_are_errors_that_name_the_field(client):
    ask = {"model": client.model, "messages": [{"role": "user", "content": "1"}]}
    text = {"model": client.model, "prompt": "1"}
    wrong = [
        (ask | {"tools": [{"type": "function"}]}, "tools", "not supported"),
        (ask | {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (ask | {"n": 2}, "n", "not supported"),
        (ask | {"max_token": 2}, "max_token", "did you mean 'max_tokens'"),
        (ask | {"a" * 5000: 2}, "a" * 200, "..."),
        (ask | {"temperature": "hot"}, "temperature", "valid number"),
        (ask | {"temperature": -1}, "temperature", "greater than or equal to 0"),
        (ask | {"max_tokens": 0}, "max_tokens", "greater than 0"),
        (ask | {"stop": [1]}, "stop.0", "string"),
        (ask | {"stop": ""}, "stop", "at least 1"),
        (ask | {"stop": ["a"] * 5}, "stop", "at most 4"),
        (ask | {"stop": "a" * 1025}, "stop", "at most 1024"),
        (ask | {"top_logprobs": 2}, "top_logprobs", "logprobs"),
        (ask | {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (ask | {"messages": []}, "messages", "at least 1"),
        (ask | {"messages": [{"role": "tool", "content": "1"}]}, "messages.0.role", "'system'"),
        (ask | {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0.type", "text"),
        (ask | {"messages": [{"role": "user", "content": "\ud800"}]}, None, "hex escape"),
        (ask | {"model": "\udc00"}, None, "hex escape"),
        ({"model": client.model}, "messages", "required"),
        (ask | {"messages": [{"role": "user", "content": "x" * 200}]}, "messages", "has 202 tokens"),
        (text | {"prompt": "x" * 200}, "prompt", "has 200 tokens, but must have fewer than 128"),
        (text | {"prompt": ["a", "b"]}, "prompt", "has 2 texts"),
        (text | {"prompt": [1, 300_000]}, "prompt", "has token 300000; the last is"),
        (text | {"prompt": []}, "prompt", "at least 1 item"),
        (text | {"echo": True}, "echo", "not supported"),
        (text | {"seed": 2**64}, "seed", "less than"),
        ([], None, "should be an object"),
    ]  # fmt: skip
    for body, param, message in wrong:
        path = "/v1/completions" if isinstance(body, dict) and "prompt" in body else "/v1/chat/completions"
        status, answer = post(client, path, json.dumps(body).encode())
        assert status == 400 and answer["error"]["param"] == param and message in answer["error"]["message"], answer
        assert answer["error"]["type"] == "invalid_request_error" and len(answer["error"]["message"]) <= 2000
    for body, message in (
        (b"[" * 50_000, "recursion limit exceeded"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "number out of range"),
        (b"", "Invalid JSON: EOF"),
        (b"{", "Invalid JSON: EOF"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"NaN", "object"),
        (b'{"model": "x", "prompt": NaN}', "prompt: "),
    ):
        status, answer = post(client, "/v1/completions", body)
        assert status == 400 and message in answer["error"]["message"], (body, answer)
    for kind in ("text/plain", "", "application/jsonx"):
        status, answer = post(client, "/v1/completions", json.dumps(text).encode(), {"Content-Type": kind})
        assert status == 415 and "Content-Type must be application/json" in answer["error"]["message"]
    assert post(client, "/v1/completions", b" " * (5 * 2**20))[0] == 413
    for path in ("/v1/completions", "/v1/chat/completions"):
        with pytest.raises(openai.APIStatusError, match="405.*Method Not Allowed: completions need POST"):
            client.get(path.removeprefix("/v1"), cast_to=object)
    status, answer = post(client, "/v1/embeddings", b"{}")
    assert status == 404 and "there are /v1/chat/completions" in answer["error"]["message"]
    harmless = {"n": 1, "tools": [], "user": "me", "presence_penalty": 0, "response_format": {"type": "text"}}
    messages = [{"role": "user", "content": "1", "name": "me"}]
    assert chat(client, messages, extra_body=harmless).choices[0].message.content == "eins"
    status, answer = post(client, "/v1/completions", json.dumps({"prompt": "1", "max_tokens": 1}).encode())
    assert status == 200 and answer["model"] == client.model  # one model is served


def test_models_and_keys(client, folder):
    assert [model.id for model in client.models.list()] == [str(folder)]
    assert client.models.retrieve(str(folder)).id == str(folder)
    with pytest.raises(openai.NotFoundError, match="other is not served here"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "1"}])
    for key in ("wrong", KEY + "x", "ä"):
        status, answer = post(client, "/v1/completions", b"{", {"Authorization": f"Bearer {key}".encode("latin-1")})
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert health(client)["status"] == "ok"


# ---- limits and the end


def test_full_queue_disconnects_and_signals(endless):
    """One row and one place in the queue."""
    options = ("--max_concurrent_requests", "1", "--max_queue", "1", "--max_seq_length", "32768")
    with serving(endless, *options) as (process, client):
        client.model = str(endless)
        assert "32768 tokens each" in process.first_line and "no API key" in process.first_line
        assert post(client, "/v1/completions", b"{}", {"Host": "attacker.example:80"})[0] == 403
        body = {"model": client.model, "messages": [{"role": "user", "content": "1"}]}
        status, answer = post(client, "/v1/chat/completions", json.dumps(body).encode())
        assert status == 400 and "has no chat template" in answer["error"]["message"]
        running = complete(client, "a", 30_000, stream=True)
        next(iter(running))
        waiting = send(
            client, "/v1/completions", json.dumps({"model": client.model, "prompt": "a", "max_tokens": 30_000}).encode()
        )
        wait_for(lambda: health(client) == {"status": "ok", "running": 1, "waiting": 1})
        with pytest.raises(openai.RateLimitError, match="2 requests are running or waiting"):
            complete(client, "a")
        waiting.close()  # the client of the waiting request leaves
        wait_for(lambda: health(client)["waiting"] == 0)
        running.close()
        wait_for(lambda: health(client) == {"status": "ok", "running": 0, "waiting": 0})
        assert complete(client, "a", 5).usage.completion_tokens == 5

        running = complete(client, "a", 2_000, stream=True)
        next(iter(running))
        process.send_signal(signal.SIGTERM)
        port = urlsplit(str(client.base_url)).port

        def is_closed():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) != 0

        wait_for(is_closed)  # no new requests
        assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length"
        process.wait()
    assert process.returncode == 143 and process.err == "toolkit serve: stopped by SIGTERM\n"


def test_requests_that_outlast_the_shutdown_timeout_end_with_an_error(endless):
    """One streams, one does not, and one has sent half of its body. Nothing but the end is on standard error."""
    with serving(endless, "--shutdown_timeout", "1", "--max_seq_length", "32768") as (process, client):
        client.model = str(endless)
        running = complete(client, "a", 30_000, stream=True)
        next(iter(running))
        url = urlsplit(str(client.base_url))
        with socket.create_connection((url.hostname, url.port)) as half, ThreadPoolExecutor(1) as pool:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            half.sendall(b"Content-Length: 100\r\n\r\n{")
            waiting = pool.submit(complete, client, "a", 30_000)
            wait_for(lambda: health(client)["running"] == 2)
            process.send_signal(signal.SIGHUP)
            with pytest.raises(openai.APIError, match="the server is stopping"):
                list(running)
            with pytest.raises(openai.InternalServerError, match="503.*the server is stopping"):
                waiting.result()
            process.wait()
    assert (process.returncode, process.err) == (129, "toolkit serve: stopped by SIGHUP\n")


def test_ctrl_c_ends_a_background_job(folder):
    """A shell without job control lets its background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with serving(folder) as (process, _):
            signal.signal(signal.SIGINT, before)
            process.send_signal(signal.SIGINT)
            process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == 130 and process.err.endswith("toolkit serve: interrupted\n")


def test_options_that_cannot_work_are_one_line(folder, capsys, monkeypatch):
    def error(*options):
        assert main(["serve", str(folder), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    monkeypatch.delenv("TOOLKIT_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host 127.0.0.1 --port {port}: Address already in use" in error("--port", str(port))
    assert "--host 0.0.0.0: other machines can reach it; set TOOLKIT_API_KEY" in error("--host", "0.0.0.0")
    assert "--max_seq_length 129: the model's context length is 128" in error("--port", "0", "--max_seq_length", "129")
    n = str(10**12)
    assert f"{n} requests of 128 tokens" in error("--port", "0", "--max_concurrent_requests", n)
    assert "--port 70000: must be at most 65535" in error("--port", "70000")
    assert "--host localhost:80: is not an address or a name, such as --host lo" in error("--host", "localhost:80")
    assert "--host 256.1.1.1: is not an address" in error("--host", "256.1.1.1")
    for flag, hint in (
        ("api_key", "set the environment variable TOOLKIT_API_KEY"),
        ("model_name", "--checkpoint_dir"),
        ("devices", "one device serves"),
        ("tensor_parallel_size", "one device serves"),
        ("workers", "--max_concurrent_requests"),
        ("dry_run", "training"),
    ):
        assert hint in error(f"--{flag}", "1"), flag
    monkeypatch.setenv("TOOLKIT_API_KEY", KEY)
    assert "--host no.such.host.invalid --port 8000: " in error("--host", "no.such.host.invalid")
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "serve: needs starlette; run: pip install" in error()


@pytest.mark.slow
def test_a_thousand_requests_leave_nothing_behind(client, folder):
    """The memory, threads and files of the process after 1,000 requests are those after 100."""
    psutil = pytest.importorskip("psutil")
    port = urlsplit(str(client.base_url)).port
    (server,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    process, lock = psutil.Process(server), threading.Lock()

    def ask(i):
        options = {"stop": "ei"} if i % 3 == 0 else {"logprobs": 3}
        answer = complete(client, PROMPTS[i % 8], stream=i % 2 == 0, **options)
        if i % 2 == 0:
            with lock:
                answer.close() if i % 10 == 0 else list(answer)

    def measure(first, last):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(first, last)))
        wait_for(lambda: health(client) == {"status": "ok", "running": 0, "waiting": 0})
        return process.memory_info().rss, process.num_threads(), process.num_fds()

    before, after = measure(0, 100), measure(100, 1000)
    assert after[0] - before[0] < 4 * 2**20 and after[1] <= before[1] + 1 and after[2] <= before[2] + 2, (before, after)
