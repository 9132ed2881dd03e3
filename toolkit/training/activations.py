"""Bytes of a training step's activations and logits, per part of the model: closed formulas.

The letters are those of :mod:`toolkit.training.memory_plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.models.loss import chunk_rows

if TYPE_CHECKING:
    from toolkit.training.memory_plan import Job

FP32, INT64 = 4, 8
_QKV, _PROJECTION, _MLP = ("query", "key", "value"), ("projection",), ("mlp",)  # the adapters of each linear layer


def activation_bytes(job: Job) -> float:
    """What autograd keeps of a forward pass: Korthikanti et al. 2022 (arXiv 2205.05198) count so, here for our Block.

    Attention is ``scaled_dot_product_attention``: no (T, T) matrix, but where no fused kernel takes the inputs.
    """
    config, n = job.config, job.tokens
    experts, dense = config.n_moe_layer, config.n_layer - config.n_moe_layer
    gates = 1 if config.mlp_class_name == "GptNeoxMLP" else 2
    mlps = dense * (_norms(job, gates * _keeps_input(job, _MLP)) + _mlp(job))
    mlps += experts * (_norms(job, _expert_readers(job)) + _experts(job))
    attention = _attention(job) if config.latent_attention is None else _latent_attention(job)
    blocks = n * (config.n_layer * attention + mlps)
    last_norm = n * _norm(job)
    rotation = 2 * FP32 * job.seq_length * config.rope_n_elem * _rotations(job)
    mask = n * job.seq_length if job.packed else 0
    return blocks + last_norm + rotation + mask + 8 * n


def _rotations(job: Job) -> int:
    """How many kinds of rotation the layers have; each is computed once."""
    config = job.config
    return len({config.rope_index(i) for i in range(config.n_layer)} - {-1}) * (config.position_embedding == "rope")


def _norm(job: Job) -> int:
    """One norm, per token: its input and its statistics.

    On the CPU torch composes RMSNorm of smaller steps, which keep what goes between them in fp32. Gemma's has its input
    in fp32 everywhere.
    """
    config, residual = job.config, FP32 if job.config.norm_offset else job.weight_bytes
    if job.device == "cpu" and config.norm_class_name == "RMSNorm":
        return config.n_embd * FP32 * (1 + (job.lora is None)) + FP32
    return config.n_embd * residual + (FP32 if config.norm_class_name == "RMSNorm" else 2 * FP32)


def _norms(job: Job, mlp_readers: int) -> int:
    """The norms of a block and their outputs, as inputs of linear layers, per token.

    Autocast rounds an fp32 input anew for each layer that keeps it; ``mlp_readers``: how many of the MLP's do.
    """
    config = job.config
    count = config.norm_1 + (config.norm_2 and not config.shared_attention_norm)
    kept = (count + config.post_attention_norm + config.post_mlp_norm) * _norm(job)
    if config.parallel_residual and count == 2:
        kept -= config.n_embd * job.weight_bytes  # both read the same
    readers = [_attention_readers(job), mlp_readers]
    if config.shared_attention_norm:
        readers = [sum(readers)]
    copies = sum(readers) if job.is_mixed else sum(min(1, n) for n in readers)
    return kept + copies * config.n_embd * job.compute_bytes


def _attention_readers(job: Job) -> int:
    """The linear layers of attention that keep its input."""
    latent = job.config.latent_attention
    if latent is None:
        return int(_keeps_input(job, _QKV))
    if job.lora is None:
        return 2  # for queries, and for keys and values
    return int(_keeps_input(job, ("query",)) and latent["q_lora_rank"] is None)


def _attention(job: Job) -> float:
    """Attention with its projections, per token."""
    config = job.config
    heads, groups = config.n_head * config.head_size, config.n_query_groups * config.head_size
    if config.attention_sinks:
        kept = _with_sinks(job)
    else:
        kept = _capped(job) if config.attention_logit_softcapping is not None else _fused_kernel(job)
    if config.norm_qk:
        kept += _norm_qk(job)
    if config.clip_qkv is not None:
        kept += job.compute_bytes * (heads + 2 * groups)
    kept += _adapter(job, _QKV, config.n_embd, heads + 2 * groups, job.weight_bytes)
    return kept + _adapter(job, _PROJECTION, heads, config.n_embd, job.compute_bytes)


def _latent_attention(job: Job) -> float:
    """Latent attention with its projections, per token.

    Queries, keys and values are new, each as wide as the widest; values are copied again where zeros are cut off.
    """
    config, c, sizes = job.config, job.compute_bytes, job.config.latent_attention
    rank, kv_rank, shared = sizes["q_lora_rank"] or 0, sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    width, values = max(config.head_size, config.value_size), config.n_head * config.value_size
    made = config.n_head * (sizes["qk_nope_head_dim"] + config.value_size)  # the values are a part of it, or padded
    kept = c * config.n_head * 3 * width + c * (config.n_head * width if config.value_size < width else made)
    kept += FP32 * config.n_head + c * _mask(job) + c * values * (config.value_size < width)
    kept += _small_norm(job, kv_rank, kv_rank + shared) + (_small_norm(job, rank, rank) if rank else 0)
    of_queries, of_keys = ("query",), ("key", "value")
    kept += c * rank * _keeps_input(job, of_queries) + c * kv_rank * _keeps_input(job, of_keys)
    kept += _adapter(job, of_queries, rank or config.n_embd, config.n_head * config.head_size, c)
    return kept + _adapter(job, of_keys, kv_rank, made, c) + _adapter(job, _PROJECTION, values, config.n_embd, c)


def _small_norm(job: Job, width: int, stored: int) -> int:
    """A norm in latent attention, per token: its input, as a part of what is ``stored``, and its statistics."""
    c = job.compute_bytes
    if job.device == "cpu":
        return (FP32 * width if c != FP32 else FP32 * stored) + FP32 * width * (job.lora is None) + FP32
    return c * stored + FP32


def _fused_kernel(job: Job) -> float:
    """Queries, keys, values, the output and its log-sum-exps, per token.

    The values are a part of the fused projection's output, which therefore stays whole; rotated, or normalised, queries
    and keys are new. A mask is turned into numbers, layer by layer.
    """
    config, c = job.config, job.compute_bytes
    heads, groups = config.n_head * config.head_size, config.n_query_groups * config.head_size
    projection, is_new = heads + 2 * groups, config.position_embedding == "rope" or config.norm_qk
    grouped = projection + (heads + groups) * is_new
    is_normed = config.norm_qk and not _copies_for_norms(job)  # then the norms keep the projection's output
    repeated = (heads + groups) * is_new + projection * (is_normed or not is_new) + 2 * heads
    share = _repeated(job)
    kept = c * (share * repeated + (1 - share) * grouped) + c * heads + FP32 * config.n_head
    return kept + c * _mask(job)


def _repeated(job: Job) -> float:
    """The share of layers where keys and values are repeated for all heads, see attention.sdpa_supports_gqa."""
    config = job.config
    if job.device != "cuda" or config.n_query_groups == config.n_head:
        return 0
    return 1 if job.compute_bytes == FP32 or config.head_size > 256 else _masked(job)


def _with_sinks(job: Job) -> float:
    """As :func:`_fused_kernel`, with a token more and heads wider by up to 8; the output is copied where they end."""
    config, c, more = job.config, job.compute_bytes, 1 + 1 / job.seq_length
    width = config.head_size + 8 - config.head_size % 8
    groups = config.n_query_groups + _repeated(job) * (config.n_head - config.n_query_groups)
    kept = c * (2 * config.n_head + 2 * groups) * width + FP32 * config.n_head
    kept = more * kept + c * config.n_head * config.head_size * _keeps_input(job, _PROJECTION)
    return kept + more**2 * c * _mask(job)


def _capped(job: Job) -> float:
    """Queries, the keys and values of all heads and the output; each score after tanh and softmax, and rounded; and
    the mask, causal or other, in every layer."""
    config, c = job.config, job.compute_bytes
    scores = config.n_head * job.seq_length * (2 * FP32 + (c if c != FP32 else 0))
    return 4 * c * config.n_head * config.head_size + scores + job.seq_length / (1 if job.packed else _rows(job))


def _rows(job: Job) -> int:
    return job.tokens // job.seq_length


def _mask(job: Job) -> float:
    """Elements of masks, per token and layer: one for each row of packed documents, else one for all in a window."""
    return job.seq_length * _masked(job) / (1 if job.packed else _rows(job))


def _masked(job: Job) -> float:
    """The share of layers with a mask."""
    config = job.config
    if job.packed:
        return 1
    return sum((config.window(i) or job.seq_length) < job.seq_length for i in range(config.n_layer)) / config.n_layer


def _norm_qk(job: Job) -> int:
    """As :func:`_norm`; the input is a part of the fused projection's output, where that is in fp32 or stays so."""
    config, c = job.config, job.compute_bytes
    vectors = 2 if config.norm_qk_type == "olmo2" else config.n_head + config.n_query_groups
    width = (config.n_head + config.n_query_groups) * config.head_size
    if config.norm_class_name == "LayerNorm":  # mean and deviation; those of all heads also what the weights multiply
        own = config.norm_qk_type == "per_head"
        copied = c != FP32 and (own or (job.is_mixed and job.device != "cpu"))
        return FP32 * width * (copied + (own and job.lora is None)) + 2 * FP32 * vectors
    return FP32 * width * (_copies_for_norms(job) + (job.device == "cpu" and job.lora is None)) + FP32 * vectors


