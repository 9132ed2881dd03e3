"""Continuous batching: each request gets what generate gives it alone, whatever joins and leaves meanwhile."""

import queue

import pytest
import torch
from helpers.cases import slow_except
from helpers.initialize import add_lora
from toolkit_serve import batcher as module
from toolkit_serve.batcher import Batcher, Request

from tests.inference.conftest import STYLES, make_model
from toolkit.errors import GuardError
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY, Sampling
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.quantize import quantize_linears

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
    options = {"eos_ids": request.eos_ids, "seed": request.seed, "notice": lambda line: None, "cuda_graph": False}
    options |= {"max_new_tokens": request.max_new_tokens, "sampling": request.sampling}
    return list(generate(model, torch.tensor(request.ids), **options))


def ids_of(answers):
    return [[token.id for token in tokens] for tokens, _ in answers]


@pytest.mark.parametrize("style", slow_except(["gemma2", "phi3", "deepseek_v3"], STYLES))
def test_requests_get_what_generate_gives_them_alone(style, monkeypatch):
    """phi3 exceeds longrope's original context of 16 in the middle of answers; prompts come in chunks; columns move."""
    model = make_model(style).eval()
    monkeypatch.setattr(module, "PREFILL", 6)
    monkeypatch.setattr(module, "_SPARE_COLUMNS", 1)
    clients = make_clients(model)
    answers = run(model, clients)
    assert ids_of(answers) == [alone(model, client.request) for client in clients]
    assert {reason for _, reason in answers} == {"length"}


def test_adapters_and_four_bits():
    pytest.importorskip("bitsandbytes")
    model = make_model("llama", intermediate_size=128)
    add_lora(model, LoRAConfig(r=4, mlp=True, dora=True))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.2)
    quantize_linears(model, "bnb.nf4")
    clients = make_clients(model.eval())
    assert ids_of(run(model, clients)) == [alone(model, client.request) for client in clients]


def test_stop_tokens_log_probabilities_and_requests_that_leave():
    model = make_model("llama").eval()
    clients, leaver = make_clients(model, n_top=3), Client([1, 2, 3], 40, n_top=0)
    eos_ids = {alone(model, clients[0].request)[2]}
    for client in clients:
        client.request.eos_ids = eos_ids

    def leave_after_three(item):
        leaver.got.put(item)
        leaver.request.is_done = leaver.got.qsize() == 3

    leaver.request.emit = leave_after_three
    leaver.got.put("left")  # for run, which waits for an end
    answers = run(model, [leaver, *clients])
    assert leaver.got.qsize() == 3
    assert ids_of(answers)[1:] == [alone(model, client.request) for client in clients]
    assert {reason for _, reason in answers[1:]} == {"stop", "length"}
    for client, (tokens, _) in zip(clients, answers[1:], strict=True):
        ids = torch.tensor([client.request.ids + [token.id for token in tokens]])
        log_probs = model(ids)[0, len(client.request.ids) - 1 :, :101].log_softmax(-1)
        for token, row in zip(tokens, log_probs, strict=False):
            assert token.log_prob == pytest.approx(row[token.id].item(), abs=1e-4)
            values, ids = row.topk(3)
            assert dict(token.top) == pytest.approx(dict(zip(ids.tolist(), values.tolist(), strict=True)), abs=1e-4)


def test_only_the_request_with_nonfinite_logits_fails():
    """Also in the middle of its answer; the next request in its row reads nothing of it."""
    model = make_model("llama").eval()
    clients = make_clients(model, n=24)
    answers = [alone(model, client.request) for client in clients]
    with torch.no_grad():
        model.transformer.wte.weight[answers[0][1]] = torch.nan
    failed = 0
    for client, (tokens, end) in zip(clients, run(model, clients, n_rows=3), strict=True):
        try:
            assert [token.id for token in tokens] == alone(model, client.request) and end == "length"
        except GuardError:
            assert isinstance(end, GuardError) and "not finite" in str(end)
            failed += 1
    assert 3 < failed < 21


def test_errors_of_the_model_end_what_they_concern(monkeypatch, capfd):
    model, is_broken = make_model("llama").eval(), {"prompt": False, "step": False}
    forward = type(model).forward

    def fail(self, ids, labels=None, **options):
        if (is_broken["prompt"] and ids.size(1) == 7) or (is_broken["step"] and ids.size(0) > 1):
            raise RuntimeError("out of memory")
        return forward(self, ids, **options)

    monkeypatch.setattr(type(model), "forward", fail)
    clients = [Client(list(range(n)), 8) for n in (5, 7, 9)]
    expected = [alone(model, client.request) for client in clients]
    is_broken["prompt"] = True
    answers = run(model, clients)
    assert isinstance(answers[1][1], RuntimeError) and "out of memory" in capfd.readouterr().err
    assert ids_of(answers)[::2] == expected[::2]
    is_broken |= {"prompt": False, "step": True}
    clients = [Client(list(range(n)), 8) for n in (5, 7, 9)]
    *_, (tokens, end) = answers = run(model, clients, n_rows=2)
    assert [type(end) for _, end in answers] == [RuntimeError, RuntimeError, str]
    assert [token.id for token in tokens] == expected[2]  # the batcher goes on


def test_a_request_starts_without_the_state_of_an_earlier_one(monkeypatch):
    model, states = make_model("llama").eval(), []
    forward = type(model).forward

    def record(self, ids, labels=None, *, kv_cache, **options):
        states.append(dict(kv_cache.state))
        kv_cache.state["prompt"] = kv_cache.prompt
        return forward(self, ids, kv_cache=kv_cache, **options)

    monkeypatch.setattr(type(model), "forward", record)
    run(model, [Client([1, 2], 1), Client([3, 4], 1)], n_rows=1)
    assert states == [{}, {}]
