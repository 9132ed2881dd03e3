"""Foreign runs and requests: valid files to damage, and their readers."""

import asyncio
import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toolkit_report.run import read_runs
from toolkit_serve.batcher import NewToken

from tests.faults.fuzz_models import MESSAGES, make_tokenizer
from tests.faults.markup import require_harmless_report
from tests.faults.states import shared, undisturbed
from toolkit.checkpoints.folder import read_model_config
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.inference.sampling import Sampling
from toolkit.ui.events import write_event
from toolkit.ui.loggers import MetricsCSV


def make_report(folder: Path) -> list[str]:
    shutil.copytree(undisturbed("ordinary"), folder, dirs_exist_ok=True)
    write_event(folder, "sample", step=2, prompt="a prompt", text="a text")
    write_event(folder, "warning", text="a warning")
    metrics = (folder / "logs" / "metrics.csv").relative_to(folder)
    names = [metrics.as_posix()] * 3 + ["logs/events.jsonl"] * 3 + ["final/COMPLETE", "final/hyperparameters.yaml"]
    return [name for name in names if (folder / name).exists()]


def read_report(folder: Path) -> None:
    require_harmless_report(read_runs([str(folder)]))
    MetricsCSV(folder / "logs" / "metrics.csv", resume_step=4).close()


BODY = {
    "model": "m",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["x"],
    "stream": False,
    "n": 1,
}
BODIES = {
    "completions.json": BODY | {"prompt": "two words", "logprobs": 2},
    "chat/completions.json": BODY | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "user": "a"},
}


def make_bodies(folder: Path) -> list[str]:
    make_tokenizer(folder)
    (folder / "chat").mkdir()
    for name, body in BODIES.items():
        (folder / name).write_text(json.dumps(body))
    (folder / "app.json").write_text("{}")
    return list(BODIES)


class StubBatcher:
    """Answers each request with two tokens."""

    max_length, n_active, running = 128, 0, ()

    def __init__(self, model: Any) -> None:
        self.model = self.waiting = model

    def put(self, request: Any) -> None:
        for item in (NewToken(65, -1.0, [(65, -1.0)] * (request.n_top or 0)), NewToken(66), "stop"):
            request.emit(item)


@cache
def application(folder: Path) -> Any:
    from toolkit_serve.app import Service, make_app

    tokenizer, batcher = (
        Tokenizer.load(folder),
        StubBatcher(SimpleNamespace(config=read_model_config(shared()["base"]))),
    )
    batcher.waiting = batcher
    template = ChatTemplate.from_tokenizer(tokenizer, None)
    service = Service("m", batcher, tokenizer, template, Sampling(0.0, None, 1.0), 5, max_active=3)
    return make_app(service, None, {"localhost"})


def send_bodies(folder: Path) -> None:
    for name in BODIES:
        content = (folder / name).read_bytes()
        status, answer = asyncio.run(_post(application(folder), f"/v1/{name.removesuffix('.json')}", content))
        assert status in (200, 400, 404, 413, 422, 429), f"status {status}"
        if status != 200:
            message = json.loads(answer)["error"]["message"]
            assert "\n" not in message and len(message) < 2100, message[:200]


async def _post(app: Any, path: str, content: bytes) -> tuple[int, bytes]:
    sent, is_read = [], False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.sleep(100)
        is_read = True
        return {"type": "http.request", "body": content}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
    }
    await app(
        scope | {"scheme": "http", "server": ("localhost", 80), "client": ("localhost", 1), "root_path": ""},
        receive,
        send,
    )
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