def _copies_for_norms(job: Job) -> bool:
    """Whether the norms of queries and keys keep an fp32 copy of their input."""
    return job.compute_bytes != FP32 and (job.device == "cpu" or job.config.norm_offset)


def _mlp(job: Job) -> float:
    """Per token: what the activation function and the gate read, and the last layer's input."""
    config, c = job.config, job.compute_bytes
    inner = config.intermediate_size
    gates = 1 if config.mlp_class_name == "GptNeoxMLP" else 2
    kept = c * inner * ((3 if gates == 2 else 1) + _keeps_input(job, _MLP))
    first = gates * _adapter(job, _MLP, config.n_embd, inner, job.weight_bytes)
    return kept + first + _adapter(job, _MLP, inner, config.n_embd, c)


def _expert_readers(job: Job) -> int:
    """The linear layers in an LLaMAMoE that keep its input: the router; the shared expert's two, and its gate."""
    config = job.config
    if job.lora is not None:
        return 0
    router = 0 if _is_router_in_fp32(job) else 1
    return router + (0 if config.shared_expert_intermediate_size is None else 2 + config.shared_expert_gate)


def _is_router_in_fp32(job: Job) -> bool:
    """Whether the router reads a copy of its own, in another type than the other layers do."""
    return job.config.router_scores == "sigmoid" and job.compute_bytes != FP32


