"""Adapters on stacked experts and routers equal merged weights, expert by expert."""

import pytest
import torch
from helpers.initialize import add_lora

from tests.models.test_compile import RAGGED, count_graphs
from tests.models.test_lora import NONE, merged, stir
from tests.models.test_moe import BASE, STYLES, batch, make
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import adapted_on_meta, draw_adapter, is_adapter, without_adapters
from toolkit.models.lora_config import LoRAConfig

ALL = {"experts": True, "router": True, "mlp": True}


def adapted(style: str, **options) -> GPT:
    """Return a model with non-zero adapters of rank 3, which needs padding."""
    model = make(style)
    add_lora(model, LoRAConfig(**{**NONE, "r": 3, "alpha": 6, **options}))
    stir(model)
    return model


@pytest.mark.parametrize("options", [{"experts": True}, {"router": True}, ALL], ids="+".join)
@pytest.mark.parametrize("style", [*STYLES, "deepseek_v3"])
@torch.no_grad()
def test_unmerged_adapters_equal_merged_adapters(style, options):
    model, (ids, labels) = adapted(style, **options), batch([20, 13], 20)
    plain, expected = make(style), merged(model)
    torch.testing.assert_close(model(ids), expected(ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(ids, labels)[0], expected(ids, labels)[0], rtol=1e-5, atol=0)
    assert (model(ids) - plain(ids)).abs().max() > 1e-3
    with without_adapters(model):
        torch.testing.assert_close(model(ids), plain(ids), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"mlp": True}, ALL], ids="+".join)
def test_adapted_layers(options):
    """With --lora_mlp, shared experts and dense layers; no option adapts the shared experts' gate."""
    mlp = adapted("qwen2_moe", query=True, **options).transformer.h[0].mlp
    names = {name.partition(".lora.")[0] for name, _ in mlp.named_parameters() if ".lora." in name}
    layers = ("fc_1", "fc_2", "proj")
    wanted = {f"shared_expert.{layer}" for layer in layers} if "mlp" in options else set()
    wanted |= {"gate", *(f"experts.{layer}" for layer in layers)} if "experts" in options else set()
    assert names == wanted
    dense = adapted("qwen3_moe", query=True, **options).transformer.h[0].mlp
    assert any(map(is_adapter, dense.state_dict())) == bool(options)


@pytest.mark.parametrize("style", ["mixtral", "gpt_oss"])
def test_gradients_match_merged_weights_and_only_used_experts_have_them(style):
    """The gradients of A and B are those of W = W0 + s B A, by the chain rule."""
    model, (ids, labels) = adapted(style, experts=True), batch([5], 5)
    reference = merged(model)
    for each in (model, reference):
        each(ids, labels)[0].backward()
    used = {True: 0, False: 0}
    for name, p in model.named_parameters():
        assert (p.grad is not None) == is_adapter(name)
        if name.endswith(".A"):
            layer, b = name.removesuffix(".lora.whole.A"), model.get_parameter(name[:-1] + "B")
            gradient = reference.get_parameter(f"{layer}.weight").grad
            torch.testing.assert_close(p.grad, 2 * b.detach().mT @ gradient, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(b.grad, 2 * gradient @ p.detach().mT, rtol=1e-4, atol=1e-6)
            for e in range(BASE["n_expert"]):
                is_used = bool(gradient[e].any())
                used[is_used] += 1
                assert bool(p.grad[e].any()) == bool(b.grad[e].any()) == is_used, (name, e)
    assert all(used.values())


def test_initial_values_depend_on_seed_and_name_only():
    model = make("mixtral")
    add_lora(model, LoRAConfig(experts=True, router=True), seed=5)
    for name, p in model.named_parameters():
        if is_adapter(name):
            assert torch.equal(p, draw_adapter(name, p.shape, seed=5)), name
            assert (p.abs().max() == 0) == name.endswith(".B")
    a = model.transformer.h[0].mlp.experts.proj.lora.whole.A
    assert a.shape == (6, 8, 24) and 0.9 * 24**-0.5 < a.abs().max() < 24**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_adapters_in_16_bits_with_fp32_gradients(dtype):
    model, (ids, labels) = adapted("qwen2_moe", **ALL), batch([16, 16], 16)
    exact = model(ids, labels)[0].item()
    with torch.autocast("cpu", dtype=dtype):
        loss = model(ids, labels)[0]
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=0.05)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in trained)


def test_dropout_is_applied_in_training_only():
    model, (ids, _) = adapted("mixtral", experts=True, dropout=0.5), batch([16], 16)
    torch.manual_seed(0)
    with torch.no_grad():
        assert not torch.equal(model.train()(ids), model(ids))
        assert torch.equal(model.eval()(ids), adapted("mixtral", experts=True).eval()(ids))


@pytest.mark.parametrize("part", ["experts", "router"])
def test_dora_is_refused(part):
    with pytest.raises(UserError, match=rf"--lora_{part} true: .* --lora_dora true, .*dense weights.*; choose one"):
        LoRAConfig(**{part: True}, dora=True)


def test_adapters_without_a_layer_to_adapt_do_nothing():
    """planning/compatibility.py refuses the options."""
    model = adapted_on_meta(ModelConfig(**BASE | STYLES["mixtral"]), LoRAConfig(mlp=True))
    assert not any(".mlp." in name and is_adapter(name) for name, _ in model.named_parameters())


@pytest.mark.slow
def test_adapted_blocks_of_rows_of_any_length_share_graphs():
    """One for the first block, whose input needs no gradient, one for the others, and one for validation."""
    model = adapted("qwen2_moe", **ALL, key=True, projection=True)
    try:
        assert count_graphs(model, RAGGED, longest_ragged=30) == 3
    finally:
        torch.compiler.reset()


def test_older_versions_read_adapters_without_experts():
    assert {"experts", "router"}.isdisjoint(LoRAConfig(mlp=True).to_dict())
    assert LoRAConfig(**LoRAConfig(router=True).to_dict()) == LoRAConfig(router=True)
