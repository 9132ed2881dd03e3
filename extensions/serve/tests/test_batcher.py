"""Continuous batching: each request gets what generate gives it alone, whatever joins and leaves meanwhile."""

import queue
from functools import partial
from weakref import ref

import pytest
import torch
from helpers import recorded_graph
from helpers.cases import slow_except
from helpers.initialize import add_lora
from toolkit_serve import batcher as module
from toolkit_serve.batcher import Batcher, Request

from tests.inference.conftest import STYLES, make_model
from toolkit.errors import GuardError
from toolkit.inference import cuda_graph, decode
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY, Sampling
from toolkit.models.kv_cache import KVCache
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.quantize import quantize_linears

SAMPLINGS = [GREEDY, Sampling(0.9, None, 1.0), Sampling(1.2, 20, 1.0), Sampling(0.8, None, 0.7)]


@pytest.fixture(params=["growing", "fixed"])
def shapes(request, monkeypatch):
    """The forward passes of a CPU and of a CUDA device."""
    if request.param == "fixed":
        fix_shapes(monkeypatch)


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


@pytest.mark.parametrize("style", slow_except(["gemma2", "phi3", "deepseek_v3", "qwen3_5"], STYLES))
def test_requests_get_what_generate_gives_them_alone(style, shapes, monkeypatch):
    """phi3 exceeds longrope's original context of 16 in the middle of answers; prompts come in chunks; columns move."""
    model = make_model(style).eval()
    monkeypatch.setattr(module, "PREFILL", 6)
    monkeypatch.setattr(module, "_SPARE_COLUMNS", 1)
    clients = make_clients(model)
    answers = run(model, clients)
    assert ids_of(answers) == [alone(model, client.request) for client in clients]
    assert {reason for _, reason in answers} == {"length"}


def test_adapters_and_four_bits(shapes):
    pytest.importorskip("bitsandbytes")
    model = make_model("llama", intermediate_size=128)
    add_lora(model, LoRAConfig(r=4, mlp=True, dora=True))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.2)
    quantize_linears(model, "bnb.nf4")
    clients = make_clients(model.eval())
    assert ids_of(run(model, clients)) == [alone(model, client.request) for client in clients]


def test_stop_tokens_log_probabilities_and_requests_that_leave(shapes):
    model = make_model("llama").eval()
    clients, leaver, seen = make_clients(model, n_top=3), Client([1, 2, 3], 40, n_top=0), []
    eos_ids = {alone(model, clients[0].request)[2]}
    for client in clients:
        client.request.eos_ids = eos_ids

    def leave_after_three(item):
        seen.append(item)
        leaver.request.is_done = len(seen) == 3

    leaver.request.emit = leave_after_three
    leaver.got.put("left")  # for run, which waits for an end
    answers = run(model, [leaver, *clients])
    assert len(seen) == 3
    assert ids_of(answers)[1:] == [alone(model, client.request) for client in clients]
    assert {reason for _, reason in answers[1:]} == {"stop", "length"}
    for client, (tokens, _) in zip(clients, answers[1:], strict=True):
        ids = torch.tensor([client.request.ids + [token.id for token in tokens]])
        log_probs = model(ids)[0, len(client.request.ids) - 1 :, :101].log_softmax(-1)
        for token, row in zip(tokens, log_probs, strict=False):
            assert token.log_prob == pytest.approx(row[token.id].item(), abs=1e-4)
            values, ids = row.topk(3)
            assert dict(token.top) == pytest.approx(dict(zip(ids.tolist(), values.tolist(), strict=True)), abs=1e-4)


def test_stop_ends_the_thread_while_an_answer_runs(shapes):
    client = Client([1, 2, 3], 40)
    batcher = Batcher(make_model("llama").eval(), 4, 64)
    batcher.waiting.put(client.request)
    batcher.start()
    client.got.get(timeout=60)
    batcher.stop()
    assert not batcher.is_alive() and len(client.request.tokens) < 40


def test_requests_that_left_while_they_waited_are_not_prefilled(monkeypatch):
    model, joined = make_model("llama").eval(), []
    clients = [Client([10 + i], 3) for i in range(3)]
    read = Batcher._read

    def leave(self, requests, tokens, logits):
        joined.extend(request.ids for request in requests if not request.tokens)
        for client in clients[1:]:
            client.request.is_done = True
            client.got.put("left")
        read(self, requests, tokens, logits)

    monkeypatch.setattr(Batcher, "_read", leave)
    assert ids_of(run(model, clients))[0] == alone(model, clients[0].request) and joined == [[10]]


