import pytest
import torch

from toolkit.models.config import ModelConfig
from toolkit.models.kv_cache import KVCache, LayerCache


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
