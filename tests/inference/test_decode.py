"""Batches of prompts, KV caches of fixed shape, and what a step costs."""

from functools import partial

import pytest
import torch
from helpers import recorded_graph
from helpers.cases import slow_except
from torch.utils._python_dispatch import TorchDispatchMode

from tests.inference.conftest import STYLES, greedy_without_cache, make_model
from toolkit.inference import cuda_graph, decode
from toolkit.inference.decode import Decoder
from toolkit.inference.generate import generate, generate_batch
from toolkit.inference.sampling import GREEDY, Sampling
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import KVCache

PROMPTS = [torch.arange(3, 3 + n) * 7 % 101 for n in (5, 1, 14, 9)]


@pytest.fixture(params=["growing", "fixed"])
def shapes(request, monkeypatch):
    """The KV caches of a CPU and of a CUDA device."""
    if request.param == "fixed":
        monkeypatch.setattr(decode, "has_fixed_shapes", lambda model, device: True)
        monkeypatch.setattr(decode, "capture", recorded_graph.capture)
        monkeypatch.setattr(decode, "_MIN_REPLAYS", 2)
        monkeypatch.setattr(decode, "tokens_per_read", lambda device: 3)


def columns(steps) -> list[list[int]]:
    """The tokens of each row; a row that has ended stays so."""
    rows = [list(row) for row in zip(*steps, strict=True)]
    ends = [row.index(None) if None in row else len(row) for row in rows]
    assert all(token is None for row, end in zip(rows, ends, strict=True) for token in row[end:])
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def continue_all(model, prompts, **settings):
    return columns(generate_batch(model, prompts, **({"max_new_tokens": 20, "sampling": GREEDY} | settings)))


@pytest.mark.parametrize("style", slow_except(["gemma2", "phi3"], STYLES))
def test_rows_are_what_each_prompt_gives_alone(style, shapes, monkeypatch):
    """phi3's rows grow beyond longrope's original context of 16 one after the other, and prompts come in chunks."""
    model = make_model(style).eval()
    monkeypatch.setattr(decode, "PREFILL", 6)
    alone = [greedy_without_cache(model, prompt, 20) for prompt in PROMPTS]
    assert continue_all(model, PROMPTS) == alone
    assert continue_all(model, PROMPTS[2:3]) == alone[2:3]
    assert len({token for row in alone for token in row}) > 12  # repetitive text would not be a test


@pytest.mark.parametrize("style", slow_except(["llama", "qwen3_5"], ["llama", "phi3", "gemma4", "qwen3_5"]))
def test_turns_that_share_a_cache(style, shapes):
    """As in a chat: each begins with the text so far and is interrupted; the third drops a part of the text. phi3's
    grow beyond longrope's original context of 16, and back."""
    model, text = make_model(style).eval(), PROMPTS[0][:4]
    cache = KVCache(model.config, 1, 0)
    for question, (count, dropped) in enumerate([(8, 0), (5, 0), (6, 12), (20, 0)]):
        if dropped:
            text = text[:-dropped]
            cache.truncate(len(text))
        text = torch.cat([text, torch.tensor([11 + question, 3])])
        tokens = generate(model, text, max_new_tokens=count + 4, sampling=GREEDY, cache=cache)
        found = [next(tokens) for _ in range(count)]
        tokens.close()
        assert found == greedy_without_cache(model, text, count)
        text = torch.cat([text, torch.tensor(found)])


@pytest.mark.parametrize("style", slow_except(["llama"], ["llama", "qwen3_5"]))
def test_autocast(style, shapes):
    """Keys and values are of fewer bits than the KV cache, which has the dtype of the weights."""
    with torch.autocast("cpu", torch.bfloat16):
        assert list(map(len, continue_all(make_model(style).eval(), PROMPTS))) == [20] * 4


def test_rows_end_at_their_own_stop_tokens_and_context():
    model, notes = make_model("llama").eval(), []
    full = continue_all(model, PROMPTS, max_new_tokens=60, names="abcd", notice=notes.append)
    assert [len(row) for row in full] == [43, 47, 34, 39]  # up to the context of 48
    assert notes[0] == "c: stopped after 34 new tokens: the model's context of 48 tokens is full"
    assert len(notes) == 4
    eos = full[0][4]
    found = continue_all(model, PROMPTS, max_new_tokens=60, eos_ids=[eos], notice=notes.append)
    assert found == [row[: row.index(eos)] if eos in row else row for row in full] and len(found[0]) < 5


def test_the_samples_of_a_seed_do_not_depend_on_the_batch(shapes):
    model, settings = make_model("llama").eval(), {"sampling": Sampling(1.5, 30), "max_new_tokens": 20}
    together = continue_all(model, [*PROMPTS, PROMPTS[0]], seeds=[1, 2, 3, 4, 5], **settings)
    for prompt, seed, found in zip([*PROMPTS, PROMPTS[0]], [1, 2, 3, 4, 5], together, strict=True):
        assert list(generate(model, prompt, seed=seed, **settings)) == found
    assert together[0] != together[4]


