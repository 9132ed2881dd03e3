import pytest
import torch
from helpers.cases import slow_except
from lightning.fabric import Fabric

from tests.inference.conftest import greedy_without_cache, make_model
from toolkit.errors import GuardError, UserError
from toolkit.inference import decode as module
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY, Sampling
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import KVCache

PROMPT = torch.tensor([5, 17, 3, 99, 42])


@pytest.fixture
def llama() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(block_size=16, vocab_size=60, n_layer=2, n_head=2, n_embd=16))


def greedy(model, prompt=PROMPT, count=24, **settings) -> list[int]:
    return list(generate(model, prompt, max_new_tokens=count, sampling=GREEDY, **settings))


def test_cached_equals_uncached(model):
    cached, uncached = greedy(model), greedy_without_cache(model, PROMPT, 24)
    assert cached == uncached
    assert len(set(cached)) > 8  # repetitive text would not be a test


def test_chunked_prefill_equals_full_prefill(model, monkeypatch):
    expected = greedy(model)
    monkeypatch.setattr(module, "PREFILL", 3)
    assert greedy(model) == expected


def test_cached_logits_equal_uncached(model):
    """Logits match token by token up to fp32 rounding: equal greedy ids could be chance."""
    ids = torch.randint(0, 101, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids)
        cache = model.make_cache(2, 30)
        cache.sequence_length = 30
        pieces = [model(piece, kv_cache=cache) for piece in ids.split([1, 7, 1, 20, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("style", slow_except(["qwen3_5"], ["llama", "gemma4", "qwen3_5", "qwen3_next"]))
def test_logits_of_padded_rows_equal_each_alone(style):
    """Prefilled in parts, of which some end before a row starts, then token by token. Chunks of the delta rule have 64
    tokens."""
    model = make_model(style, block_size=160).eval()
    ids = torch.randint(0, 101, (4, 160), generator=torch.Generator().manual_seed(1))
    cache, starts = model.make_cache(4, 160), [0, 3, 8, 90]
    cache.starts = torch.tensor(starts)
    found = torch.cat([model(piece, kv_cache=cache) for piece in ids.split([1, 7, 144, *[1] * 8], dim=1)], dim=1)
    for row, of_row, start in zip(ids, found, starts, strict=True):
        torch.testing.assert_close(of_row[start:], model(row[None, start:])[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_recurrent_states_are_in_fp32_with_weights_in_bf16():
    model = make_model("qwen3_5").eval().to(torch.bfloat16)
    ids = torch.randint(0, 101, (2, 30), generator=torch.Generator().manual_seed(1))
    cache, expected = model.make_cache(2, 30), model(ids)
    found = torch.cat([model(piece, kv_cache=cache) for piece in ids.split([9, 1, 8, *[1] * 12], dim=1)], dim=1)
    assert [state.dtype for state in cache.recurrent_states] == [torch.float32, torch.bfloat16]
    assert found.dtype == torch.bfloat16 and (found - expected).abs().max() < 2e-2 * expected.abs().max()
    together = model.make_cache(2, 30)
    model(ids, kv_cache=together)
    torch.testing.assert_close(cache[0].state, together[0].state, atol=1e-5, rtol=1e-5)


def test_equal_to_transformers(model, tmp_path):
    """Greedy text of the exported model, with transformers' cache and generation loop."""
    transformers = pytest.importorskip("transformers")
    from toolkit.checkpoints.folder import write_model_files
    from toolkit.checkpoints.hf.export_hf import export_hf

    (tmp_path / "native").mkdir()
    state = model.state_dict()
    write_model_files(tmp_path / "native", state_dict=state, config=model.config, hyperparameters=None, tokenizer=None)
    export_hf(tmp_path / "native", tmp_path / "hf")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    found = hf.generate(
        PROMPT[None], attention_mask=torch.ones(1, 5, dtype=torch.long), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0, suppress_tokens=list(range(101, 128)),  # the vocabulary's padding
    )  # fmt: skip
    assert found[0, 5:].tolist() == greedy(model)


def test_generation_continues_from_partial_cache(model):
    cache = KVCache(model.config, 1, 3)
    model(PROMPT[None, :3], kv_cache=cache)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.extend(args[0][0].tolist()))
    found = greedy(model, cache=cache, count=10)
    assert seen == [*PROMPT[3:].tolist(), *found[:-1]] and cache.length == len(PROMPT) + len(found) - 1
    assert found == greedy_without_cache(model, PROMPT, 10)


def test_generation_through_fabric_wrapper(model):
    """Fabric rebuilds sequences among the arguments; the cache must be passed unchanged."""
    expected = greedy(model)
    assert greedy(Fabric(accelerator="cpu", devices=1).setup(model)) == expected


def test_samples_follow_the_seed(model):
    def draw(seed):
        return list(generate(model, PROMPT, max_new_tokens=20, sampling=Sampling(top_k=20), seed=seed))

    assert draw(1) == draw(1) != draw(2)
    assert max(draw(3)) < 101


def test_stops_before_eos(model):
    full = greedy(model)
    eos = full[7]
    assert greedy(model, eos_ids=[100_000, eos]) == full[: full.index(eos)]


def test_full_context_stops_generation_and_is_reported(llama):
    notes = []
    found = greedy(llama, torch.arange(10), count=50, notice=notes.append)
    assert len(found) == 6
    assert notes == ["stopped after 6 new tokens: the model's context of 16 tokens is full"]
    assert found == greedy_without_cache(llama, torch.arange(10), 50)
    notes.clear()
    assert len(greedy(llama, torch.arange(10), count=6, notice=notes.append)) == 6
    assert not notes


def test_tokens_are_streamed(llama):
    stream = generate(llama, torch.tensor([1]), max_new_tokens=5, sampling=GREEDY)
    calls = []
    llama.register_forward_hook(lambda *args: calls.append(1))
    next(stream)
    assert len(calls) == 1
    next(stream)
    assert len(calls) == 2


def test_vocabulary_padding_is_never_sampled(llama):
    assert llama.config.padded_vocab_size == 64
    with torch.no_grad():
        llama.lm_head.weight[60:] = 50 * llama.lm_head.weight[:1]
    found = list(generate(llama, torch.tensor([1, 2]), max_new_tokens=14, sampling=Sampling(5.0), seed=0))
    assert max(found) < 60


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([1], {"max_new_tokens": 0}, "--max_new_tokens 0: must be greater than zero"),
        ([], {"max_new_tokens": 5}, "--prompt: is empty"),
        ([1] * 16, {"max_new_tokens": 5}, "--prompt: has 16 tokens, but must have fewer than 16"),
    ],
)
def test_invalid_settings_are_errors_at_the_call(llama, prompt, settings, message):
    with pytest.raises(UserError, match=message):
        generate(llama, torch.tensor(prompt, dtype=torch.long), **settings)


def test_nonfinite_logits_are_a_guard_error(llama):
    with torch.no_grad():
        llama.lm_head.weight[3] = float("nan")
    with pytest.raises(GuardError, match="not finite"):
        greedy(llama, torch.tensor([1]))


def test_cache_of_a_longer_sequence_is_recomputed():
    """Longrope with an original context of 16: a short prompt after a longer one with the same prefix."""
    model = make_model("phi3").eval()
    cache, fresh = (KVCache(model.config, 1, 0) for _ in range(2))
    greedy(model, torch.cat([PROMPT] * 4), count=1, cache=cache)
    cache.truncate(3)
    assert greedy(model, count=6, cache=cache) == greedy(model, count=6, cache=fresh)
    for one, other in zip(cache.layers, fresh.layers, strict=True):
        assert torch.equal(one.keys[:, :, :3], other.keys[:, :, :3])
