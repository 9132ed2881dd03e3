import sys
from typing import Any

import pytest
import torch
from helpers.initialize import add_lora
from torch import nn
from torch.nn import functional as F

from tests.models import test_lora
from tests.models.test_lora import NO_HEAD, stir, tokens
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.init import Materializer
from toolkit.models.lora import adapter_values, is_adapter
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.lora_layers import LoRALinear
from toolkit.models.quantize import quantize_linears

pytest.importorskip("bitsandbytes")
SIZE = {"vocab_size": 160, "block_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 64}
LLAMA = ModelConfig(**SIZE, n_query_groups=2)
NEOX = ModelConfig(**SIZE, bias=True, norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP")
MOE = {**SIZE, "mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 64}
EXPERTS = ModelConfig(**MOE, shared_expert_intermediate_size=64, bias=True, moe_indices=[1, 0])
DEEPSEEK = ModelConfig(**MOE, router_scores="sigmoid", norm_topk_prob=True)
KINDS = ["bnb.nf4", "bnb.nf4-dq"]
ON_EXPERTS = {"experts": True, "router": True}
LORA = LoRAConfig(**{**NO_HEAD, "r": 4, "alpha": 6})


def base(config: ModelConfig = LLAMA) -> GPT:
    return test_lora.base(config)


def adapted(config: ModelConfig = LLAMA, **options: Any) -> GPT:
    return test_lora.adapted(config, **options)


def restored(quantized: GPT, config=LLAMA, **options) -> GPT:
    """Return a plain model with the dequantized weights."""
    plain = adapted(config, **{**LORA.to_dict(), **options})
    for name, part in quantized.named_modules():
        if hasattr(part, "base_weight"):
            plain.get_submodule(name).weight.data = part.base_weight()
    return plain


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (NEOX, {}), (NEOX, {"dora": True}), (EXPERTS, ON_EXPERTS), (DEEPSEEK, ON_EXPERTS),
        *(pytest.param(LLAMA, options, marks=pytest.mark.slow) for options in ({}, {"dora": True})),
        pytest.param(EXPERTS, {}, marks=pytest.mark.slow),
    ],
    ids=["biases", "biases-dora", "experts", "sigmoid", "llama", "llama-dora", "frozen-experts"],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_match_dequantized_weights(config, kind, options):
    model = adapted(config, **{**LORA.to_dict(), **options})
    quantize_linears(model, kind)
    plain, ids = restored(model, config, **options), tokens()
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(ids), adapted(config, **{**LORA.to_dict(), **options})(ids), atol=1e-3)
    for each in (model, plain):
        each(ids, ids)[0].backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == is_adapter(name)
        if p.requires_grad:
            torch.testing.assert_close(p.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4)
        else:
            assert p.grad is None


def test_only_linear_layers_of_blocks_are_quantized():
    model = base()
    before = {name: p.clone() for name, p in model.named_parameters()}
    add_lora(model, LoRAConfig(query=True, head=True))
    quantize_linears(model, "bnb.nf4")
    inner = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    held = {f"{name}.weight" for name in inner if name.startswith("transformer.h")}
    assert {name for name, p in model.named_parameters() if p.dtype == torch.uint8} == held
    assert len(held) == LLAMA.n_layer * 5
    assert isinstance(model.lm_head, LoRALinear)
    for name, p in model.named_parameters():
        if name in held:
            assert p.nbytes == before[name].numel() / 2
        elif not is_adapter(name):
            assert torch.equal(p, before[name])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_quantized_from_checkpoint_values(kind):
    """On the meta device and in bf16: weights are read from the file one by one, without prior rounding."""
    weights, asked = base().state_dict(), []
    with torch.device("meta"):
        model = GPT(LLAMA).to(torch.bfloat16)
    add_lora(model, LORA)
    quantize_linears(model, kind, lambda name: asked.append(name) or weights[name])
    direct = base()
    quantize_linears(direct, kind)
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "base_weight")}
    quantized_layers = {name: part for name, part in layers.items() if name != "lm_head"}
    assert asked == [f"{name}.weight" for name in quantized_layers]
    for name, part in quantized_layers.items():
        actual = part.base_weight()
        assert torch.equal(actual, direct.get_submodule(name).base_weight())
        original = weights[f"{name}.weight"]
        assert 0.01 < (actual - original).norm() / original.norm() < 0.15
    assert model.transformer.wte.weight.is_meta and layers["transformer.h.0.attn.qkv"].lora.query.A.is_meta


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16-true", "bf16-mixed"])
def test_bf16_error_is_at_most_that_of_plain_layers(mixed):
    exact = adapted(**LORA.to_dict())
    quantize_linears(exact, "bnb.nf4")
    expected, ids = exact(tokens()), tokens()
    model, plain = adapted(**LORA.to_dict()), restored(exact)
    quantize_linears(model, "bnb.nf4")
    if not mixed:
        for each in (model, plain):
            for name, p in each.named_parameters():
                if not is_adapter(name) and p.is_floating_point():
                    p.data = p.data.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        actual, reference = model(ids), plain(ids)
        loss = model(ids, ids)[0]
        part = model.transformer.h[0].mlp.proj.project(torch.ones(1, 256, dtype=None if mixed else torch.bfloat16))
    assert part.dtype == torch.bfloat16  # the layer's matrix product, not only the head's
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() <= 1.5 * (reference.float() - expected).norm()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for n, p in model.named_parameters() if is_adapter(n))


