"""Continuous batching: each request gets what generate gives it alone, whatever joins and leaves meanwhile."""

import queue

import pytest
import torch
from helpers.cases import slow_except

from tests.inference.conftest import STYLES, make_model
from toolkit.inference import batcher as module
from toolkit.inference.batcher import Batcher, Request, Sampling
from toolkit.inference.generate import generate

GREEDY = Sampling(0, None, 1.0)
SAMPLINGS = [GREEDY, Sampling(0.9, None, 1.0), Sampling(1.2, 20, 1.0), Sampling(0.8, None, 0.7)]


class Client:
    """A request, and what it has got so far."""

    def __init__(self, ids, count, sampling=GREEDY, seed=0, eos_ids=(), n_top=None):
        self.got = queue.Queue()
        self.request = Request(ids, count, sampling, seed, eos_ids, n_top, self.got.put)

    def read(self):
        """Wait for the end; return the tokens and the reason."""
        items = [self.got.get(timeout=60)]
        while isinstance(items[-1], module.NewToken):
            items.append(self.got.get(timeout=60))
        return items[:-1], items[-1]


def make_clients(model, n=12, **options):
    generator = torch.Generator().manual_seed(3)
    clients = []
    for i in range(n):
        length, count = torch.randint(1, 26, (2,), generator=generator).tolist()
        ids = torch.randint(0, 101, (length,), generator=generator).tolist()
        count = min(count, model.config.block_size - length)
        clients.append(Client(ids, count, SAMPLINGS[i % 4], seed=i, **options))
    return clients


def run(model, clients, n_rows=4, max_length=None):
    batcher = Batcher(model, n_rows, max_length or model.config.block_size)
    for client in clients:
        batcher.waiting.put(client.request)
    batcher.start()
    answers = [client.read() for client in clients]
    batcher.waiting.put(None)
    batcher.join(10)
    assert not batcher.is_alive() and not batcher.running
    return answers


def alone(model, request):
    ids, settings = torch.tensor(request.ids), request.sampling._asdict()
    options = {"eos_ids": request.eos_ids, "seed": request.seed, "notice": lambda line: None}
    return list(generate(model, ids, max_new_tokens=request.max_new_tokens, **settings, **options))


def ids_of(answers):
    return [[token.id for token in tokens] for tokens, _ in answers]


@pytest.mark.parametrize("style", slow_except(["llama", "gemma2", "phi3", "deepseek_v3"], STYLES))
def test_requests_get_what_generate_gives_them_alone(style, monkeypatch):
    """phi3 exceeds longrope's original context of 16 in the middle of answers; prompts come in chunks; columns move."""
    model = make_model(style).eval()
    monkeypatch.setattr(module, "PREFILL", 6)
    monkeypatch.setattr(module, "_SPARE_COLUMNS", 1)
    clients = make_clients(model)
    answers = run(model, clients)
    assert ids_of(answers) == [alone(model, client.request) for client in clients]
    assert {reason for _, reason in answers} == {"length"}
