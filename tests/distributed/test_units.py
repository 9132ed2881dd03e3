"""FSDP's wrap plan: the units by block, size and class, of toolkit's models and of others."""

from dataclasses import replace

import pytest
from torch import nn

from toolkit.config import FSDPArgs
from toolkit.distributed.units import describe_units, plan_units
from toolkit.errors import UserError
from toolkit.models.block import Block
from toolkit.models.families import get_config
from toolkit.models.gpt import model_on_meta
from toolkit.models.loss_wrapper import LossWrapper


def pico():
    return model_on_meta(get_config("pico-llama").with_vocab_size(300))


def names(module, **options) -> list[str]:
    units = plan_units(module, FSDPArgs(**options), (Block,))
    assert units[0].name == "" and sum(unit.size for unit in units) == sum(p.numel() for p in module.parameters())
    return [unit.name for unit in units[1:]]


BLOCKS = ["transformer.h.0", "transformer.h.1"]
"""Blocks of pico-llama: attention of 12,288 parameters, MLP of 30,720."""


@pytest.mark.parametrize(
    ("least", "parts"),
    [(10_000, ["attn", "mlp"]), (20_000, ["mlp"]), (40_000, [""]), (10**8, None)],
)
def test_units_by_size(least, parts):
    found = names(pico(), auto_wrap="size", min_num_params=least)
    assert found == [f"{block}.{part}".rstrip(".") for block in BLOCKS for part in parts or []]


def test_default_threshold_of_a_model_of_7b_leaves_attention_in_the_root():
    model = model_on_meta(get_config("Llama-2-7b-hf"))
    options = FSDPArgs(auto_wrap="size")
    units = plan_units(model, options, (Block,))
    assert describe_units(units, options) == "32 x LLaMAMLP, 135,266,304 parameters each; root, 2,409,893,888"
    blocks = "32 x Block, 202,383,360 parameters each"
    by_block = describe_units(plan_units(model, FSDPArgs(), (Block,)), FSDPArgs())
    assert by_block == f"{blocks}; Embedding, 131,072,000; Head, 131,072,000; root, 4,096"
    tied = model_on_meta(replace(get_config("pico-llama"), tie_embeddings=True).with_vocab_size(300))
    assert [unit.name for unit in plan_units(tied, FSDPArgs(), (Block,))] == ["", *BLOCKS]


def test_units_by_class_may_be_inside_others():
    assert names(pico(), auto_wrap="class", wrap_classes="Block") == BLOCKS
    found = plan_units(pico(), FSDPArgs(auto_wrap="class", wrap_classes=["Block", "LLaMAMLP"]), (Block,))
    assert names(pico(), auto_wrap="class", wrap_classes="Block, LLaMAMLP") == [unit.name for unit in found[1:]]
    assert [unit.name for unit in found[1:]] == [name for block in BLOCKS for name in (block, f"{block}.mlp")]
    assert [unit.size for unit in found[1:3]] == [3 * 64 * 64 + 2 * 64, 3 * 64 * 160]


def test_a_threshold_that_wraps_nothing_is_reported():
    options = FSDPArgs(auto_wrap="size")
    text = describe_units(plan_units(pico(), options, (Block,)), options)
    assert text.endswith("--fsdp.min_num_params 100,000,000 wraps nothing, so that all weights are gathered at once")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Embedding", "this part cannot be a unit; use some of Block, CausalSelfAttention, LLaMAMLP"),
        ("block", "the model has no part of this class; did you mean 'Block'"),
    ],
)
def test_classes_that_cannot_be_units_are_errors(name, message):
    with pytest.raises(UserError, match=f"--fsdp.wrap_classes {name}: {message}"):
        names(pico(), auto_wrap="class", wrap_classes=[name])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(50, 8), nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 50)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_units_of_other_models():
    """Neither the model itself, nor containers, nor parts with tied weights."""
    layers = ["module.layers.0", "module.layers.1"]
    assert names(LossWrapper(Net()), auto_wrap="class", wrap_classes=["Layer"]) == layers
    assert names(LossWrapper(Net()), auto_wrap="size", min_num_params=400) == layers
    assert names(LossWrapper(Net()), auto_wrap="size", min_num_params=50) == [
        f"{layer}.{part}" for layer in layers for part in ("up", "down")
    ]
    with pytest.raises(UserError, match="--fsdp.wrap_classes Embedding: this part cannot be a unit"):
        names(LossWrapper(Net()), auto_wrap="class", wrap_classes=["Embedding"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_num_params": 5}, "--fsdp.min_num_params 5: has no effect with --fsdp.auto_wrap block; use size"),
        ({"auto_wrap": "size", "wrap_classes": ["Block"]}, "has no effect with --fsdp.auto_wrap size; use class"),
        ({"auto_wrap": "class"}, "--fsdp.auto_wrap class: name the classes"),
        ({"auto_wrap": "size", "min_num_params": 0}, "--fsdp.min_num_params 0: must be greater than zero"),
    ],
)
def test_settings_without_effect_are_errors(options, message):
    with pytest.raises(UserError, match=message):
        FSDPArgs(**options)
