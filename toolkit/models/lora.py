"""Add low-rank adapters to a GPT and initialize them. See ``lora_layers.py`` for the layers."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, model_on_meta
from toolkit.models.head import TrainedScore
from toolkit.models.init import ParameterValue, draw, parameter_generator
from toolkit.models.lora_config import SCORE, TRAINED_SCORE, LoRAConfig
from toolkit.models.lora_config import is_adapter as is_adapter
from toolkit.models.lora_layers import AdaptedLayer, Adapter, adapted, replace_linear
from toolkit.models.moe import LLaMAMoE

_ALL_ROWS = "whole"  # adapter name of unfused layers in files


def adapted_on_meta(config: ModelConfig, lora: LoRAConfig | None) -> GPT:
    """Return a GPT on the meta device. If ``lora`` is set, add adapters and freeze the base parameters."""
    model = model_on_meta(config)
    if lora is not None:
        add_lora(model, lora)
    return model


def add_lora(model: GPT, config: LoRAConfig) -> None:
    """Add adapters to the selected layers of a GPT, in place, and freeze everything else.

    The adapters are on the weights' device, with A and B zero and magnitudes one. Initialize them with
    :func:`adapter_values` or from a checkpoint.
    """
    model.requires_grad_(False)
    for i, block in enumerate(model.blocks):
        if block.uses_linear_attention:
            _adapt_all(block.attn, config, config.linear_attention)
        else:
            for name, rows_of in attention_rows(model.config, i).items():
                _adapt(block.attn, name, config, {part: rows for part, rows in rows_of.items() if part in config.parts})
            _adapt(block.attn, "proj", config, {_ALL_ROWS: config.projection})
        dense: nn.Module | None = block.mlp
        if isinstance(dense, LLaMAMoE):
            _adapt(dense, "gate", config, {_ALL_ROWS: config.router})
            _adapt_all(dense.experts, config, config.experts)
            dense = dense.shared_expert
        if dense is not None:
            _adapt_all(dense, config, config.mlp)
    for owner in (*model.blocks, model.transformer):
        for name in {"per_layer_gate", "per_layer_proj"} & dict(owner.named_children()).keys():
            _adapt(owner, name, config, {_ALL_ROWS: config.mlp})
    if model.config.head is None:
        _adapt(model, "lm_head", config, {_ALL_ROWS: config.head})
    else:
        model.score = TrainedScore(model.score)
    model.has_dropout = config.dropout > 0
    others = [model.head, *(part for name, part in model.transformer.items() if name == "per_layer_proj")]
    for part in (*model.blocks, nn.ModuleList(others)):
        bits = part.dropout_bits if isinstance(part, Block) else model.dropout_bits
        for number, layer in enumerate(layer for layer in part.modules() if isinstance(layer, AdaptedLayer)):
            layer.dropout_bits, layer.number = bits, number


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(layer, AdaptedLayer) for layer in model.modules())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute as the base model."""
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptedLayer)]
    for layer in layers:
        layer.adapters_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.adapters_off = False


def draw_adapter(name: str, shape: torch.Size | tuple[int, ...], seed: int) -> Tensor:
    """Return the initial value of an adapter's ``A`` or ``B``, a pure function of (seed, name): fp32, on the CPU.

    A is uniform in +- 1 / sqrt(in): Kaiming initialization with a = sqrt(5), as in the paper's code. B is zero, so the
    adapted model initially equals the base.
    """
    kind = name.rpartition(".")[2]
    assert kind in ("A", "B"), f"{name}: a magnitude is computed from the base weight, see adapter_values"
    if kind == "B":
        return torch.zeros(shape, device="cpu")
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=parameter_generator(name, seed))


def initial_magnitude(weight: Tensor) -> Tensor:
    """Return DoRA's initial magnitudes, (rows,) fp32: the row norms of the base weight."""
    return torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)


def adapter_values(model: nn.Module, seed: int, weight_of: Callable[[str], Tensor]) -> ParameterValue:
    """Return a function that maps an adapter parameter's name and shape to its initial value.

    Call this before a strategy wraps the model. Parameters may be on the meta device. ``weight_of`` maps a name such as
    ``transformer.h.0.attn.qkv.weight`` to the unsharded base weight; only DoRA's magnitudes need it.
    """
    config = cast(GPT, model).config
    rows = {name: module.rows for name, module in model.named_modules() if isinstance(module, Adapter)}

    def value_of(name: str, shape: torch.Size) -> Tensor:
        adapter, _, kind = name.rpartition(".")
        if name == TRAINED_SCORE:
            return draw(SCORE, shape, seed=seed, config=config)
        if kind != "magnitude":
            return draw_adapter(name, shape, seed)
        weight = weight_of(adapter.partition(".lora.")[0] + ".weight")
        return initial_magnitude(weight[rows[adapter].start : rows[adapter].stop])

    return value_of


def attention_rows(config: ModelConfig, layer: int = 0) -> dict[str, dict[str, range]]:
    """Return a block's query (with the gate's), key and value rows, by the projection's name."""
    n_parts, config = config.n_attention_parts(layer), config.layer(layer)
    q, kv = (1 + config.attention_gate) * config.n_head * config.head_size, config.n_query_groups * config.head_size
    if config.latent_attention is not None:
        k = config.n_head * config.latent_attention["qk_nope_head_dim"]
        keys_and_values = {"key": range(k), "value": range(k, k + config.n_head * config.value_size)}
        return {"q_b": {"query": range(q)}, "kv_b": keys_and_values}
    rows = {"query": range(q), "key": range(q, q + kv), "value": range(q + kv, q + 2 * kv)}
    return {"qkv": dict(list(rows.items())[:n_parts])}


def _adapt_all(owner: nn.Module, config: LoRAConfig, is_adapted: bool) -> None:
    """Replace all linear layers of an MLP, of its experts or of linear attention."""
    for name in [name for name, child in owner.named_children() if hasattr(child, "out_features")]:
        _adapt(owner, name, config, {_ALL_ROWS: is_adapted})


def _adapt(owner: nn.Module, name: str, config: LoRAConfig, parts: dict[str, range | bool]) -> None:
    """Replace ``owner.name`` with a layer that has adapters for ``parts``: row ranges, or True for all rows."""
    linear: Any = getattr(owner, name)
    rows = range(linear.out_features)
    if rows_of := {part: value if isinstance(value, range) else rows for part, value in parts.items() if value}:
        replace_linear(owner, name, adapted(linear.__class__)).add_adapters(config, rows_of)
