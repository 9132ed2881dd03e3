"""A server under attack: /health answers within a second, others get right answers, and it ends in one line."""

import json
import random
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from helpers.processes import finish
from helpers.talker import ANSWERS
from toolkit_serve.server import CLIENT_TIMEOUT

from tests.faults.attacked import CHAT, LENGTH, QUEUE, ROWS, TEXT, Server
from tests.faults.core import Way

MAX_HEALTH_S = 1.0
"""Of the worst answer of /health in a round, as the median of ROUNDS."""
ROUNDS = 3
MAX_GROWTH_MIB = 400
SIGNALS = {"SIGTERM": "stopped by SIGTERM", "SIGINT": "interrupted", "SIGHUP": "stopped by SIGHUP"}


def hostile_bodies(server: Server, chance: random.Random) -> int:
    """Bodies that took seconds to minutes and gigabytes, as long as is allowed and longer."""

    def many(field: str, item: str, size: int) -> bytes:
        return f'{{"model": "{server.name}", "{field}": [{",".join([item] * (size // (len(item) + 1)))}]}}'.encode()

    def of(path: str, size: int, **fields: object) -> tuple[str, bytes]:
        return path, json.dumps({"model": server.name, "max_tokens": 4} | fields).encode()

    bodies = []
    for size in (2**16 + 32 * LENGTH - 200, 3_900_000):
        texts, chats = ("-1", "1", "{}", '"a"', '"a",1'), ("{}", '{"role": "user", "content": ""}')
        bodies += [(TEXT, many("prompt", item, size)) for item in texts]
        bodies += [(CHAT, many("messages", item, size)) for item in (*chats, '{"role": "user", "content": [{}]}')]
        bodies += [(TEXT, many("unknown", "[]", size)), of(TEXT, size, prompt="x", **{"y" * size: 1})]
        bodies += [of(TEXT, size, prompt="x" * size), of(TEXT, size, prompt="x", stop="b" * size)]
        bodies += [of(CHAT, size, messages=[{"role": "user", "content": "x " * (size // 2)}])]
        bodies += [(TEXT, b"[" * size), of(TEXT, size, prompt="x", **{str(i): 1 for i in range(size // 20)})]
    chance.shuffle(bodies)
    with ThreadPoolExecutor(6) as pool:
        for status, answer in pool.map(lambda body: server.send(*body), bodies):
            assert status in (0, 400, 413, 429) and len(answer) < 5000, f"status {status}, {answer[:100]!r}"
    return len(bodies)


def many_clients(server: Server, chance: random.Random) -> int:
    """200 at once: each gets the right answer or 429."""
    questions = chance.choices(list(ANSWERS), k=200)
    with ThreadPoolExecutor(200) as pool:
        results = list(pool.map(server.chat, questions))
    wrong = [r for q, r in zip(questions, results, strict=True) if r not in ((200, ANSWERS[q]), (429, ""))]
    assert not wrong and sum(status == 200 for status, _ in results) >= ROWS + QUEUE, wrong[:3]
    return len(results)


def slow_readers(server: Server, chance: random.Random) -> int:
    """As many as run at once never read their long answers; the places are free again, and others get answers."""
    content = server.request(TEXT, prompt="x", max_tokens=3000, logprobs=20, stream=True)
    with ExitStack() as stack:
        for _ in range(ROWS):
            stack.enter_context(server.open(content, buffer=1024))
        server.wait_for(60, running=ROWS)
        server.wait_for(180 + 4 * CLIENT_TIMEOUT, running=0, waiting=0)
        assert server.chat("1") == (200, ANSWERS["1"])
    return ROWS


def half_open(server: Server, chance: random.Random) -> int:
    """100 connections that send part of a request, with 64 descriptors; each is closed."""
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, 64))
    whole = server.request(TEXT, prompt="x" * 1000)
    with ExitStack() as stack:
        clients = [stack.enter_context(server.open(whole[: chance.randint(0, 900)])) for _ in range(100)]
        for client in clients:
            with suppress(ConnectionError):
                assert client.recv(1) == b"", "an answer to half a request"
        assert server.chat("1") == (200, ANSWERS["1"])
    return len(clients)


ATTACKS: dict[str, Callable[[Server, random.Random], int]] = {
    "hostile bodies": hostile_bodies,
    "200 clients": many_clients,
    "slow readers": slow_readers,
    "half-open connections": half_open,
}


def trial(subject: str, seed: int, folder: Path) -> int:
    chance = random.Random(f"{subject}:{seed}")
    name, number = chance.choice(list(SIGNALS)), 0
    timeout = chance.randint(0, 2)
    server = Server(folder / "model", timeout)
    try:
        if subject == "signals":
            number = end(server, name, chance)
        else:
            number, worst = attack(server, subject, chance)
            assert statistics.median(worst) < MAX_HEALTH_S, f"/health took {worst} s"
            assert (growth := server.peak_mib() - server.memory) < MAX_GROWTH_MIB, f"{growth:.0f} MiB more"
            server.process.send_signal(getattr(signal, name))
        started_at = time.monotonic()
        err = finish(server.process)[1]
        assert time.monotonic() - started_at < timeout + 10, "the end takes too long"
        expected = 128 + getattr(signal, name), f"toolkit serve: {SIGNALS[name]}\n"
        assert (server.process.returncode, err) == expected, f"code {server.process.returncode}: {err}"
    finally:
        with suppress(ProcessLookupError):
            server.process.kill()
    return number


def attack(server: Server, subject: str, chance: random.Random) -> tuple[int, list[float]]:
    """Return the number of clients, and the worst seconds of /health in each round."""
    number, worst = 0, []
    for _ in range(ROUNDS):
        with server.watched() as seconds:
            number += ATTACKS[subject](server, chance)
        worst.append(round(max(seconds), 2))
        server.wait_for(60, running=0, waiting=0)
        assert server.chat("2") == (200, ANSWERS["2"]), "another answer after the attack"
    return number, worst


def end(server: Server, name: str, chance: random.Random) -> int:
    """Send the signal while requests run, wait, are half sent and are not read."""
    fields = {"prompt": "x", "max_tokens": LENGTH - 10}
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        kinds = [{"stream": True}, {"stream": False}] * 4
        running = [pool.submit(server.post, TEXT, **fields, **kind) for kind in kinds]
        content = server.request(TEXT, **fields, stream=True, logprobs=20)
        for part in (content, content[:-1], content[:20]):
            stack.enter_context(server.open(part, buffer=1024))
        time.sleep(chance.uniform(0.5, 2))
        server.process.send_signal(getattr(signal, name))
        for future, kind in zip(running, kinds, strict=True):
            status, answer = future.result()
            is_right = status == 200 and answer.endswith(b"data: [DONE]\n\n") if kind["stream"] else status == 503
            assert is_right and b"the server is stopping" in answer, f"status {status}: {answer[-200:]!r}"
    return len(running) + 3


def seeds(subject: str, quick: bool) -> Iterable[int]:
    return range(1 if quick else 20 if subject == "signals" else 5)


WAY = Way(
    "attacks",
    "hostile bodies, crowds, clients that do not read and half-open connections leave /health under 1 s and others' "
    "answers right; a signal ends the server in one line, its requests with an error",
    "S3",
    lambda: (*ATTACKS, "signals"),
    seeds,
    trial,
)
