"""Causal self-attention: grouped-query attention, fused QKV projection, optional KV cache."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.aligned import missing_width
from toolkit.models.attention_kernels import FlashMask, FlexMask, flash_attention, flex_attention_with_softcap
from toolkit.models.config import ModelConfig
from toolkit.models.kv_cache import LayerCache
from toolkit.models.masks import AttentionMask
from toolkit.models.mixed_mm import matmul_dtype
from toolkit.models.norm import Norm, make_qk_norm
from toolkit.models.rope import RotaryEmbedding


class CausalSelfAttention(nn.Module):
    """Compute proj(attention(q, k, v)). The rows of ``qkv`` are all queries, then all keys, then all values.

    With ``attention_gate``, the rows of the output's gates come first.
    """

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_groups, self.head_size = config.n_head, config.n_query_groups, config.head_size
        self.scale, self.clip_qkv = config.attention_scale, config.clip_qkv
        self.softcap = config.attention_logit_softcapping
        self.has_gate = config.attention_gate
        self.qkv = nn.Linear(config.n_embd, sum(self.stacked_rows[1]), bias=config.bias or config.attn_bias)
        self.proj = nn.Linear(self.n_head * self.head_size, config.n_embd, bias=config.bias or config.attn_proj_bias)
        self.norm_after_rope = config.norm_qk_after_rope
        self.norm_q: Norm | None = None
        self.norm_k: Norm | None = None
        if config.norm_qk:
            self.norm_q, self.norm_k = make_qk_norm(config, self.n_head), make_qk_norm(config, self.n_groups)
        self.sinks = nn.Parameter(torch.zeros(self.n_head)) if config.attention_sinks else None

    @property
    def stacked_rows(self) -> tuple[str, tuple[int, ...]]:
        """The fused layer's name, and its number of gate (if any), query, key and value rows."""
        n_queries, n_keys = self.n_head * self.head_size, self.n_groups * self.head_size
        return "qkv", (*[n_queries] * (1 + self.has_gate), n_keys, n_keys)

    def forward(
        self,
        x: Tensor,
        attn_mask: AttentionMask,
        rope: RotaryEmbedding | None = None,
        cache: LayerCache | None = None,
        kv_source: Tensor | None = None,
    ) -> Tensor:
        """(B, T, n_embd) -> (B, T, n_embd).

        With ``kv_source``, (B, T, n_embd), keys and values are projected from it (cross-attention). x may then be
        (1, 1, n_embd): the same query at all positions, except for the rotation.
        """
        qkv = self.qkv(x) if kv_source is None else self._cross_projection(x, kv_source)
        B, T, _ = qkv.shape
        gate: Tensor | None = None
        if self.has_gate:
            gate, qkv = qkv.tensor_split((self.n_head * self.head_size,), dim=-1)
        if self.clip_qkv is not None:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        qkv = qkv.view(B, T, self.n_head + 2 * self.n_groups, self.head_size)
        if rope is None and self.norm_q is None:  # one split, whose backward pass copies each gradient once
            q, k, v = qkv.split((self.n_head, self.n_groups, self.n_groups), dim=2)
        else:
            qk, v = qkv.split((self.n_head + self.n_groups, self.n_groups), dim=2)
            qk = qk if rope is None or not self.norm_after_rope else rope.apply(qk)
            if self.norm_q is not None and self.norm_k is not None:
                qk = self._apply_qk_norm(qk, (self.norm_q, self.norm_k))
            qk = qk if rope is None or self.norm_after_rope else rope.apply(qk)
            q, k = qk.split((self.n_head, self.n_groups), dim=2)
        if rope is not None and rope.query_scale is not None:
            q = q * rope.query_scale.to(q.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads or groups, T, head_size)
        k, v = visible_keys(k, v, attn_mask, cache)
        y = attend(q, k, v, attn_mask, self.scale, self.softcap, self.sinks)
        y = y.transpose(1, 2).flatten(2)
        return self.proj(y if gate is None else y * gate.sigmoid())

    def _cross_projection(self, x: Tensor, kv_source: Tensor) -> Tensor:
        """Project queries from x, keys and values from kv_source.

        Both pass through the complete layer, because its weights may be quantized or have adapters.
        """
        n_queries = sum(self.stacked_rows[1][:-2])
        queries = self.qkv(x)[..., :n_queries].expand(*kv_source.shape[:2], -1)
        return torch.cat((queries, self.qkv(kv_source)[..., n_queries:]), dim=-1)

    def _apply_qk_norm(self, qk: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        """Apply QK-norm to (B, T, heads + groups, head_size), per head or over all heads of a token."""
        parts = qk.split((self.n_head, self.n_groups), dim=2)
        start = -1 if norms[0].normalized_shape[0] == self.head_size else 2  # of the normalized dimensions
        pairs = zip(norms, parts, strict=True)
        return torch.cat([norm(part.flatten(start)).view_as(part) for norm, part in pairs], dim=2)


def visible_keys(k: Tensor, v: Tensor, attn_mask: AttentionMask, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
    """Return the keys and values, (B, groups, n_keys, width), of new, cached and other ranks' tokens."""
    if cache is not None:
        k, v = cache.update(k, v)
    if attn_mask.context is not None:
        k, v = attn_mask.context.gather(k, v)
    if cache is None and attn_mask.context is None:
        return k, v  # a slice of all would copy their gradients
    return k[:, :, -attn_mask.n_keys :], v[:, :, -attn_mask.n_keys :]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: AttentionMask,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with the mask's kernel, or with an explicit mask if it has none.

    q: (B, n_head, T, width), multiplied by ``scale``; k and v: (B, n_query_groups, keys, width). Returns (B, n_head, T,
    width), in the dtype of q or the autocast dtype.
    """
    # torch pads as well, but then never takes cuDNN's kernel; one new token would not repay a copy of its cache
    is_decoding = q.size(2) == 1 and attn_mask.kernel_mask is None
    if (n := missing_width(q)) and not is_decoding:
        q, k, v = (F.pad(t, (0, n)) for t in (q, k, v))
        return attend(q, k, v, attn_mask, scale, softcap, sinks)[..., :-n]
    if attn_mask.context is not None:
        size, outputs = q.size(2) // 2, list[Tensor]()
        for start, mask in zip(attn_mask.context.chunk_starts(size), attn_mask.chunks, strict=True):
            keys, queries = slice(start + size - mask.n_keys, start + size), q.chunk(2, dim=2)[len(outputs)]
            outputs.append(attend(queries, k[:, :, keys], v[:, :, keys], mask, scale, softcap, sinks))
        return torch.cat(outputs, dim=2)
    if attn_mask.kernel_mask is None:
        if softcap is not None:
            return softcap_attention(q, k, v, attn_mask, scale, softcap)
        if sinks is not None:
            return sink_attention(q, k, v, attn_mask, scale, sinks)
        return fused_attention(q, k, v, attn_mask.mask, attn_mask.is_causal, scale)
    q, k, v = (t.to(matmul_dtype(t)) for t in (q, k, v))  # autocast does not know these kernels
    if isinstance(attn_mask.kernel_mask, FlexMask):
        assert softcap is not None
        return flex_attention_with_softcap(q, k, v, attn_mask.kernel_mask, scale, softcap)
    assert isinstance(attn_mask.kernel_mask, FlashMask)
    return flash_attention(q, k, v, attn_mask.kernel_mask, scale, sinks)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Run ``scaled_dot_product_attention`` with a fused kernel, which never materializes all scores.

    Shapes as in :func:`attend`. All heads share the mask.
    """
    repeats, enable_gqa = q.size(1) // k.size(1), False
    # treat a group's heads as extra queries, which every kernel supports
    if repeats > 1 and q.size(2) == 1 and not is_causal:
        grouped = q.reshape(k.size(0), k.size(1), repeats, -1)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)
    if repeats > 1:  # not "enable_gqa = repeats > 1": a compiled block's sizes can be symbolic, and so would it be
        if sdpa_supports_gqa(q, mask):
            enable_gqa = True
        else:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def sdpa_supports_gqa(q: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel supports grouped-query attention (GQA).

    On CUDA only FlashAttention does, and it supports neither masks nor fp32. For other GQA inputs torch silently falls
    back to the math backend, which materializes the scores of all queries and keys.
    """
    return not q.is_cuda or (mask is None and q.dtype != torch.float32 and q.size(-1) <= 256)


def softcap_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: AttentionMask, scale: float, logit_softcap: float
) -> Tensor:
    """Compute attention with soft-capped scores, cap * tanh(score / cap) (Gemma 2).

    No fused kernel in torch supports the cap, so all scores are materialized. Scores and softmax are fp32. The cap
    applies to the scaled scores. Shapes as in :func:`attend`.
    """
    mask = attn_mask.mask
    if attn_mask.is_causal:
        mask = torch.ones(q.size(2), attn_mask.n_keys, dtype=torch.bool, device=q.device).tril()
    repeats = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = logit_softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / logit_softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1).to(v.dtype) @ v


def sink_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: AttentionMask, scale: float, sinks: Tensor) -> Tensor:
    """Compute attention with a sink per head (gpt-oss, OpenAI 2025, arXiv 2508.10925).

    A sink is a learned logit that takes part in the softmax and contributes no value.

    Fused kernels do not support sinks, so the sink is an explicit first key with a zero value. The key is zero except
    for one extra element, where each query holds its head's sink logit. A dummy first query, dropped from the output,
    keeps causal attention causal without a mask.

    sinks: (n_head,), not multiplied by ``scale``. Other shapes as in :func:`attend`.
    """
    size = q.size(-1)
    # fused kernels require widths that are multiples of 8
    q, k, v = (F.pad(x, (0, 8 - size % 8, 1, 0)) for x in (q, k, v))
    q[..., size] = (sinks / scale)[:, None]
    k[:, :, 0, size] = 1
    mask = None if attn_mask.mask is None else F.pad(attn_mask.mask, (1, 0, 1, 0), value=True)
    return fused_attention(q, k, v, mask, attn_mask.is_causal, scale)[:, :, 1:, :size]