@pytest.mark.parametrize("style", slow_except(["llama"], ["llama", "qwen3_5"]))
def test_only_the_request_with_nonfinite_logits_fails(style, shapes):
    """Also in the middle of its answer; the next request in its row reads nothing of it."""
    model = make_model(style).eval()
    clients = make_clients(model, n=24)
    answers = [alone(model, client.request) for client in clients]
    with torch.no_grad():  # 0 is the token of a row without a request
        model.transformer.wte.weight[[0, answers[0][1]]] = torch.nan
    failed = 0
    for client, (tokens, end) in zip(clients, run(model, clients, n_rows=3), strict=True):
        try:
            assert [token.id for token in tokens] == alone(model, client.request) and end == "length"
        except GuardError:
            assert isinstance(end, GuardError) and "not finite" in str(end)
            failed += 1
    assert 3 < failed < 21


def test_errors_of_the_model_end_what_they_concern(shapes, monkeypatch, capfd):
    model, is_broken = make_model("llama").eval(), {"prompt": False, "step": False}
    forward = type(model).forward

    def fail(self, ids, labels=None, **options):
        is_prompt_of_7 = ids.size(1) > 1 and 6 in ids[:, -1]
        if (is_broken["prompt"] and is_prompt_of_7) or (is_broken["step"] and ids.size(0) > 1):
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


def fix_shapes(monkeypatch, count=3):
    """Force the forward passes of a CUDA device, with ``count`` tokens in a group."""
    monkeypatch.setattr(module, "has_fixed_shapes", lambda model, device: model.is_row_independent)
    monkeypatch.setattr(decode, "capture", recorded_graph.capture)
    monkeypatch.setattr(module, "tokens_per_read", lambda device: count)
    monkeypatch.setattr(module, "_MIN_COLUMNS", 8)


def inputs_of(batcher):
    tensors = (
        *batcher._cache.tensors,
        *batcher._cache.recurrent_states,
        batcher._ids,
        batcher._first,
        batcher._position,
    )
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


@pytest.mark.parametrize("style", slow_except(["llama", "phi3", "gemma3"], STYLES))
def test_requests_join_and_leave_at_any_token(style, monkeypatch):
    """Each shape is captured once, and its memory stays where it is; the cache is as large as on a CPU."""
    model, generator = make_model(style).eval(), torch.Generator().manual_seed(5)
    n_bytes = Batcher(model, 5, 48).cache_bytes
    fix_shapes(monkeypatch)
    clients = make_clients(model, n=24)
    expected = [alone(model, client.request) for client in clients]
    batcher, later = Batcher(model, 5, 48), clients[2:]
    before, leavers = inputs_of(batcher), []

    def emit(client, item):
        client.got.put(item)
        dice = torch.rand(2, generator=generator)
        if later and (dice[0] < 0.3 or not isinstance(item, str)) and dice[1] < 0.4:
            batcher.waiting.put(later.pop().request)
        if later and dice[0] > 0.96 and isinstance(item, module.NewToken):
            client.request.is_done = True
            leavers.append(client)
            client.got.put("left")
        elif isinstance(item, str) and batcher.waiting.empty() and later:
            batcher.waiting.put(later.pop().request)

    for client in clients:
        client.request.emit = partial(emit, client)
    for client in clients[:2]:
        batcher.waiting.put(client.request)
    batcher.start()
    answers = [client.read() for client in clients]
    batcher.stop()
    assert 0 < len(leavers) < 12
    for tokens, client, of_request in zip(ids_of(answers), clients, expected, strict=True):
        assert tokens == (of_request[: len(tokens)] if client in leavers else of_request)
    assert inputs_of(batcher) == before and batcher.cache_bytes == n_bytes
    assert 3 <= len(batcher._shapes) == len(batcher._graphs)
    assert {rows for rows, _ in batcher._shapes} <= {1, 2, 4, 5}
    assert {columns for _, columns in batcher._shapes} <= {8, 16, 32, 48 + 64}


def test_the_size_of_the_cache_includes_recurrent_states():
    config = (model := make_model("qwen3_5")).config
    state, window = 4 * 12 * 16, 3 * (2 * 2 * 12 + 4 * 16)  # of the first layer; the second has keys and values
    keys = 2 * config.n_query_groups * (32 + module._SPARE_COLUMNS) * config.head_size
    assert Batcher(model, 2, 32).cache_bytes == 4 * 2 * (state + window + keys)


