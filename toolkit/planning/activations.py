"""Bytes of a training step's activations and logits, by part of the model: closed formulas.

:mod:`toolkit.planning.memory` defines N and c; :mod:`toolkit.planning.recompute` has activation checkpointing.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.models import attention_dispatch
from toolkit.models.loss import chunk_rows
from toolkit.models.masks import KernelChoice
from toolkit.planning.setup import FP32, INT64, TrainingSetup

QKV, PROJECTION, MLP = ("query", "key", "value"), ("projection",), ("mlp",)  # the adapters of each linear layer


def activation_bytes(setup: TrainingSetup) -> float:
    """Return the bytes that autograd saves in a forward pass, counted as in Korthikanti et al. 2022 (arXiv 2205.05198).

    Attention is ``scaled_dot_product_attention`` or, on CUDA in 16 bits, a kernel of models/attention_kernels.py: there
    is no (T, T) matrix unless no kernel supports the inputs.
    """
    mask = setup.tokens * setup.seq_length if setup.packed and kernel(setup) is None else 0
    return block_bytes(setup) + bytes_beside_blocks(setup) + mask


def kernel(setup: TrainingSetup) -> KernelChoice | None:
    """Return the kernel that replaces masks, if its self-check passes; see models/attention_dispatch.py."""
    if setup.device not in attention_dispatch.DEVICES or setup.compute_bytes == FP32:
        return None
    return attention_dispatch.kernel_of(setup.config, setup.packed)


def block_bytes(setup: TrainingSetup) -> float:
    """Return the bytes that autograd saves in the forward pass of all blocks."""
    config = setup.config
    experts, dense = config.n_moe_layer, config.n_layer - config.n_moe_layer
    gates = 1 if config.mlp_class_name == "GptNeoxMLP" else 2
    mlps = dense * (_norms(setup, gates * _keeps_input(setup, MLP)) + _mlp(setup))
    mlps += experts * (_norms(setup, _expert_readers(setup)) + _experts(setup))
    sizes = config.latent_attention
    attention = _attention(setup) if sizes is None else _latent_attention(setup, sizes)
    return setup.tokens * (config.n_layer * attention + mlps)


def bytes_beside_blocks(setup: TrainingSetup) -> float:
    """Return the bytes of the last norm, the RoPE tables and the tokens."""
    rope = 2 * FP32 * setup.seq_length * setup.config.rope_n_elem * _rope_tables(setup)
    return setup.tokens * (_norm(setup) + INT64) + rope


def _rope_tables(setup: TrainingSetup) -> int:
    """Return the number of different RoPE tables of the layers; each is computed once."""
    config = setup.config
    return len({config.rope_index(i) for i in range(config.n_layer)} - {-1}) * (config.position_embedding == "rope")


def _norm(setup: TrainingSetup) -> int:
    """Return the bytes per token of one norm: its input and its statistics.

    On the CPU torch composes RMSNorm of smaller operations with fp32 intermediates. Gemma's norm has an fp32 input on
    all devices.
    """
    config, residual = setup.config, FP32 if setup.config.norm_offset else setup.weight_bytes
    if setup.device == "cpu" and config.norm_class_name == "RMSNorm":
        return config.n_embd * FP32 * (1 + (setup.lora is None)) + FP32
    return config.n_embd * residual + (FP32 if config.norm_class_name == "RMSNorm" else 2 * FP32)


def _norms(setup: TrainingSetup, mlp_readers: int) -> int:
    """Return the bytes per token of a block's norms and of their outputs, the inputs of linear layers.

    Autocast casts an fp32 input separately for each layer that saves it; ``mlp_readers`` is their number in the MLP.
    """
    config = setup.config
    count = config.norm_1 + (config.norm_2 and not config.shared_attention_norm)
    kept = (count + config.post_attention_norm + config.post_mlp_norm) * _norm(setup)
    if config.parallel_residual and count == 2:
        kept -= config.n_embd * setup.weight_bytes  # both read the same
    readers = [attention_readers(setup), mlp_readers]
    if config.shared_attention_norm:
        readers = [sum(readers)]
    copies = sum(readers) if setup.is_mixed else sum(min(1, n) for n in readers)
    return kept + copies * config.n_embd * setup.compute_bytes


def attention_readers(setup: TrainingSetup) -> int:
    """Return the number of linear layers in attention that save its input."""
    latent = setup.config.latent_attention
    if latent is None:
        return int(_keeps_input(setup, QKV))
    if setup.lora is None:
        return 2  # queries; keys and values
    return int(_keeps_input(setup, ("query",)) and latent["q_lora_rank"] is None)


def _attention(setup: TrainingSetup) -> float:
    """Return the bytes per token of attention with its projections."""
    config = setup.config
    heads, groups = config.n_head * config.head_size, config.n_query_groups * config.head_size
    if kernel(setup) is not None:
        kept = _fused_kernel(setup)
    elif config.attention_sinks:
        kept = _sink_attention(setup)
    else:
        kept = _softcap_attention(setup) if config.attention_logit_softcapping is not None else _fused_kernel(setup)
    if config.norm_qk:
        kept += _norm_qk(setup)
    if config.clip_qkv is not None:
        kept += setup.compute_bytes * (heads + 2 * groups)
    kept += _adapter(setup, QKV, config.n_embd, heads + 2 * groups, setup.weight_bytes)
    return kept + _adapter(setup, PROJECTION, heads, config.n_embd, setup.compute_bytes)


def _latent_attention(setup: TrainingSetup, sizes: dict[str, Any]) -> float:
    """Return the bytes per token of latent attention (``ModelConfig.latent_attention``) with its projections.

    Queries, keys and values are new tensors of the largest of their widths; values are copied again if unpadded.
    """
    config, c = setup.config, setup.compute_bytes
    rank, kv_rank, shared = sizes["q_lora_rank"] or 0, sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    width, values = max(config.head_size, config.value_size), config.n_head * config.value_size
    expanded = config.n_head * (sizes["qk_nope_head_dim"] + config.value_size)  # the values are a view of it, or padded
    kept: float = c * config.n_head * 3 * width + c * (config.n_head * width if config.value_size < width else expanded)
    kept += FP32 * config.n_head + c * _mask(setup) + c * values * (config.value_size < width)
    kept += _small_norm(setup, kv_rank, kv_rank + shared) + (_small_norm(setup, rank, rank) if rank else 0)
    query_parts, kv_parts = ("query",), ("key", "value")
    kept += c * rank * _keeps_input(setup, query_parts) + c * kv_rank * _keeps_input(setup, kv_parts)
    kept += _adapter(setup, query_parts, rank or config.n_embd, config.n_head * config.head_size, c)
    return (
        kept + _adapter(setup, kv_parts, kv_rank, expanded, c) + _adapter(setup, PROJECTION, values, config.n_embd, c)
    )


def _small_norm(setup: TrainingSetup, width: int, stored: int) -> int:
    """Return the bytes per token of a norm in latent attention: its input, a view of ``stored``, and its statistics."""
    c = setup.compute_bytes
    if setup.device == "cpu":
        return (FP32 * width if c != FP32 else FP32 * stored) + FP32 * width * (setup.lora is None) + FP32
    return c * stored + FP32


def _fused_kernel(setup: TrainingSetup) -> float:
    """Return the bytes per token of queries, keys, values, the output and its log-sum-exps.

    The values are a view of the fused projection's output, which therefore stays in memory; rotated or normalized
    queries and keys are new tensors. A boolean mask is converted to floating point in each layer.
    """
    config, c = setup.config, setup.compute_bytes
    heads, groups = config.n_head * config.head_size, config.n_query_groups * config.head_size
    projection, is_new = heads + 2 * groups, config.position_embedding == "rope" or config.norm_qk
    grouped = projection + (heads + groups) * is_new
    is_normed = config.norm_qk and not _copies_for_norms(setup)  # then the norms keep the projection's output
    repeated = (heads + groups) * is_new + projection * (is_normed or not is_new) + 2 * heads
    fraction = _repeated(setup)
    kept = c * (fraction * repeated + (1 - fraction) * grouped) + c * heads + FP32 * config.n_head
    return kept + c * _mask(setup)


def _repeated(setup: TrainingSetup) -> float:
    """Return the fraction of layers that repeat keys and values for all heads, see attention.sdpa_supports_gqa."""
    config = setup.config
    if setup.device != "cuda" or config.n_query_groups == config.n_head:
        return 0
    return 1 if setup.compute_bytes == FP32 or config.head_size > 256 else _masked_fraction(setup)


def _sink_attention(setup: TrainingSetup) -> float:
    """As :func:`_fused_kernel`, with one more token and heads wider by up to 8; the output is copied to its width."""
    config, c, growth = setup.config, setup.compute_bytes, 1 + 1 / setup.seq_length
    width = config.head_size + 8 - config.head_size % 8
    groups = config.n_query_groups + _repeated(setup) * (config.n_head - config.n_query_groups)
    kept = c * (2 * config.n_head + 2 * groups) * width + FP32 * config.n_head
    kept = growth * kept + c * config.n_head * config.head_size * _keeps_input(setup, PROJECTION)
    return kept + growth**2 * c * _mask(setup)


def _softcap_attention(setup: TrainingSetup) -> float:
    """Return the bytes per token of queries, keys, values and output of all heads, of the scores after tanh, softmax
    and cast, and of the mask in every layer."""
    config, c = setup.config, setup.compute_bytes
    scores = config.n_head * setup.seq_length * (2 * FP32 + (c if c != FP32 else 0))
    return 4 * c * config.n_head * config.head_size + scores + setup.seq_length / (1 if setup.packed else _rows(setup))


def _rows(setup: TrainingSetup) -> int:
    return setup.tokens // setup.seq_length


def _mask(setup: TrainingSetup) -> float:
    """Return mask elements per token and layer: one mask per row of packed documents, otherwise one for all rows."""
    return setup.seq_length * _masked_fraction(setup) / (1 if setup.packed else _rows(setup))


def _masked_fraction(setup: TrainingSetup) -> float:
    """Return the fraction of layers with a mask."""
    config = setup.config
    if kernel(setup) is not None:
        return 0
    if setup.packed:
        return 1
    return (
        sum((config.window(i) or setup.seq_length) < setup.seq_length for i in range(config.n_layer)) / config.n_layer
    )


def _norm_qk(setup: TrainingSetup) -> int:
    """As :func:`_norm`; an fp32 input is a view of the fused projection's output."""
    config, c = setup.config, setup.compute_bytes
    vectors = 2 if config.norm_qk_type == "olmo2" else config.n_head + config.n_query_groups
    width = (config.n_head + config.n_query_groups) * config.head_size
    if config.norm_class_name == "LayerNorm":  # mean and deviation; per head also the normalized values
        per_head = config.norm_qk_type == "per_head"
        copied = c != FP32 and (per_head or (setup.is_mixed and setup.device != "cpu"))
        return FP32 * width * (copied + (per_head and setup.lora is None)) + 2 * FP32 * vectors
    return FP32 * width * (_copies_for_norms(setup) + (setup.device == "cpu" and setup.lora is None)) + FP32 * vectors


