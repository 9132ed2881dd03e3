"""Linear attention: Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

With n_key_heads x key_size = K, n_value_heads x value_size = V:

| name | shape |
|---|---|
| ``attn.in_qkv.weight`` | (2 K + V, n_embd): all queries, all keys, all values |
| ``attn.in_gate.weight`` | (V, n_embd): gate of the output |
| ``attn.in_beta.weight``, ``attn.in_decay.weight`` | (n_value_heads, n_embd) |
| ``attn.conv`` | (2 K + V, 1, conv_size), the current token last; three axes, because it is no matrix for optimizers |
| ``attn.A_log``, ``attn.dt_bias`` | (n_value_heads,): decay and its time step |
| ``attn.out_norm.weight`` | (value_size,) |
| ``attn.proj.weight`` | (n_embd, V) |
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.aligned import AlignedLinear
from toolkit.models.config import ModelConfig
from toolkit.models.gated_delta import causal_conv, gated_delta_rule
from toolkit.models.kv_cache import StateCache
from toolkit.models.masks import SequenceStarts
from toolkit.models.norm import RMSNorm
from toolkit.models.rope import RotaryEmbedding


class GatedDeltaNet(nn.Module):
    """Compute proj(out_norm(delta rule) * silu(gate)). The state and its inputs are in fp32."""

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.linear_attention
        assert sizes is not None
        self.key_heads, self.value_heads = sizes["n_key_heads"], sizes["n_value_heads"]
        keys, values = self.key_heads * sizes["key_size"], self.value_heads * sizes["value_size"]
        self.stacked_rows = "in_qkv", (keys, keys, values)  # as in CausalSelfAttention
        self.in_qkv = nn.Linear(config.n_embd, 2 * keys + values, bias=False)
        self.in_gate = nn.Linear(config.n_embd, values, bias=False)
        self.in_beta = AlignedLinear(config.n_embd, self.value_heads, bias=False)
        self.in_decay = AlignedLinear(config.n_embd, self.value_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(2 * keys + values, 1, sizes["conv_size"]))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.out_norm = RMSNorm(sizes["value_size"], eps=config.norm_eps)
        self.proj = nn.Linear(values, config.n_embd, bias=False)

    def forward(
        self,
        x: Tensor,
        starts: SequenceStarts,
        rope: RotaryEmbedding | None = None,
        cache: StateCache | None = None,
        kv_source: Tensor | None = None,
    ) -> Tensor:
        """(B, T, n_embd) -> (B, T, n_embd). Positions have no effect; cross-attention is not supported."""
        assert kv_source is None, "linear attention has no keys of other tokens"
        state, window = (None, None) if cache is None else (cache.state, cache.window)
        qkv, window = causal_conv(self.in_qkv(x), self.conv.squeeze(1), window, starts.starts)
        q, k, v = qkv.split(self.stacked_rows[1], dim=-1)
        q, k = (part.unflatten(-1, (self.key_heads, -1)) for part in (q, k))
        v = v.unflatten(-1, (self.value_heads, -1))
        dtype = torch.promote_types(x.dtype, torch.float32)
        time_step = F.softplus(self.in_decay(x).to(dtype) + self.dt_bias)
        log_decay, beta = -self.A_log.to(dtype).exp() * time_step, self.in_beta(x).to(dtype).sigmoid()
        y, state = gated_delta_rule(q, k, v, log_decay, beta, state, starts.starts)
        if cache is not None:
            cache.update(state, window, x.size(1))
        gate = self.in_gate(x).view_as(y)
        y = (self.out_norm(y) * F.silu(gate.to(dtype))).to(y.dtype)
        return self.proj(y.flatten(2))