@pytest.mark.parametrize("style", slow_except(["llama", "qwen3_5"], STYLES))
def test_rows_that_have_ended_are_computed_no_more(style, monkeypatch):
    """Except with longrope, whose cached tokens may have to be computed again."""
    model, sizes, found = make_model(style).eval(), [], []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    for fraction in (decode._KEPT, 0.0):
        monkeypatch.setattr(decode, "_KEPT", fraction)
        sizes.clear()
        record, settings = [], {"sampling": Sampling(), "seeds": range(8), "eos_ids": range(0, 101, 9)}
        rows = continue_all(model, [*PROMPTS, *PROMPTS], record=record, **settings)
        recorded = [probs[: len(row)] for row, (_, probs) in zip(rows, record[0].recorded(), strict=True)]
        found.append((rows, recorded, sorted({*sizes}, reverse=True)))
    (rows, recorded, dropping), (expected, exact, constant) = found
    assert rows == expected and len(set(map(len, rows))) > 3 and constant == [8]
    assert sizes[0] == 8 and (dropping == [8] if style == "phi3" else len(dropping) > 2), dropping
    for mine, other in zip(recorded, exact, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def make_decoder(model, count=64, sampling=GREEDY) -> Decoder:
    cache = KVCache(model.config, 1, 6 + count)
    decoder = Decoder(model, cache, PROMPTS[:1], count + 1, sampling, [0])
    decoder.prefill(0)
    cache.position = decoder.position
    return decoder


class Recorder(TorchDispatchMode):
    """Records operators, and those that wait for a device."""

    def __init__(self):
        super().__init__()
        self.operators, self.waits = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        self.operators.append((func, *(x.shape for x in args if isinstance(x, torch.Tensor))))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("is_captured", [True, False])
def test_trial_steps_of_a_cuda_graph_leave_recurrent_states_bit_equal(is_captured, monkeypatch):
    model, notes = make_model("qwen3_5").eval(), []
    if is_captured:
        monkeypatch.setattr(decode, "capture", recorded_graph.capture)
    decoder = make_decoder(model, count=12)
    cache = decoder.cache
    cache.position = None
    before = [state.clone() for state in cache.recurrent_states]
    undo = partial(decoder.rewind, 1)
    replay = decode.fix_shapes(model, cache, decoder.position, decoder.step, undo, notes.append, [])
    assert (replay is not None) is is_captured is (not notes) and cache.length == len(PROMPTS[0])
    assert all(map(torch.equal, cache.recurrent_states, before))


def test_a_turn_continues_after_a_group_of_tokens_was_interrupted(monkeypatch):
    """By Ctrl-C, between two launches of a graph: the recurrent states are of more tokens than were read."""
    model, replays = make_model("qwen3_5").eval(), iter(range(100))
    monkeypatch.setattr(decode, "has_fixed_shapes", lambda model, device: True)
    monkeypatch.setattr(decode, "_MIN_REPLAYS", 2)
    monkeypatch.setattr(decode, "tokens_per_read", lambda device: 3)

    def capture(*args):
        replay = recorded_graph.capture(*args)

        def interrupted():
            if next(replays) == 7:
                raise KeyboardInterrupt
            replay()

        return interrupted

    monkeypatch.setattr(decode, "capture", capture)
    cache, found = KVCache(model.config, 1, 0), []
    with pytest.raises(KeyboardInterrupt):
        found.extend(generate(model, PROMPTS[0], max_new_tokens=20, sampling=GREEDY, cache=cache))
    # one token of the prompt's pass and two groups of three
    assert len(found) == 7 and cache.length == len(PROMPTS[0]) + 6
    text = torch.cat([PROMPTS[0], torch.tensor([*found, 50])])
    assert list(generate(model, text, max_new_tokens=9, sampling=GREEDY, cache=cache)) == greedy_without_cache(
        model, text, 9
    )


@torch.no_grad()
def test_operators_and_shapes_are_the_same_at_every_token_and_none_waits():
    for style, sampling in (("llama", GREEDY), ("gemma3", Sampling()), ("qwen3_5", GREEDY)):
        decoder = make_decoder(make_model(style).eval(), count=12, sampling=sampling)
        recorded = []
        for _ in range(11):
            with Recorder() as recorder:
                decoder.step()
            recorded.append(recorder)
        assert not any(recorder.waits for recorder in recorded), style
        assert all(recorder.operators == recorded[0].operators for recorder in recorded), style


@torch.no_grad()
def test_operators_do_not_depend_on_the_number_of_rows():
    model, recorded = make_model("llama").eval(), []
    for n in (2, 256):
        cache = KVCache(model.config, n, 12)
        decoder = Decoder(model, cache, [torch.arange(1 + i % 4) for i in range(n)], 8, Sampling(), [0] * n)
        decoder.prefill(0)
        cache.position = decoder.position
        with Recorder() as recorder:
            decoder.step()
        recorded.append([operator for operator, *_ in recorder.operators])
    assert recorded[0] == recorded[1]


def test_only_models_that_can_be_captured_get_fixed_shapes():
    """Experts in fp32 wait for the host; dependent rows have a state."""
    device = torch.device("cuda")
    dense, experts = make_model("llama"), make_model("mixtral")
    assert decode.has_fixed_shapes(dense, device) and not decode.has_fixed_shapes(dense, torch.device("cpu"))
    assert not decode.has_fixed_shapes(experts, device)
    assert decode.has_fixed_shapes(experts.to(torch.bfloat16), device)
    dense.is_row_independent = False
    assert not decode.has_fixed_shapes(dense, device)


@torch.no_grad()
def test_one_graph_serves_64_tokens():
    model, graphs = make_model("llama", block_size=80).eval(), []
    expected = list(generate(model, PROMPTS[0], max_new_tokens=65, sampling=GREEDY))
    decoder = make_decoder(model)

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(decoder.step, backend=count, fullgraph=True)
    for _ in range(64):
        step()
    assert len(graphs) == 1
    assert decoder.ids[0, 5:70].tolist() == expected


def test_operators_per_token_on_a_cpu():
    """Of a llama with grouped queries, for each further token."""
    found = []
    for layers in (1, 2):
        config = ModelConfig(
            block_size=48, vocab_size=101, n_layer=layers, n_head=4, n_query_groups=2, n_embd=64, intermediate_size=96
        )
        steps = generate(GPT(config).eval(), PROMPTS[0], max_new_tokens=9, sampling=GREEDY)
        next(steps), next(steps)
        with Recorder() as recorder:
            next(steps)
        steps.close()
        assert recorder.waits == 0
        found.append(len(recorder.operators))
    assert found[1] - found[0] <= 60, "operators per layer"
    assert 2 * found[0] - found[1] <= 43, "embedding, head and sampling"


def test_a_device_is_read_once_per_group_of_tokens(monkeypatch):
    model, reads = make_model("llama").eval(), []
    expected = list(generate(model, PROMPTS[0], max_new_tokens=30, sampling=GREEDY))
    read = Decoder.read
    monkeypatch.setattr(Decoder, "read", lambda self, done, n: reads.append(n) or read(self, done, n))
    monkeypatch.setattr(decode, "tokens_per_read", lambda device: 8)
    cache = KVCache(model.config, 1, 0)
    assert list(generate(model, PROMPTS[0], max_new_tokens=30, sampling=GREEDY)) == expected
    assert reads == [1, 8, 8, 8, 5]
    eos = expected[11]  # the cache forgets what was computed after it
    found = list(generate(model, PROMPTS[0], max_new_tokens=30, sampling=GREEDY, eos_ids=[eos], cache=cache))
    assert found == expected[: expected.index(eos)] and cache.length == 5 + len(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("style", ["llama", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "phi3", "qwen3_5"])
def test_a_cuda_graph_gives_the_text_of_the_growing_cache(style, monkeypatch):
    """With experts only the logits are compared, by the check of the graph: it is for bf16, whose rounding shows."""
    model, notes = make_model(style).eval().to("cuda"), []
    if model.config.n_moe_layer:
        if torch.cuda.get_device_capability()[0] < 9:
            pytest.skip("grouped products of older devices wait for the host")
        model.to(torch.bfloat16)
    found = continue_all(model, PROMPTS, max_new_tokens=30, notice=notes.append)
    assert not notes  # no fallback
    monkeypatch.setattr(decode, "has_fixed_shapes", lambda model, device: False)
    assert model.config.n_moe_layer or continue_all(model, PROMPTS, max_new_tokens=30) == found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_failed_capture_leaves_the_stream_as_it_was():
    x, stream, notes = torch.ones(1, device="cuda"), torch.cuda.current_stream(), []
    assert cuda_graph.capture(lambda: x * x.item(), lambda: None, x, notes.append, []) is None
    assert len(notes) == 1 and torch.cuda.current_stream() == stream and float(x + 1) == 2


def test_without_cuda_a_graph_is_refused_in_one_line(monkeypatch):
    """As on a device whose graph fails: the text matches the growing cache's."""
    model, notes = make_model("llama").eval(), []
    expected = list(generate(model, PROMPTS[0], max_new_tokens=30, sampling=GREEDY))
    monkeypatch.setattr(decode, "has_fixed_shapes", lambda model, device: True)

    def fail(*args):
        raise RuntimeError("no graph\nmore")

    monkeypatch.setattr(torch.cuda, "Stream", fail)
    for _ in range(2):  # the second time it is not tried
        assert list(generate(model, PROMPTS[0], max_new_tokens=30, sampling=GREEDY, notice=notes.append)) == expected
        assert notes == ["generating without a CUDA graph, which is slower: no graph"]
