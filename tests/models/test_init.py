import math
import threading
import time

import torch
from helpers.initialize import initialize
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from toolkit.models import init
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.models.init import draw


def make(seed: int = 1, meta: bool = False, **changes) -> GPT:
    config = ModelConfig(vocab_size=300, n_layer=2, n_embd=64, block_size=32, **changes)
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config)
    initialize(model, seed)
    return model


def same(a: GPT, b: GPT) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)


def test_n3_initial_weights_depend_on_seed_and_name_only():
    torch.manual_seed(5)
    first = make()
    torch.manual_seed(6)  # the global generator has no effect
    assert same(first, make())
    assert not same(first, make(seed=2))
    one = first.state_dict()["transformer.h.1.attn.qkv.weight"]
    assert torch.equal(one, draw("transformer.h.1.attn.qkv.weight", one.shape, seed=1, config=first.config))
    assert not torch.equal(one, first.state_dict()["transformer.h.0.attn.qkv.weight"])


def test_n3_initial_weights_do_not_depend_on_meta_device_or_dtype():
    assert same(make(), make(meta=True))
    with torch.device("meta"):
        low = GPT(make().config).bfloat16()
    initialize(low, 1)
    assert same(low, make().bfloat16())


def test_n3_initial_weights_do_not_depend_on_module_order():
    model = GPT(make().config)
    head = model.lm_head
    del model.lm_head
    model.add_module("lm_head", head)  # now last
    initialize(model, 1)
    assert torch.equal(model.lm_head.weight, make().lm_head.weight)


def test_n3_initial_weights_do_not_depend_on_threads_or_requested_parameters(monkeypatch):
    """Matrices are drawn ahead of the requests, at most one per thread; a pipeline stage requests a part of them."""
    model = make(meta=True, tie_embeddings=True)
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False) if "lm_head" not in name}
    values = {name: draw(name, shape, seed=1, config=model.config) for name, shape in shapes.items()}
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        for names in (list(shapes), list(shapes)[10:], list(shapes)[::-1]):
            drawn = []
            monkeypatch.setattr(init, "draw", lambda name, *a, d=drawn, **k: d.append(name) or draw(name, *a, **k))
            n_threads = threading.active_count()
            value_of, most_ahead = init.weight_initializer(model, 1), 0
            for n, name in enumerate(names, start=1):
                assert torch.equal(value_of(name, shapes[name]), values[name]), (threads, name)
                most_ahead = max(most_ahead, len(drawn) - n)
            if names == list(shapes):
                assert most_ahead < threads and sorted(drawn) == sorted(shapes)
                until = time.monotonic() + 60  # the threads end while the function is kept, as FSDP's strategy does
                while threading.active_count() > n_threads:
                    assert time.monotonic() < until


def test_few_large_matrices_are_drawn_ahead(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(init, "DRAWN_NUMEL", 8)
    sizes = iter([3, 3, 5, 20, 2])
    values = init._draw_ahead(lambda *_: None, ((str(n), torch.Size((n, 1))) for n in sizes))
    assert [sizes.__length_hint__() for _ in values] == [2, 1, 1, 0, 0]  # the next size is known, but not drawn


def test_a_model_is_initialized_in_a_fake_tensor_mode():
    with FakeTensorMode():
        model = GPT(make().config)
    assert {(type(p.data), p.device.type) for p in model.parameters()} == {(FakeTensor, "cpu")}


def test_n10_tied_head_stays_one_tensor():
    for meta in (False, True):
        model = make(meta=meta, tie_embeddings=True)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert torch.equal(model.lm_head.weight, make().transformer.wte.weight)
        assert sum(n.endswith(("wte.weight", "lm_head.weight")) for n, _ in model.named_parameters()) == 1
    assert model.bfloat16().lm_head.weight is model.transformer.wte.weight
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model.tie_weights()
    assert model.lm_head.weight is model.transformer.wte.weight
    untied = make()
    assert untied.lm_head.weight is not untied.transformer.wte.weight
    assert not torch.equal(untied.lm_head.weight, untied.transformer.wte.weight)


def test_initial_values_follow_the_table():
    config = get_config("gpt2").to_dict() | {"n_layer": 8, "n_embd": 64, "n_head": 4}
    model = GPT(ModelConfig(**config | dict.fromkeys(("head_size", "intermediate_size", "n_query_groups"))))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(9.0)
    initialize(model, 0)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name or "ln_f" in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / math.sqrt(16) if ".proj." in name else 0.02
            assert abs(p.std().item() / std - 1) < 0.05, name
            assert abs(p.mean().item()) < 0.05 * std * 3, name


def test_frozen_parameter_stays_frozen():
    with torch.device("meta"):
        model = GPT(make().config)
    model.transformer.wte.weight.requires_grad_(False)
    initialize(model, 0)
    assert not model.transformer.wte.weight.requires_grad and model.lm_head.weight.requires_grad
