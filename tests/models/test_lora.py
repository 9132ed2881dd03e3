import dataclasses
import pickle
from typing import Any

import pytest
import torch
from helpers.initialize import add_lora, initialize
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.models import loss as loss_module
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import adapted_on_meta, attention_rows, draw_adapter, initial_magnitude, is_adapter
from toolkit.models.lora_config import PARTS, LoRAConfig
from toolkit.models.lora_layers import AdaptedLayer

LLAMA = ModelConfig(vocab_size=160, block_size=32, n_layer=2, n_head=4, n_query_groups=2, n_embd=32)
NEOX = dataclasses.replace(LLAMA, n_query_groups=4, bias=True, norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP")
DELTA_NET = dataclasses.replace(
    LLAMA, attention_gate=True, linear_attention_indices=[1, 0],
    linear_attention={"n_key_heads": 2, "n_value_heads": 4, "key_size": 8, "value_size": 8, "conv_size": 4},
)  # fmt: skip
DENSE = [part for part in PARTS if part not in ("experts", "router", "linear_attention")]
NONE = dict.fromkeys(PARTS, False)
ALL = NONE | dict.fromkeys(DENSE, True)
NO_HEAD = {**ALL, "head": False}


def base(config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(config)
    initialize(model, 0)
    g = torch.Generator().manual_seed(4)
    for name, p in model.named_parameters():
        p.data.mul_(5 if p.dim() == 2 else 1)  # non-trivial logits and attention
        if name.endswith("bias"):
            p.data.normal_(0, 0.1, generator=g)
    return model.to(dtype)


def adapted(config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float32, **options: Any) -> GPT:
    """Return the base with non-zero adapters."""
    model = base(config, dtype)
    add_lora(model, LoRAConfig(**{**NONE, "r": 4, "alpha": 6, **options}))
    stir(model)
    return model


def stir(model: GPT) -> None:
    g = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if is_adapter(name):
            noise = torch.randn(p.shape, generator=g)
            p.data.copy_(p * (1 + 0.1 * noise) if name.endswith("magnitude") else 0.1 * noise)


def merged(model: GPT) -> GPT:
    """Return a plain model with merged adapters."""
    plain = GPT(dataclasses.replace(model.config, tie_embeddings=False))
    weights = {name: p.clone() for name, p in model.state_dict().items() if not is_adapter(name)}
    for name, part in model.named_modules():
        if isinstance(part, AdaptedLayer):
            weights[f"{name}.weight"] = part.merged(part.weight.detach())
    plain.load_state_dict(weights)
    return plain


def tokens(n: int = 20) -> torch.Tensor:
    return torch.randint(0, 160, (3, n), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in ({}, {"rslora": True}) for options in (*({part: True} for part in DENSE), ALL)),
        *(({"dora": True}, {part: True}) for part in DENSE if part != "head"),  # not supported
        ({"dora": True}, ALL | {"head": False}),
    ],
    ids=lambda words: "+".join(words) or "lora",
)
@pytest.mark.parametrize("config", [LLAMA, pytest.param(NEOX, marks=pytest.mark.slow)], ids=["grouped", "biases"])
def test_unmerged_adapters_equal_merged_adapters(config, kind, options):
    model, ids = adapted(config, **options, **kind), tokens()
    with torch.no_grad():
        actual, reference, plain = model(ids), merged(model)(ids), base(config)(ids)
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-5)
        assert (actual - plain).abs().max() > 1e-2
        torch.testing.assert_close(model(ids, ids)[0], merged(model)(ids, ids)[0], rtol=1e-6, atol=0)


def test_adapters_of_linear_attention_and_of_gated_queries():
    model = adapted(DELTA_NET, linear_attention=True, query=True)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), merged(model)(tokens()), rtol=1e-5, atol=1e-5)
    names = {name.partition(".h.")[2] for name in model.state_dict() if is_adapter(name) and name.endswith(".A")}
    layers = ("in_qkv", "in_gate", "in_beta", "in_decay", "proj")
    assert names == {"1.attn.qkv.lora.query.A"} | {f"0.attn.{layer}.lora.whole.A" for layer in layers}
    assert model.transformer.h[1].attn.qkv.lora.query.B.shape == (64, 4)  # gates and queries


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_adapter_changes_only_its_part_of_the_fused_projection(part):
    model, x = adapted(**{part: True}), torch.randn(2, 3, 32)
    layer = model.transformer.h[0].attn.qkv
    changed = (layer(x) - F.linear(x, layer.weight, layer.bias)).abs().amax((0, 1)) > 0
    rows = attention_rows(LLAMA)["qkv"][part]
    assert rows == {"query": range(32), "key": range(32, 48), "value": range(48, 64)}[part]
    assert changed.nonzero().flatten().tolist() == list(rows)
    assert [n for n, _ in layer.named_parameters()] == ["weight", f"lora.{part}.A", f"lora.{part}.B"]