def _experts(job: Job) -> float:
    """What a layer with experts keeps, per token.

    Of each expert that a token goes to, its input, what activation function and gate read, the last layer's input,
    and what it says; of the router, all probabilities, the choice, and the order there and back.
    """
    config, c, is_trained = job.config, job.compute_bytes, job.lora is None
    k, shared = config.n_expert_per_token, config.shared_expert_intermediate_size
    product = 3 if config.swiglu_limit is None else 6
    experts = k * c * ((product + is_trained) * config.expert_size + (1 + is_trained) * config.n_embd)
    if config.bias and is_trained:  # as a product with ones, 8 for each layer; and 8 rows for each bias
        experts += k * c * 3 * 8 + c * 8 * config.n_expert * (2 * config.expert_size + config.n_embd) / job.tokens
    router = FP32 * config.n_expert + k * (3 * INT64 + c) + FP32 * (k + 1) * config.norm_topk_prob
    if config.n_expert_groups is not None:  # the best experts of each group, the best groups, and the mask of these
        best = 1 if config.router_scores == "softmax" else 2
        router += INT64 * (best * config.n_expert_groups + config.n_topk_groups) + config.n_expert_groups
    router += FP32 * config.n_embd * (is_trained and _is_router_in_fp32(job))
    one_more = 0 if shared is None else c * (3 + is_trained) * shared
    one_more += c * (config.n_embd + 1) * (shared is not None and config.shared_expert_gate)
    return experts + router + one_more


def _keeps_input(job: Job, parts: tuple[str, ...]) -> bool:
    """Whether a linear layer's input is kept: for the gradient of its weight, or of its adapters."""
    if job.lora is None:
        return True
    return not job.lora.dropout and any(getattr(job.lora, part) for part in parts)


def _adapter(job: Job, parts: tuple[str, ...], inputs: int, outputs: int, input_bytes: int) -> float:
    """What the adapters of one layer keep per token.

    That is the low-rank values; with dropout what is left of the inputs, and the mask, which on the CPU is of the
    inputs' dtype (``input_bytes``); with DoRA what its magnitudes multiply.
    """
    chosen = 0 if job.lora is None else sum(getattr(job.lora, part) for part in parts)
    if not chosen:
        return 0
    c = job.compute_bytes
    dropped = inputs * (c + (input_bytes if job.device == "cpu" else 1)) if job.lora.dropout else 0
    return job.lora.r * chosen * c + dropped + (outputs * c if job.lora.dora else 0)


def logits_bytes(job: Job) -> float:
    """One chunk of logits with its gradient, rounded where products are in 16 bits, and the gradients of the loss.

    See models/loss.py: the head's gradient waits in fp32 between forward and backward, a second one in 16 bits is
    added to it; the input is rounded, masked and gets its gradient.
    """
    config, c, n = job.config, job.compute_bytes, job.tokens
    vocabulary, head = config.padded_vocab_size, config.padded_vocab_size * config.n_embd
    rows = min(chunk_rows(vocabulary, torch.device(job.device)), n)
    chunk = rows * vocabulary * (FP32 + (c if c != FP32 else 0))
    trained = head * (FP32 + (c if c != FP32 else 0)) if job.lora is None else 0
    rounded = head * c if job.is_mixed else 0
    return chunk + trained + rounded + n * config.n_embd * (2 * c + job.weight_bytes)
