"""Experts match loops over tokens and transformers' modules; the loss does not depend on the split of a batch."""

import math

import pytest
import torch
from helpers.initialize import initialize
from torch.nn import functional as F

from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.gpt import GPT
from toolkit.models.init import STD, draw
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.loss import mask_until_last_label
from toolkit.models.moe import LLaMAMoE, load_balancing_loss
from toolkit.optim.groups import no_decay_params

transformers = pytest.importorskip("transformers")

BASE = {
    "vocab_size": 90, "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32, "mlp_class_name": "LLaMAMoE",
    "n_expert": 6, "n_expert_per_token": 2, "moe_intermediate_size": 24, "intermediate_size": 40,
}  # fmt: skip
STYLES = {
    "mixtral": {"family": "mixtral", "norm_topk_prob": True},
    "qwen2_moe": {"family": "qwen2_moe", "attn_bias": True, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {"family": "qwen3_moe", "norm_qk": True, "moe_indices": [0, 1]},
    "gpt_oss": {
        "family": "gpt_oss", "bias": True, "attention_sinks": True, "norm_topk_prob": True, "swiglu_limit": 0.5,
        "sliding_window_size": 7, "sliding_window_indices": [1, 0],
    },
}  # fmt: skip
DEEPSEEK = {
    "family": "deepseek_v3", "router_scores": "sigmoid", "n_expert_groups": 3, "n_topk_groups": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "shared_expert_intermediate_size": 24,
    "shared_expert_gate": False,
    "latent_attention": {
        "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10,
    },
}  # fmt: skip


def make(style: str = "mixtral", **changes) -> GPT:
    model = GPT(ModelConfig(**BASE | (STYLES | {"deepseek_v3": DEEPSEEK})[style] | changes))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.train()


def batch(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded rows of these lengths; the first third of each is not supervised."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, length in enumerate(lengths):
        tokens = torch.randint(0, 90, (length + 1,), generator=generator)
        ids[row, :length], labels[row, length // 3 : length] = tokens[:-1], tokens[1 + length // 3 :]
    return ids, labels


def by_loops(moe: LLaMAMoE, x: torch.Tensor) -> torch.Tensor:
    """Reference implementation, token by token and expert by expert."""
    y = torch.zeros_like(x)
    for b in range(x.size(0)):
        for t in range(x.size(1)):
            weights, topk_indices = moe.gate(x[b, t]).softmax(-1).topk(moe.n_expert_per_token)
            weights = weights / weights.sum() if moe.norm_topk_prob else weights
            for weight, e in zip(weights, topk_indices, strict=True):
                y[b, t] += weight * one_expert(moe, e, x[b, t])
            if moe.shared_expert is not None:
                y[b, t] += torch.sigmoid(moe.shared_expert_gate(x[b, t])) * moe.shared_expert(x[b, t])
    return y


def one_expert(moe: LLaMAMoE, e: int, x: torch.Tensor) -> torch.Tensor:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        layer = getattr(moe.experts, name)
        return F.linear(x, layer.weight[e], None if layer.bias is None else layer.bias[e])

    gate, other, limit = linear("fc_1", x), linear("fc_2", x), moe.experts.limit
    if limit is None:
        return linear("proj", F.silu(gate) * other)
    gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    return linear("proj", gate * torch.sigmoid(1.702 * gate) * (other + 1))


@pytest.mark.parametrize("style", STYLES)
def test_grouped_products_match_loop_over_tokens_and_experts(style):
    moe = make(style).transformer.h[1].mlp
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    again = x.detach().clone().requires_grad_()
    direction = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    (moe(x) * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in moe.named_parameters()}
    moe.zero_grad()
    expected = by_loops(moe, again)
    (expected * direction).sum().backward()
    torch.testing.assert_close(moe(x), expected)
    torch.testing.assert_close(x.grad, again.grad)
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def test_experts_without_tokens_have_zero_gradient():
    moe = make().transformer.h[0].mlp
    moe(torch.randn(1, 1, 32)).sum().backward()
    touched = moe.experts.fc_1.weight.grad.abs().sum((1, 2)) > 0
    assert touched.sum() == 2


@pytest.mark.parametrize("style", [*STYLES, "deepseek_v3"])
def test_gradients_match_transformers(style):
    native = make(style, router_aux_loss_coef=0.0)
    family = family_of(native.config)
    hf = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**family.to_hf_config(native.config)), attn_implementation="eager"
    )
    values, gradients = native.state_dict(keep_vars=True), {}
    ids, labels = batch([20, 20], 20)
    native(ids, labels)[0].backward()
    for entry in family.weight_map(native.config):
        hf_tensors = entry.to_hf([values[name].detach() for name in entry.native])
        # compare values instead of gradients where nothing is trained
        gradient = entry.to_hf([t.grad if (t := values[name]).requires_grad else t for name in entry.native])
        gradients |= {name: (v, g) for name, v, g in zip(entry.hf, hf_tensors, gradient, strict=True)}
    named = stacked_as_theirs(gradients)
    hf.load_state_dict({name: value for name, (value, _) in named.items()})
    logits = hf(ids).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum").backward()
    for name, parameter in hf.named_parameters():
        error = (parameter.grad - named[name][1]).norm() / parameter.grad.norm()
        assert error < 1e-4, name


def stacked_as_theirs(named: dict) -> dict:
    """Convert names in files to transformers 5's module names, which also stack the experts."""
    found, groups = {}, {}
    for name, pair in named.items():
        name = name.replace("block_sparse_moe", "mlp").replace(".w1.", ".gate_proj.").replace(".w3.", ".up_proj.")
        name = name.replace(".w2.", ".down_proj.")
        if ".experts." not in name or name.endswith(("_proj", "_bias")):  # gpt-oss's are stacked in files, too
            found[name] = pair
            continue
        layer, _, rest = name.partition(".experts.")
        groups.setdefault((layer, rest.split(".")[1]), []).append(pair)
    for layer, kind in groups:
        stack = lambda kind, i, layer=layer: torch.stack([pair[i] for pair in groups[layer, kind]])  # noqa: E731
        if kind == "gate_proj":
            pair = [torch.cat([stack("gate_proj", i), stack("up_proj", i)], dim=1) for i in (0, 1)]
            found[f"{layer}.experts.gate_up_proj"] = tuple(pair)
        elif kind == "down_proj":
            found[f"{layer}.experts.down_proj"] = (stack(kind, 0), stack(kind, 1))
    return found


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_router_bias_is_applied(scores):
    moe = make(bias=True, router_scores=scores).transformer.h[0].mlp
    with torch.no_grad():
        moe.gate.bias[3] = 50.0
        topk_indices = moe._route(torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)))[2]
    assert (topk_indices == 3).any(-1).all()