def _copies_for_norms(setup: TrainingSetup) -> bool:
    """Whether QK-norm saves an fp32 copy of its input."""
    return setup.compute_bytes != FP32 and (setup.device == "cpu" or setup.config.norm_offset)


def _mlp(setup: TrainingSetup) -> float:
    """Return the bytes per token of the MLP: inputs of activation function and gate, and of the last layer."""
    config, c = setup.config, setup.compute_bytes
    inner = config.intermediate_size
    gates = 1 if config.mlp_class_name == "GptNeoxMLP" else 2
    kept = c * inner * ((3 if gates == 2 else 1) + _keeps_input(setup, MLP))
    first = gates * _adapter(setup, MLP, config.n_embd, inner, setup.weight_bytes)
    return kept + first + _adapter(setup, MLP, inner, config.n_embd, c)


def _expert_readers(setup: TrainingSetup) -> int:
    """Return the number of linear layers in an LLaMAMoE that save its input: router, shared expert (2), its gate."""
    config = setup.config
    if setup.lora is not None:
        return 0
    router = 0 if _is_router_in_fp32(setup) else 1
    return router + (0 if config.shared_expert_intermediate_size is None else 2 + config.shared_expert_gate)


def _is_router_in_fp32(setup: TrainingSetup) -> bool:
    """Whether the router reads a separate fp32 copy of its input."""
    return setup.config.router_scores == "sigmoid" and setup.compute_bytes != FP32


