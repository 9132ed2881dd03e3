"""Bytes of activations under activation checkpointing (models/activation_checkpointing.py): closed formulas.

Between forward and backward pass, each block keeps its input, and with "selective" the outputs of attention and of some
matrix products. The backward pass recomputes the other activations of one block at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from toolkit.models.activation_checkpointing import kept_products
from toolkit.models.families import family_of
from toolkit.planning.activations import (
    MLP,
    PROJECTION,
    QKV,
    activation_bytes,
    attention_readers,
    block_bytes,
    bytes_beside_blocks,
    kernel,
)
from toolkit.planning.setup import FP32, TrainingSetup

Product = tuple[int, int, float]  # rows and columns of the weight, and bytes of the output per token


def kept_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of activations that are in memory between forward and backward pass."""
    extra = family_of(setup.config).extra_activation_bytes(setup)
    if setup.activation_checkpointing == "none":
        return activation_bytes(setup) + extra
    blocks = sum(count * _kept_by_block(layer) for layer, count in _layers(setup))
    return blocks + bytes_beside_blocks(setup) + _mask_bytes(setup) + extra


def recomputed_bytes(setup: TrainingSetup) -> float:
    """Return the bytes that recomputing a block adds to those of :func:`kept_bytes`, for the largest block.

    What a block has kept is a part of its activations again, or is freed when they are recomputed.
    """
    if setup.activation_checkpointing == "none":
        return 0.0
    return max(block_bytes(layer) - _kept_by_block(layer) + _copied_input(layer) for layer, _ in _layers(setup))


def _layers(setup: TrainingSetup) -> list[tuple[TrainingSetup, int]]:
    """Return a setup for each kind of layer, of a model with one such layer only, and the number of these layers."""
    config, names = setup.config, ("sliding_window_indices", "rope_indices", "moe_indices")
    lists = [getattr(config, name) or [None] * config.n_layer for name in names]
    layers = []
    for kind, count in Counter(zip(*lists, strict=True)).items():
        only: dict[str, Any] = {
            name: None if value is None else [value] for name, value in zip(names, kind, strict=True)
        }
        layers.append((replace(setup, config=replace(config, n_layer=1, **only)), count))
    return layers


def _kept_by_block(layer: TrainingSetup) -> float:
    kept: float = layer.config.n_embd * layer.weight_bytes
    if layer.activation_checkpointing == "selective":
        products = _products(layer)
        kept += _attention_output(layer)
        kept += sum(products[i][2] for i in kept_products([product[:2] for product in products]))
    return layer.tokens * kept


def _copied_input(layer: TrainingSetup) -> float:
    """Return the bytes of a block's input if the block's activations do not include it, but a copy at most."""
    config = layer.config
    if not config.norm_1:
        is_included = attention_readers(layer) > 0 and not layer.is_mixed
    elif config.norm_offset or (layer.device == "cpu" and config.norm_class_name == "RMSNorm"):
        is_included = layer.weight_bytes == FP32  # else the norm casts it
    else:
        is_included = True
    return 0.0 if is_included else layer.tokens * config.n_embd * layer.weight_bytes


def _mask_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the boolean masks, which blocks share: one per row of packed documents, else one for all."""
    if kernel(setup) is not None:
        return 0
    config, length = setup.config, setup.seq_length
    windows = {config.window(i) for i in range(config.n_layer)}
    masks = {window if (window or length) < length else None for window in windows}
    if setup.packed:
        return setup.tokens * length * len(masks)
    return length * length * len(masks - {None})


def _attention_output(layer: TrainingSetup) -> float:
    """Return the bytes per token that the attention kernel returns: its output and the log-sum-exps."""
    config, growth, width = layer.config, 1.0, max(layer.config.head_size, layer.config.value_size)
    if config.attention_logit_softcapping is not None and kernel(layer) is None:
        return 0.0  # composed of operations that are recomputed
    if config.attention_sinks and kernel(layer) is None:
        growth, width = 1 + 1 / layer.seq_length, width + 8 - width % 8
    return growth * config.n_head * (layer.compute_bytes * width + FP32)


def _products(layer: TrainingSetup) -> list[Product]:
    """Return the matrix products of a block, in the order of its forward pass."""
    config, c = layer.config, layer.compute_bytes
    heads, groups = config.n_head * config.head_size, config.n_query_groups * config.head_size
    if (sizes := config.latent_attention) is None:
        products = _linear(layer, QKV, config.n_embd, heads + 2 * groups)
    else:
        rank, kv_rank = sizes["q_lora_rank"], sizes["kv_lora_rank"]
        products = [] if rank is None else [(config.n_embd, rank, rank * c)]
        products += _linear(layer, ("query",), rank or config.n_embd, heads)
        latent = kv_rank + sizes["qk_rope_head_dim"]
        products += [(config.n_embd, latent, latent * c)]
        expanded = config.n_head * (sizes["qk_nope_head_dim"] + config.value_size)
        products += _linear(layer, ("key", "value"), kv_rank, expanded)
    products += _linear(layer, PROJECTION, config.n_head * config.value_size, config.n_embd)
    return products + (_expert_products(layer) if config.n_moe_layer else _mlp_products(layer))


def _linear(layer: TrainingSetup, parts: tuple[str, ...], inputs: int, outputs: int) -> list[Product]:
    """Return the products of a linear layer with the adapters of ``parts``."""
    lora, c = layer.lora, layer.compute_bytes
    products: list[Product] = [(inputs, outputs, outputs * c)]
    rank = 0 if lora is None else lora.r * sum(getattr(lora, part) for part in parts)
    if lora is None or not rank:
        return products
    if lora.dora:  # of inputs with dropout as well; the norms of the merged weight
        products = (1 + (lora.dropout > 0)) * products + [(rank, inputs, inputs * outputs * FP32 / layer.tokens)]
    return [*products, (inputs, rank, rank * c), (rank, outputs, outputs * c)]


def _mlp_products(layer: TrainingSetup) -> list[Product]:
    config = layer.config
    gates = 1 if config.mlp_class_name == "GptNeoxMLP" else 2
    first = _linear(layer, MLP, config.n_embd, config.intermediate_size)
    return gates * first + _linear(layer, MLP, config.intermediate_size, config.n_embd)


def _expert_products(layer: TrainingSetup) -> list[Product]:
    """Return the products of a MoE layer: of router, experts with their biases, shared expert and its gate."""
    config, c = layer.config, layer.compute_bytes
    d, k, inner = config.n_embd, config.n_expert_per_token, config.expert_size
    shared = config.shared_expert_intermediate_size
    router = FP32 if config.router_scores == "sigmoid" else c
    products: list[Product] = [(d, config.n_expert, config.n_expert * router)]
    for rows, columns in ((d, inner), (d, inner), (inner, d)):
        products += [(rows, columns, k * columns * c)]
        products += [(8, columns, k * columns * c)] * config.bias  # ones times biases: see models/moe.py
    if shared is not None:
        products += [(d, shared, shared * c)] * 2 + [(shared, d, d * c)]
        products += [(d, 1, c)] * config.shared_expert_gate
    return products