def test_scaling_matches_the_paper():
    for rslora, scaling in [(False, 6 / 4), (True, 6 / 2)]:
        layer = adapted(projection=True, rslora=rslora).transformer.h[1].attn.proj
        a, b = layer.lora.whole.A, layer.lora.whole.B
        torch.testing.assert_close(layer.merged(layer.weight) - layer.weight, scaling * b @ a)


def test_dora_matches_the_paper():
    """Section 4: m times the direction of W + scaling B A, by rows; the norm has no gradient."""
    layer, x = adapted(NEOX, projection=True, dora=True).transformer.h[0].attn.proj, torch.randn(5, 32)
    adapter = layer.lora.whole
    direction = layer.weight + 6 / 4 * adapter.B @ adapter.A
    expected = F.linear(x, direction) * (adapter.magnitude / direction.norm(dim=1).detach()) + layer.bias
    torch.testing.assert_close(layer(x), expected)
    trained = [adapter.A, adapter.B, adapter.magnitude]
    for a, b in zip(
        torch.autograd.grad(layer(x).square().sum(), trained), torch.autograd.grad(expected.square().sum(), trained),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_small_dora_updates_are_not_lost_in_bf16():
    """In bf16 a factor of 1.003 would round to 1, and magnitudes could only change in steps of 1/128."""
    model = base(dtype=torch.bfloat16)
    add_lora(model, LoRAConfig(projection=True, dora=True))
    layer, x = model.transformer.h[0].attn.proj, torch.randn(200, 32).to(torch.bfloat16)
    before = layer(x).float()
    layer.lora.whole.magnitude.data.mul_(1.003)
    assert 1.001 < layer(x).float().norm() / before.norm() < 1.006


@pytest.mark.parametrize("kind", [{}, {"dora": True}])
def test_training_starts_at_the_base_and_updates_only_adapters(kind):
    model, ids = base(), tokens()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(ids)
    add_lora(model, LoRAConfig(**(NO_HEAD if kind else ALL), **kind), seed=7)
    torch.testing.assert_close(model(ids).detach(), expected, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):  # B is zero in the first step, so A has no gradient
        loss = model(ids, ids)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert p.requires_grad == is_adapter(name) and p.dtype == torch.float32, name
        if is_adapter(name):
            assert not torch.equal(p, draw_or_norm(model, name, p)), name
        else:
            assert torch.equal(p, before[name]), name
    assert model(ids, ids)[0] < loss


def draw_or_norm(model: GPT, name: str, p: torch.Tensor) -> torch.Tensor:
    if not name.endswith("magnitude"):
        return draw_adapter(name, p.shape, seed=7)
    layer, part = name.split(".lora.")
    norms = initial_magnitude(model.get_submodule(layer).weight)
    return norms[model.get_submodule(f"{layer}.lora.{part.split('.')[0]}").rows]


def test_initial_adapters_depend_on_seed_and_name_only():
    name, shape = "transformer.h.0.attn.qkv.lora.query.A", (4, 64)
    first = draw_adapter(name, shape, 1)
    assert torch.equal(first, draw_adapter(name, shape, 1)) and first.dtype == torch.float32
    assert not torch.equal(first, draw_adapter(name, shape, 2))
    assert not torch.equal(first, draw_adapter(name.replace("h.0", "h.1"), shape, 1))
    assert first.abs().max() <= 1 / 8 and first.std() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
    assert not draw_adapter(name[:-1] + "B", (64, 4), 1).any()
    model = base()
    add_lora(model, LoRAConfig(query=True), seed=1)
    adapter = model.transformer.h[0].attn.qkv.lora.query
    assert torch.equal(adapter.A, draw_adapter(name, (8, 32), 1)) and not adapter.B.any()


def test_dora_magnitudes_start_at_row_norms():
    model = base()
    add_lora(model, LoRAConfig(key=True, dora=True))
    layer = model.transformer.h[1].attn.qkv
    for part, rows in attention_rows(LLAMA)["qkv"].items():
        torch.testing.assert_close(layer.lora[part].magnitude.data, layer.weight[rows].norm(dim=1))


def test_meta_device_has_the_same_names_shapes_and_ties():
    config = dataclasses.replace(LLAMA, tie_embeddings=True)
    with torch.device("meta"):
        model = GPT(config)
    add_lora(model, LoRAConfig(**ALL))
    real = base(config)
    add_lora(real, LoRAConfig(**ALL))
    assert all(p.is_meta for p in model.parameters())
    shapes = [[(n, p.shape, p.requires_grad) for n, p in m.named_parameters()] for m in (model, real)]
    assert shapes[0] == shapes[1]
    assert model.lm_head.weight is model.transformer.wte.weight
    missing = base(config).state_dict().keys() - real.state_dict().keys()
    assert not missing  # the base keeps its names


def test_dropout_applies_only_to_adapters_in_training():
    for kind in ({}, {"dora": True}):
        model, ids = adapted(**NO_HEAD, dropout=0.5, **kind), tokens()
        exact = adapted(**NO_HEAD, **kind)
        torch.testing.assert_close(model.eval()(ids), exact(ids))
        torch.manual_seed(0)
        one, two = model.train()(ids), model(ids)
        assert not torch.allclose(one, two)
        for p in model.parameters():
            if p.requires_grad and p.dim() == 2:
                p.data.zero_()
        if not kind:
            torch.testing.assert_close(model(ids), base()(ids))


def test_dora_with_dropout_matches_peft():
    layer, x = adapted(NEOX, projection=True, dora=True, dropout=0.5).transformer.h[0].attn.proj, torch.randn(5, 32)
    adapter = layer.lora.whole
    torch.manual_seed(3)
    actual = layer(x)
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.5)
    scale = adapter.magnitude / (layer.weight + 6 / 4 * adapter.B @ adapter.A).norm(dim=1)
    change = 6 / 4 * dropped @ adapter.A.t() @ adapter.B.t()
    extra = (scale - 1) * F.linear(dropped, layer.weight) + scale * change
    torch.testing.assert_close(actual, F.linear(x, layer.weight, layer.bias) + extra)


