import pytest
import torch

from toolkit.models.config import ModelConfig
from toolkit.models.kv_cache import KVCache, LayerCache, StateCache


def test_one_cache_per_layer_of_the_right_size():
    config = ModelConfig(n_layer=3, n_head=4, n_query_groups=2, n_embd=32, head_size=16, vocab_size=8)
    cache = KVCache(config, batch_size=5, max_length=7, dtype=torch.bfloat16)
    assert len(cache.layers) == 3 and cache.length == 0
    for layer in cache:
        assert layer.keys.shape == layer.values.shape == (5, 2, 7, 16)
        assert layer.keys.dtype == torch.bfloat16


def test_update_appends_and_returns_all_so_far():
    cache = LayerCache((2, 1, 6), (4, 4), "cpu", torch.float32)
    k, v = torch.randn(2, 1, 6, 4), torch.randn(2, 1, 6, 4)
    for start, end in ((0, 3), (3, 4), (4, 6)):
        all_k, all_v = cache.update(k[:, :, start:end], v[:, :, start:end])
        assert cache.length == end
        assert torch.equal(all_k, k[:, :, :end]) and torch.equal(all_v, v[:, :, :end])
    with pytest.raises(ValueError, match="7 positions do not fit into a KV cache of 6"):
        cache.update(k[:, :, :1], v[:, :, :1])


def test_memory_is_allocated_once():
    cache = LayerCache((1, 1, 4), (2, 2), "cpu", torch.float32)
    where = cache.keys.data_ptr()
    for _ in range(4):
        assert cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))[0].data_ptr() == where


def test_reserve_keeps_and_truncate_drops_positions():
    cache = KVCache(ModelConfig(n_layer=2, n_head=1, n_embd=4, vocab_size=8), batch_size=1, max_length=3)
    k = torch.randn(1, 1, 6, 4)
    for layer in cache:
        layer.update(k[:, :, :3], k[:, :, :3])
    cache.reserve(2)  # smaller than the capacity
    cache.truncate(2)
    cache.reserve(6)
    for layer in cache:
        held, _ = layer.update(k[:, :, 2:], k[:, :, 2:])
        assert torch.equal(held, k)
    with pytest.raises(ValueError, match="a KV cache of 6 positions has no 7"):
        cache.truncate(7)


def test_length_is_the_minimum_over_layers():
    """As after a forward pass interrupted between two layers."""
    cache = KVCache(ModelConfig(n_layer=2, n_head=1, n_embd=4, vocab_size=8), batch_size=1, max_length=3)
    cache[0].update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert cache.length == 0
    cache.truncate(0)
    assert cache[0].length == 0


SIZES = {"n_key_heads": 2, "n_value_heads": 4, "key_size": 3, "value_size": 5, "conv_size": 4}


def make_states(**options) -> KVCache:
    config = ModelConfig(n_layer=3, vocab_size=8, linear_attention=SIZES, linear_attention_indices=[1, 0, 1])
    return KVCache(config, **({"batch_size": 2, "max_length": 7} | options))


def feed(cache, value, count=1):
    """What a forward pass of ``count`` tokens does; the states become ``value``."""
    for layer in cache:
        if isinstance(layer, StateCache):
            layer.update(torch.full_like(layer.state, value), torch.full_like(layer.window, value), count)
        else:
            keys = torch.full_like(layer.keys[:, :, :count], value)
            layer.update(keys, keys)


def test_states_have_a_fixed_size():
    cache = make_states(dtype=torch.bfloat16)
    assert [tuple(x.shape) for x in cache.recurrent_states] == [(2, 4, 3, 5), (2, 3, 32)] * 2
    assert [x.dtype for x in cache.recurrent_states] == [torch.float32, torch.bfloat16] * 2
    assert make_states(dtype=torch.float64)[0].state.dtype == torch.float64
    assert sum(x.nbytes for x in cache.recurrent_states) == 2 * 2 * (4 * 3 * 5 * 4 + 3 * (2 * 2 * 3 + 4 * 5) * 2)
    before = [x.data_ptr() for x in cache.recurrent_states]
    feed(cache, 1, 5)
    cache.reserve(20)
    assert cache.capacity == 20 and cache.length == 5 and len(cache.tensors) == 2
    assert [x.data_ptr() for x in cache.recurrent_states] == before
    view = cache.view(slice(1, 2), slice(3, 9), 0)
    assert view.capacity == 6 and view[1].keys.size(2) == 6
    view.truncate(0)  # another sequence takes the row
    assert [state[:, 0].unique().tolist() for state in cache.recurrent_states] == [[0, 1]] * 4
    assert cache.length == 5 and view.length == 0


def test_states_return_to_the_saved_ones_or_to_none():
    cache = make_states()
    feed(cache, 3, 3)
    cache.truncate(3)
    cache.save()
    feed(cache, 4)
    feed(cache, 5)
    cache.truncate(4)
    assert cache.length == 3 and {x.unique().item() for x in cache.recurrent_states} == {3}
    feed(cache, 6)
    cache.truncate(2)
    feed(cache, 7, 4)
    cache.truncate(3)  # the saved positions are others
    assert cache.length == 0 and not any(x.any() for x in cache.recurrent_states)


def test_a_view_does_not_return_to_states_of_other_rows():
    cache = make_states()
    cache.save()
    feed(cache, 1)
    cache.view(slice(1, 2), slice(0, 7), 0).truncate(0)
    assert [state[:, 0].unique().tolist() for state in cache.recurrent_states] == [[0, 1]] * 4


@pytest.mark.parametrize("n_layers", [0, 1, 2])
def test_an_interrupted_update_of_states_is_not_mistaken_for_a_complete_one(n_layers):
    cache = make_states()
    feed(cache, 1, 3)
    for layer in cache.layers[:n_layers]:
        if isinstance(layer, StateCache):
            layer.update(layer.state + 1, layer.window, 2)
        else:
            layer.update(layer.keys[:, :, :2], layer.values[:, :, :2])
    layer = next(layer for layer in cache.layers[n_layers:] if isinstance(layer, StateCache))
    with pytest.raises(RuntimeError):
        layer.update(layer.state + 1, layer.window[:, 1:], 2)
    cache.truncate(cache.length)
    assert cache.length == 0 and not any(x.any() for x in cache.recurrent_states)