def random_routing(shape: tuple[int, ...], k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    return logits, logits.softmax(-1), logits.softmax(-1).topk(k).indices


def test_load_balancing_loss_matches_loop_over_experts_and_tokens():
    _, probabilities, topk_indices = random_routing((3, 7, 5), 2)
    token_mask = torch.arange(7) < torch.tensor([[7], [4], [0]])
    for b, n in enumerate((7, 4, 0)):
        expected = 0.0
        for e in range(5):
            f = sum(int(e in topk_indices[b, t]) for t in range(n)) / max(1, n)
            p = sum(probabilities[b, t, e].item() for t in range(n)) / max(1, n)
            expected += 5 * f * p
        assert load_balancing_loss(probabilities, topk_indices, token_mask)[b].item() == pytest.approx(
            expected, rel=1e-5
        )


def test_load_balancing_loss_of_one_row_matches_transformers():
    logits, probabilities, topk_indices = random_routing((1, 9, 5), 2)
    expected = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func((logits[0],), 5, 2)
    found = load_balancing_loss(probabilities, topk_indices, torch.ones(1, 9, dtype=torch.bool))
    torch.testing.assert_close(found[0], expected)


def test_mask_ends_at_the_last_supervised_token():
    x = IGNORE_INDEX
    labels = torch.tensor([[x, 5, x, 6, x], [x, x, x, x, x], [1, 1, 1, 1, 1]])
    assert mask_until_last_label(labels).tolist() == [[True] * 4 + [False], [False] * 5, [True] * 5]


def gradients_of(model: GPT, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = sum(loss for loss, _ in (model(ids, labels) for ids, labels in parts))
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("style", [*STYLES, "deepseek_v3"])
def test_n2_loss_and_gradient_with_experts_do_not_depend_on_the_split(style):
    """(1 x 8) = (8 x 1), on ragged rows padded per micro-batch, one without labels."""
    model = make(style, router_aux_loss_coef=0.5)
    lengths = [5, 16, 9, 3, 12, 16, 7, 10]
    ids, labels = batch(lengths, 16)
    labels[3] = IGNORE_INDEX
    rows = [(ids[i : i + 1, :n], labels[i : i + 1, :n]) for i, n in enumerate(lengths)]
    full, full_gradients = gradients_of(model, [(ids, labels)])
    split, of_split = gradients_of(model, rows)
    assert full == pytest.approx(split, rel=1e-6)
    for name, gradient in full_gradients.items():
        assert (gradient - of_split[name]).norm() <= 1e-5 * gradient.norm(), name


def test_only_training_loss_includes_load_balancing_loss():
    model = make(router_aux_loss_coef=0.5)
    ids, labels = batch([12, 16], 16)
    with torch.no_grad():
        trained, n = model(ids, labels)
        plain, same = model.eval()(ids, labels)
        expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    assert n == same and plain.item() / n == pytest.approx(expected.item(), rel=1e-5)
    assert 0.5 * 1 < (trained - plain) / n < 0.5 * 6  # bounds of the load-balancing loss


def test_load_balancing_loss_balances_experts():
    moe = make().transformer.h[0].mlp
    x = 1 + torch.randn(
        4, 32, 32, generator=torch.Generator().manual_seed(5)
    )  # a common offset of all tokens unbalances the router
    optimizer, seen = torch.optim.SGD([moe.gate.weight], lr=0.05), []
    for _ in range(40):
        _, uneven = moe(x, torch.ones(4, 32, dtype=torch.bool))
        seen.append(uneven.mean().item())
        optimizer.zero_grad()
        uneven.mean().backward()
        optimizer.step()
    assert seen[0] > 4 and 1.9 < seen[-1] < 2.05  # top-2: a uniform load gives 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_experts_in_16_bits_with_fp32_gradients(dtype):
    model, seen = make("qwen2_moe"), []
    for stack in (model.transformer.h[0].mlp.experts.fc_1, model.transformer.h[1].mlp.experts.proj):
        stack.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    ids, labels = batch([16, 16], 16)
    exact, _ = gradients_of(model, [(ids, labels)])
    seen.clear()
    with torch.autocast("cpu", dtype=dtype):
        rounded, gradients = gradients_of(model, [(ids, labels)])
    assert seen == [dtype, dtype]
    assert rounded == pytest.approx(exact, rel=0.05)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients.values())


def test_training_step_has_no_host_device_sync():
    """The meta device has no data to copy."""
    with torch.device("meta"):
        model = GPT(ModelConfig(**BASE | STYLES["qwen2_moe"]))
        moe, x = model.transformer.h[0].mlp, torch.empty(2, 8, 32, requires_grad=True)
        y, uneven = moe(x, torch.empty(2, 8, dtype=torch.bool))
    (y.sum() + uneven.sum()).backward()
    assert y.shape == x.shape == x.grad.shape


def test_n3_experts_are_initialized_like_dense_layers():
    model = GPT(ModelConfig(**BASE | STYLES["qwen2_moe"] | {"n_expert": 16}))
    initialize(model, seed=7)
    mlp = model.transformer.h[0].mlp
    for name, std in {
        "experts.fc_1": STD, "experts.fc_2": STD, "experts.proj": STD / math.sqrt(4), "gate": STD,
        "shared_expert.fc_2": STD, "shared_expert.proj": STD / math.sqrt(4),
    }.items():  # fmt: skip
        weight = mlp.get_submodule(name).weight
        assert weight.std().item() == pytest.approx(std, rel=0.1), name
        full_name = f"transformer.h.0.mlp.{name}.weight"
        assert torch.equal(weight, draw(full_name, weight.shape, seed=7, config=model.config))


def test_n5_experts_and_router_have_weight_decay():
    spared = no_decay_params(make("qwen2_moe"))
    assert not any(".mlp." in name for name in spared)
    spared = no_decay_params(make(bias=True))
    assert {name for name in spared if ".h.0.mlp." in name} == {
        f"transformer.h.0.mlp.{part}.bias" for part in ("gate", "experts.fc_1", "experts.fc_2", "experts.proj")
    }