def test_training_after_evaluation():
    """bitsandbytes' layer would switch to a kernel without gradient on some CPUs."""
    model, ids = adapted(**LORA.to_dict()), tokens()
    quantize_linears(model, "bnb.nf4")
    first = _gradients(model, ids)
    with torch.no_grad():
        model.eval()(ids)
    model.train()
    again = _gradients(model, ids)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and any(a.any() for a in first)


def _gradients(model: GPT, ids: torch.Tensor) -> list[torch.Tensor]:
    return torch.autograd.grad(model(ids, ids)[0], [p for p in model.parameters() if p.requires_grad])


def test_quantized_model_learns():
    model, ids = base(), tokens()
    add_lora(model, LORA)
    quantize_linears(model, "bnb.nf4-dq")
    held = {name: p.clone() for name, p in model.named_parameters() if not is_adapter(name)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(ids, ids)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(p, held[name]) for name, p in model.named_parameters() if name in held)


def test_remaining_meta_parameters_are_materialized_later():
    """As in a run: quantize from the checkpoint, then load the other weights."""
    weights = base().state_dict()
    with torch.device("meta"):
        model = GPT(LLAMA)
    add_lora(model, LORA)
    quantize_linears(model, "bnb.nf4", weights.__getitem__)
    values = adapter_values(model, 1, weights.__getitem__)
    materialize = Materializer(model, lambda n, shape: values(n, shape) if is_adapter(n) else weights[n])
    for module in model.modules():
        materialize(module)
    direct = base()
    add_lora(direct, LORA, seed=1)
    quantize_linears(direct, "bnb.nf4")
    for actual, reference in zip(model.to("cpu").named_parameters(), direct.named_parameters(), strict=True):
        assert actual[0] == reference[0] and torch.equal(actual[1], reference[1]), actual[0]
    assert torch.equal(model(tokens()), direct(tokens()))


def test_double_quantization_uses_less_memory():
    sizes = []
    for kind in KINDS:
        layer = nn.Linear(256, 512, bias=False)
        model = base()
        model.transformer.h[0].mlp.fc_1 = layer
        quantize_linears(model, kind)
        state = model.transformer.h[0].mlp.fc_1.weight.quant_state
        sizes.append(state.absmax.nbytes)
        torch.testing.assert_close(F.linear(torch.eye(256), layer.weight).norm(), layer.weight.norm())
    assert sizes == [4 * 256 * 512 // 64, 256 * 512 // 64]


def test_widths_not_divisible_by_block_size_are_rejected():
    model = GPT(ModelConfig(vocab_size=160, n_layer=1, n_head=3, n_embd=96))
    with pytest.raises(UserError, match="transformer.h.0.attn.qkv has 96 input features, not a multiple of 64"):
        quantize_linears(model, "bnb.nf4")


def test_missing_bitsandbytes_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "toolkit.models.linear_4bit", raising=False)
    with pytest.raises(UserError, match="--quantize bnb.nf4: needs bitsandbytes; run: pip install"):
        quantize_linears(base(), "bnb.nf4")


def test_adapters_before_or_after_quantization_are_equal():
    early, late = base(), base()
    add_lora(early, LORA)
    for model in (early, late):
        quantize_linears(model, "bnb.nf4")
    stir(early)
    assert not any(map(is_adapter, dict(late.named_parameters())))
    assert late(tokens()).isfinite().all() and not torch.equal(early(tokens()), late(tokens()))


def test_experts_are_quantized_and_their_dense_weights_are_not_saved():
    model, ids, dense = adapted(EXPERTS, **ON_EXPERTS), tokens(), []
    quantize_linears(model, "bnb.nf4")
    mlp = model.transformer.h[0].mlp
    assert mlp.experts.fc_1.weight.dtype == torch.uint8 and mlp.experts.fc_1.weight.nbytes == 4 * 64 * 64 / 2
    assert mlp.shared_expert.proj.weight.dtype == torch.uint8
    assert mlp.gate.weight.dtype == mlp.shared_expert_gate.weight.dtype == torch.float32

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (4, 64, 64):
            dense.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)[0].backward()
    assert not dense
