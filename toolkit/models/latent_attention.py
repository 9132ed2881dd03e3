"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are projected from one low-rank latent per token plus one rotary key shared by all heads; only these are
cached. Queries may also be projected from a low-rank latent.

| name | shape |
|---|---|
| ``attn.q_a.weight``, ``attn.q_a_norm.weight`` (if q_lora_rank is set) | (q_lora_rank, n_embd), (q_lora_rank,) |
| ``attn.q_b.weight`` | (n_head * head_size, q_lora_rank or n_embd); per head, the rotated part comes last |
| ``attn.kv_a.weight`` | (kv_lora_rank + qk_rope_head_dim, n_embd); the shared key comes last |
| ``attn.kv_a_norm.weight`` | (kv_lora_rank,) |
| ``attn.kv_b.weight`` | (n_head * (qk_nope_head_dim + v_head_dim), kv_lora_rank): all keys, then all values |
| ``attn.proj.weight`` | (n_embd, n_head * v_head_dim) |
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.attention import attend, visible_keys
from toolkit.models.config import ModelConfig
from toolkit.models.kv_cache import LayerCache
from toolkit.models.masks import AttentionMask
from toolkit.models.norm import RMSNorm
from toolkit.models.rope import RotaryEmbedding

NORM_EPS = 1e-6  # for both norms of this file, whatever norm_eps is, as in DeepSeek's code and transformers


class LatentAttention(nn.Module):
    """Compute proj(attention(q, k, v)) with keys and values from kv_b(kv_a_norm(kv_a(x)))."""

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.latent_attention
        assert sizes is not None
        self.n_head, self.head_size, self.scale = config.n_head, config.head_size, config.attention_scale
        self.nope, self.rope, self.v_size = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]
        rank, self.kv_rank = sizes["q_lora_rank"], sizes["kv_lora_rank"]
        self.q_a: nn.Linear | None = None
        self.q_a_norm: RMSNorm | None = None
        if rank is not None:
            self.q_a = nn.Linear(config.n_embd, rank, bias=False)
            self.q_a_norm = RMSNorm(rank, eps=NORM_EPS)
        self.q_b = nn.Linear(rank or config.n_embd, self.n_head * self.head_size, bias=False)
        self.kv_a = nn.Linear(config.n_embd, self.kv_rank + self.rope, bias=False)
        self.kv_a_norm = RMSNorm(self.kv_rank, eps=NORM_EPS)
        self.kv_b = nn.Linear(self.kv_rank, self.n_head * (self.nope + self.v_size), bias=False)
        self.proj = nn.Linear(self.n_head * self.v_size, config.n_embd, bias=False)

    @property
    def stacked_rows(self) -> tuple[str, tuple[int, ...]]:
        """The fused layer's name, and its number of key and value rows."""
        return "kv_b", (self.n_head * self.nope, self.n_head * self.v_size)

    def forward(
        self,
        x: Tensor,
        attn_mask: AttentionMask,
        rope: RotaryEmbedding | None = None,
        cache: LayerCache | None = None,
        kv_source: Tensor | None = None,
    ) -> Tensor:
        """(B, T, n_embd) -> (B, T, n_embd). The cache stores (B, 1, T, kv_lora_rank) and (B, 1, T, qk_rope_head_dim).

        With ``kv_source``, (B, T, n_embd), keys and values are projected from it (cross-attention).
        """
        B, T, _ = x.shape
        query = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        q = self.q_b(query).view(B, T, self.n_head, self.head_size)
        latent, shared = self.kv_a(x if kv_source is None else kv_source).split((self.kv_rank, self.rope), dim=-1)
        latent, shared = self.kv_a_norm(latent).unsqueeze(1), shared.unsqueeze(2)
        if rope is not None:
            plain, rotated = q.split((self.nope, self.rope), dim=-1)
            q, shared = torch.cat((plain, rope.apply(rotated)), dim=-1), rope.apply(shared)
        shared = shared.transpose(1, 2)
        latent, shared = visible_keys(latent, shared, attn_mask, cache)
        k, v = self._keys_and_values(latent, shared)
        # The kernels need equal widths; zero padding changes neither scores nor the kept values.
        width = max(self.head_size, self.v_size)
        q, k, v = (F.pad(t, (0, width - t.size(-1))) if t.size(-1) < width else t for t in (q.transpose(1, 2), k, v))
        y = attend(q, k, v, attn_mask, self.scale)
        return self.proj(y[..., : self.v_size].transpose(1, 2).flatten(2))

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents (B, 1, keys, kv_lora_rank) and shared keys to keys (B, n_head, keys, head_size) and values."""
        kv = self.kv_b(latent.squeeze(1)).split((self.n_head * self.nope, self.n_head * self.v_size), dim=-1)
        k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in kv)
        return torch.cat((k, shared.expand(-1, self.n_head, -1, -1)), dim=-1), v