@pytest.mark.parametrize("kind", [{}, {"dora": True}])
@pytest.mark.parametrize("mixed", [False, True], ids=["bf16 base", "autocast"])
def test_bf16_error_is_at_most_that_of_merged_weights(mixed, kind):
    """The error is at most 1.5 times the error of the plain model with the same weights in bf16."""
    ids, parts = tokens(), NO_HEAD if kind else ALL
    exact = adapted(**parts, **kind)
    expected = exact(ids).detach()
    model = adapted(dtype=torch.float32 if mixed else torch.bfloat16, **parts, **kind)
    plain = merged(exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        actual = model(ids)
        reference = plain(ids) if mixed else plain.to(torch.bfloat16)(ids)
    assert actual.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if is_adapter(n))
    assert (actual.float() - expected).norm() <= 1.5 * (reference.float() - expected).norm()
    loss = model(ids, ids)[0]
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for n, p in model.named_parameters() if is_adapter(n))


@pytest.mark.parametrize("dropped", [0.0, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_with_adapted_head_matches_autograd(tied, dropped, monkeypatch):
    """On ragged, masked data, in chunks."""
    monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", 7)
    config = dataclasses.replace(LLAMA, tie_embeddings=tied)
    model, ids, labels = adapted(config, head=True, query=True, dropout=dropped), tokens(), tokens().roll(-1, 1)
    labels[0, 5:] = labels[1] = -100
    torch.manual_seed(5)
    loss, _ = model(ids, labels)
    torch.manual_seed(5)
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {"lm_head.lora.whole.A", "lm_head.lora.whole.B"} < trained.keys()
    grads = [torch.autograd.grad(value, trained.values()) for value in (loss, expected)]
    for name, actual, reference in zip(trained, *grads, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_no_gradient_buffer_for_frozen_head(monkeypatch):
    model, sizes = adapted(head=True), list[torch.Size]()
    for name in ("zeros_like", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda t, real=real, **k: sizes.append(t.shape) or real(t, **k))
    model(tokens(), tokens())[0].backward()
    assert model.lm_head.lora.whole.B.shape in sizes and model.lm_head.weight.shape not in sizes
    assert model.lm_head.weight.grad is None and model.lm_head.lora.whole.A.grad.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "--lora_r 0: must be greater than zero"),
        ({"r": -4}, "--lora_r -4"),
        ({"alpha": 0}, "--lora_alpha 0"),
        ({"alpha": float("nan")}, "--lora_alpha nan"),
        ({"dropout": 1.0}, "--lora_dropout 1.0"),
        ({"dropout": -0.1}, "--lora_dropout -0.1"),
        ({"query": False, "value": False}, "--lora_query false .* selects nothing to train"),
        ({"head": True, "dora": True}, "--lora_head true: cannot be combined with --lora_dora true"),
    ],
)
def test_invalid_options_name_the_flag(options, message):
    with pytest.raises(UserError, match=message):
        LoRAConfig(**options)


def test_options_of_the_command_and_config_are_inverse():
    config = LoRAConfig(r=4, alpha=6.0, key=True, value=False, rslora=True)
    options = config.to_options()
    assert options["lora_r"] == 4 and options["lora_key"] and not options["lora_value"]
    assert LoRAConfig.from_options(options | {"out_dir": "x"}) == config
    with pytest.raises(UserError, match="^--lora_r 0: must be greater than zero$"):
        LoRAConfig.from_options(options | {"lora_r": 0})


def test_adapted_model_on_meta():
    plain, adapted = adapted_on_meta(LLAMA, None), adapted_on_meta(LLAMA, LoRAConfig())
    assert all(p.is_meta and p.requires_grad for p in plain.parameters())
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert names == {name for name, _ in adapted.named_parameters() if is_adapter(name)} != set()
    assert plain.state_dict().keys() == {name for name in adapted.state_dict() if not is_adapter(name)}


def test_adapted_model_can_be_pickled():
    model = adapted(query=True)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens()), model(tokens()))