def test_no_copy_of_recurrent_states_outlives_a_capture(monkeypatch):
    """Captured shapes stay, and with them the copy that each capture needed, if anything still refers to it."""
    save, copies = KVCache.save, []

    def record(self):
        save(self)
        copies.extend(map(ref, self._saved[1]))

    monkeypatch.setattr(KVCache, "save", record)
    fix_shapes(monkeypatch)
    batcher, client = Batcher(make_model("qwen3_5").eval(), 1, 16), Client([1, 2], 4)
    batcher.waiting.put(client.request)
    batcher.start()
    client.read()
    batcher.stop()
    assert batcher._shapes and copies and not any(copy() is not None for copy in copies)


def test_the_next_group_is_launched_before_a_group_is_emitted_and_each_is_read_once(monkeypatch):
    model, events = make_model("llama").eval(), []
    read = Batcher._read
    monkeypatch.setattr(Batcher, "_read", lambda self, *args: events.append("read") or read(self, *args))
    fix_shapes(monkeypatch, 4)
    monkeypatch.setattr(module, "_MIN_COLUMNS", 32)

    def capture(*args):
        replay = recorded_graph.capture(*args)
        return lambda: events.append("launch") or replay()

    monkeypatch.setattr(decode, "capture", capture)
    clients = [Client([1, 2, 3], 13, SAMPLINGS[i], i) for i in range(2)]
    for client in clients:
        client.request.emit = lambda item, client=client: events.append("emit") or client.got.put(item)
    assert ids_of(run(model, clients)) == [alone(model, client.request) for client in clients]
    prompts = "read emit emit " + "launch " * 4 + "read "  # before a capture, what is read is emitted
    groups = ("launch " * 4 + "emit " * 8 + "read ") * 2 + "emit " * 10
    assert events == (prompts + groups).split()


def test_a_request_waits_for_at_most_two_groups(monkeypatch):
    """It comes when those that waited have just been taken, the latest that it can."""
    model, read, n_read = make_model("llama").eval(), Batcher._read, []
    fix_shapes(monkeypatch, 4)
    first, second = Client([1, 2, 3], 40), Client([4, 5], 3)

    def record(self, requests, tokens, logits):
        if len(n_read) == 2:
            self.waiting.put(second.request)
        n_read.append(len(first.request.tokens))
        if second.request in requests and not second.request.tokens:
            n_read.append("joins")
        read(self, requests, tokens, logits)

    monkeypatch.setattr(Batcher, "_read", record)
    assert ids_of(run(model, [first])) == [alone(model, first.request)]
    assert ids_of([second.read()]) == [alone(model, second.request)]
    assert n_read[:6] == [0, 1, 5, 9, "joins", 9]  # it came at 5, when 4 tokens were not read yet, and 4 were launched


def test_a_failed_capture_is_one_notice(monkeypatch):
    """And the growing cache's answers, before and after; it is not tried again."""
    model, notes = make_model("llama").eval(), []
    fix_shapes(monkeypatch)
    monkeypatch.setattr(decode, "capture", cuda_graph.capture)  # there is no CUDA
    monkeypatch.setattr(module, "notice", notes.append)
    for _ in range(2):
        clients = make_clients(model, n=5)
        assert ids_of(run(model, clients)) == [alone(model, client.request) for client in clients]
        assert len(notes) == 1 and notes[0].startswith("generating without a CUDA graph, which is slower: ")


def test_short_requests_do_not_need_the_columns_of_a_long_cache(monkeypatch):
    """The batch is never empty: its columns are moved to the left."""
    model = make_model("llama", block_size=512).eval()
    fix_shapes(monkeypatch)
    monkeypatch.setattr(module, "_SPARE_COLUMNS", 8)
    clients = [Client([i, 1, 2], 12 + i % 5) for i in range(24)]
    batcher = Batcher(model, 4, 400)
    for client in clients:
        batcher.waiting.put(client.request)
    batcher.start()
    answers = [client.read() for client in clients]
    batcher.stop()
    assert ids_of(answers) == [alone(model, client.request) for client in clients]
    assert {columns for _, columns in batcher._shapes} <= {8, 16, 32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("style", ["llama", "gemma2", "phi3", "qwen3_5"])
def test_cuda_graphs_give_what_generate_gives_alone(style, monkeypatch):
    model, notes = make_model(style).eval().to("cuda"), []
    monkeypatch.setattr(module, "notice", notes.append)
    clients = make_clients(model)
    assert ids_of(run(model, clients)) == [alone(model, client.request) for client in clients]
    assert not notes  # no fallback
