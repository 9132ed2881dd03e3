"""Activation checkpointing: the same gradients, bit for bit, from fewer bytes, under every wrapper of a block."""

import copy
from functools import partialmethod
from unittest import mock

import pytest
import torch
from benchmark_checkpointing import LiveBytes
from helpers.cases import check_each
from helpers.initialize import add_lora
from helpers.tiny_configs import NATIVE_CONFIGS
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, build_model
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.neftune import SampleNoise
from toolkit.models.quantize import quantize_linears
from toolkit.training.model_spec import compile_blocks

MODES = ["selective", "full"]
FAMILIES = ["llama-tied", "gemma2", "olmo3", "neox", "stablelm", "mixtral", "deepseek-v3", "gpt-oss", "gemma4-shared",
            "qwen3-next"]  # fmt: skip
LLAMA = ModelConfig(vocab_size=90, block_size=64, n_layer=4, n_embd=64, n_head=4, n_query_groups=2)


def build(config: ModelConfig = LLAMA) -> GPT:
    torch.manual_seed(0)
    return build_model(config)


def named(family: str) -> ModelConfig:
    return ModelConfig(block_size=64, n_layer=2, n_embd=64, n_head=4, **NATIVE_CONFIGS[family])


def run(model: GPT, packed: bool = False, seed: int = 1, length: int = 24) -> list[torch.Tensor]:
    """Return the loss and the gradients of a training step, with random numbers drawn before and after."""
    ids = torch.randint(0, 90, (2, length), generator=torch.Generator().manual_seed(2))
    extra = {"documents": (torch.arange(length) >= length // 2).long().expand(2, length)} if packed else {}
    torch.manual_seed(seed)
    loss, _ = model(ids, ids, **extra)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [loss.detach(), torch.rand(1), *(torch.zeros(0) if g is None else g for g in gradients)]


def require_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected) > 5
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


class Counted:
    """Counts the forward passes of attention in the blocks, with recomputations."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0
        for block in model.blocks:
            block.attn.register_forward_pre_hook(self._count)

    def _count(self, *_) -> None:
        self.calls += 1


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bit_equal_for_every_kind_of_block(mode):
    def check(family: str, packed: bool) -> None:
        model = build(named(family))
        expected = run(model, packed)
        names = list(model.state_dict())
        checkpoint_blocks(model, (Block,), mode)
        counted = Counted(model)
        require_equal(run(model, packed), expected)
        assert counted.calls == 2 * len(model.blocks)
        assert list(model.state_dict()) == names and all(isinstance(block, Block) for block in model.blocks)

    check_each(
        check, [*((family, False) for family in FAMILIES), ("llama-tied", True), ("gemma2", True), ("qwen3.5", True)]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"dropout": 0.5, "dora": True}], ids=["lora", "dora"])
def test_dropout_of_adapters_draws_the_same_numbers(options, mode):
    model = build()
    add_lora(model, LoRAConfig(mlp=True, projection=True, **options))
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            nn.init.normal_(parameter)
    expected = run(model)
    assert not torch.equal(run(model, seed=3)[-1], expected[-1])
    checkpoint_blocks(model, (Block,), mode)
    require_equal(run(model), expected)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_recomputed_dropout_is_that_of_the_samples(family, is_compiled):
    """Also if the next micro-batch is computed before, as in a pipeline."""
    ids = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(2))

    def gradients(mode: str, *keys: tuple[int, int]) -> list[torch.Tensor]:
        model = build(named(family))
        has_experts = model.config.n_expert > 0
        add_lora(model, LoRAConfig(mlp=True, projection=True, head=True, dropout=0.5, experts=has_experts))
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                nn.init.normal_(parameter)
        checkpoint_blocks(model, (Block,), mode)
        if is_compiled and mode != "none":
            with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
                compile_blocks(model, (Block,), 0)
        first, *_ = [model(ids, ids, noise=SampleNoise(0.0, 1, key))[0] for key in keys]
        return torch.autograd.grad(first, [p for p in model.parameters() if p.requires_grad])

    expected = gradients("none", (3, 4))
    different = gradients("none", (3, 5))
    assert not any(torch.equal(a, b) for a, b in zip(expected, different, strict=True) if a.count_nonzero())
    for mode in MODES:
        torch.testing.assert_close(gradients(mode, (3, 4), (8, 9)), expected, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("mode", MODES)
def test_quantized_base(mode):
    pytest.importorskip("bitsandbytes")
    model = build()
    add_lora(model, LoRAConfig(dropout=0.1))
    quantize_linears(model, "bnb.nf4")
    expected = run(model)
    checkpoint_blocks(model, (Block,), mode)
    require_equal(run(model), expected)


def kept(model: GPT) -> int:
    with LiveBytes(model.parameters()) as live:
        loss, _ = model(torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64, dtype=torch.int64))
        return live.now()


def test_each_mode_keeps_less():
    """In elements per token and layer of a Llama: "full" keeps the input (64), "selective" also the outputs of
    attention (64, and 4 log-sum-exps), of its projection (64), and of the second product of the MLP (256)."""
    sizes, model = {}, build()
    shallow = GPT(ModelConfig(**LLAMA.to_dict() | {"n_layer": 3}))
    for mode in ("none", *MODES):
        for each in (model, shallow):
            checkpoint_blocks(each, (Block,), mode)
        sizes[mode] = (kept(model) - kept(shallow)) / (2 * 64 * 4)
    assert sizes["full"] == 64
    assert sizes["selective"] == 64 + (64 + 4) + 64 + 256
    assert sizes["none"] > 2.5 * sizes["selective"]


def test_nothing_is_recomputed_without_gradients_and_none_undoes_a_mode():
    model, ids = build(), torch.zeros(1, 8, dtype=torch.int64)
    checkpoint_blocks(model, (Block,), "full")
    checkpoint_blocks(model, (Block,), "selective")  # replaces the mode: does not nest
    assert run(model) and model.blocks[0].forward.args[0].__func__ is Block.forward
    counted = Counted(model)
    with torch.no_grad():
        model(ids)
    assert counted.calls == len(model.blocks)
    checkpoint_blocks(model, (Block,), "none")
    counted.calls = 0
    run(model)
    assert counted.calls == len(model.blocks)
    run(copy.deepcopy(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"), [("llama-tied", "full"), pytest.param("gpt-oss", "selective", marks=pytest.mark.slow)]
)
def test_compiled_blocks_recompute(family, mode):
    """gpt-oss's attention sinks are written in place."""
    expected, saved = run(build(named(family))), {}
    compiled = partialmethod(nn.Module.compile, backend="aot_eager_decomp_partition")  # Inductor's, but no C++
    for name in ("none", mode):
        model = build(named(family))
        checkpoint_blocks(model, (Block,), name)
        with mock.patch.object(nn.Module, "compile", compiled):
            compile_blocks(model, (Block,), 0)
        tensors: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=tensors: kept.append(t) or t, lambda t: t):
            actual = run(model)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors}
        saved[name] = sum(size for key, size in sizes.items() if key not in own)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()
    assert saved[mode] < 0.6 * saved["none"]


class OwnBlock(nn.Module):
    """A user's block, with keyword arguments and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, *, scale=1.0):
        return x + self.second(self.first(x).relu()) * scale, scale


@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_a_user(mode):
    torch.manual_seed(0)
    block, x = OwnBlock(), torch.randn(3, 8, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        y, scale = block(x, scale=2.0)
        assert scale == 2.0
        return list(torch.autograd.grad(y.sum(), [x, *block.parameters()]))

    expected = gradients()
    checkpoint_blocks(block, (OwnBlock,), mode)
    assert block.forward.args[1].func is checkpoint
    assert all(torch.equal(a, e) for a, e in zip(gradients(), expected, strict=True))