def _experts(setup: TrainingSetup) -> float:
    """Return the bytes per token of a MoE layer.

    For each active expert: its input, the inputs of activation function and gate, the last layer's input, and its
    output. For the router: all probabilities, the top-k indices, and the permutation and its inverse.
    """
    config, c, is_trained = setup.config, setup.compute_bytes, setup.lora is None
    k, shared = config.n_expert_per_token, config.shared_expert_intermediate_size
    product = 3 if config.swiglu_limit is None else 6
    experts: float = k * c * ((product + is_trained) * config.expert_size + (1 + is_trained) * config.n_embd)
    if config.bias and is_trained:  # biases as products with ones: 8 columns per layer, 8 rows per bias
        experts += k * c * 3 * 8 + c * 8 * config.n_expert * (2 * config.expert_size + config.n_embd) / setup.tokens
    router = FP32 * config.n_expert + k * (3 * INT64 + c) + FP32 * (k + 1) * config.norm_topk_prob
    groups, top_groups = config.n_expert_groups, config.n_topk_groups
    if groups is not None and top_groups is not None:  # top experts per group, top groups, and the group mask
        best = 1 if config.router_scores == "softmax" else 2
        router += INT64 * (best * groups + top_groups) + groups
    router += FP32 * config.n_embd * (is_trained and _is_router_in_fp32(setup))
    shared_expert = 0 if shared is None else c * (3 + is_trained) * shared
    shared_expert += c * (config.n_embd + 1) * (shared is not None and config.shared_expert_gate)
    return experts + router + shared_expert


