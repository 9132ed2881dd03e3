from dataclasses import replace

import pytest
import torch
from helpers.tiny_configs import NATIVE_CONFIGS
from torch.utils.flop_counter import FlopCounterMode

from toolkit.distributed.device import peak_flops
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config
from toolkit.models.flops import flops_per_token, matmul_parameters
from toolkit.models.gpt import GPT
from toolkit.models.lora import adapted_on_meta
from toolkit.models.lora_config import LoRAConfig


def test_n8_only_active_experts_count():
    options = {"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "moe_intermediate_size": 24}
    dense = replace(get_config("pico-llama").with_vocab_size(512), intermediate_size=48)
    sparse = replace(dense, moe_indices=[0, 1], shared_expert_intermediate_size=16, **options)
    with torch.device("meta"):
        one, other = GPT(dense), GPT(sparse)
    router_and_shared_expert = 8 * 64 + 3 * 64 * 16 + 64
    assert matmul_parameters(other) - matmul_parameters(one) == router_and_shared_expert  # 2 x 24 = 48
    more = flops_per_token(other, sparse, 64) - flops_per_token(one, dense, 64)
    assert more == 6 * router_and_shared_expert

    adapters = adapted_on_meta(sparse, LoRAConfig(r=4, query=False, value=False, experts=True, router=True))
    active = matmul_parameters(adapters) - matmul_parameters(other)
    assert active == 4 * ((64 + 8) + 2 * 3 * (64 + 24))  # of the router and two experts
    trained = sum(p.numel() for p in adapters.parameters() if p.requires_grad)
    assert trained == 4 * ((64 + 8) + 8 * 3 * (64 + 24))


def test_n8_linear_attention_has_a_cost_per_token_for_any_length():
    config = ModelConfig(n_layer=2, n_head=4, n_embd=64, **NATIVE_CONFIGS["qwen3.5"])  # one layer of each kind
    with torch.device("meta"):
        model = GPT(config)
    state = 6 * 8 * 16
    for T in (10, 1000):
        expected = 6 * matmul_parameters(model) + 18 * state + 12 * 4 * 32 * T
        assert flops_per_token(model, config, T) == expected
        half = 2 * matmul_parameters(model) + 6 * state + 4 * 4 * 32 * T / 2
        assert flops_per_token(model, config, T, causal=True, forward_only=True) == half


@pytest.mark.parametrize("name", ["pico-llama", "pythia-14m", "gpt2"])
def test_n8_flops_match_torch_flop_counter(name):
    """Compared with torch's count of a forward pass, times three for forward and backward."""
    config = get_config(name).with_vocab_size(512)
    T = 64
    with torch.device("meta"):
        model = GPT(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(2, T, dtype=torch.int64))
    counted = 3 * counter.get_total_flops() / (2 * T)
    assert flops_per_token(model, config, T) == pytest.approx(counted, rel=0.01)


def test_n8_tied_head_counts_once_and_embedding_lookup_does_not():
    config = get_config("pico-llama").with_vocab_size(512)
    with torch.device("meta"):
        model = GPT(config)
    embedding = 512 * config.n_embd
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert config.tie_embeddings and sum(p.numel() for p in model.parameters()) == matmul_parameters(model) + norms
    assert matmul_parameters(model) > embedding
    full, causal = (flops_per_token(model, config, 1000, causal=half) for half in (False, True))
    assert full - causal == 6 * config.n_layer * config.n_embd * 1000


@pytest.mark.parametrize(
    ("device_name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Radeon", None),
        ("NVIDIA H200 MIG 1g.18gb", 989e12 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 312e12 * 3 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 1c.4g.40gb", 989e12 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 989e12),
    ],  # fmt: skip
)
def test_n8_peaks_are_dense_and_unknown_devices_have_none(monkeypatch, device_name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    assert peak_flops(torch.device("cuda"), "bf16-mixed") == pytest.approx(peak)
    assert peak_flops(torch.device("cuda"), "32-true") is None
    assert peak_flops(torch.device("cpu"), "bf16-mixed") is None