def _keeps_input(setup: TrainingSetup, parts: tuple[str, ...]) -> bool:
    """Whether a linear layer's input is saved, for the gradient of its weight or its adapters."""
    if setup.lora is None:
        return True
    return not setup.lora.dropout and any(getattr(setup.lora, part) for part in parts)


def _adapter(setup: TrainingSetup, parts: tuple[str, ...], inputs: int, outputs: int, input_bytes: int) -> float:
    """Return the bytes per token of the adapters of one layer.

    These are the low-rank values; with dropout the dropped-out inputs and the mask, which on the CPU has the inputs'
    dtype (``input_bytes``); with DoRA the values that its magnitudes multiply.
    """
    lora, c = setup.lora, setup.compute_bytes
    if lora is None or not (n_adapted := sum(getattr(lora, part) for part in parts)):
        return 0
    dropped = inputs * (c + (input_bytes if setup.device == "cpu" else 1)) if lora.dropout else 0
    return lora.r * n_adapted * c + dropped + (outputs * c if lora.dora else 0)


def logits_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of one chunk of logits with its gradient, cast under 16-bit products, and of the loss gradients.

    See models/loss.py: the head's gradient accumulates in fp32 between forward and backward, from 16-bit chunks; the
    input is cast, masked and gets a gradient.
    """
    config, c, n = setup.config, setup.compute_bytes, setup.tokens
    vocabulary, head = config.padded_vocab_size, config.padded_vocab_size * config.n_embd
    rows = min(chunk_rows(vocabulary, torch.device(setup.device)), n)
    chunk = rows * vocabulary * (FP32 + (c if c != FP32 else 0))
    trained = head * (FP32 + (c if c != FP32 else 0)) if setup.lora is None else 0
    rounded = head * c if setup.is_mixed else 0
    return chunk + trained + rounded + n * config.n_embd * (2 * c + setup.weight_bytes)
