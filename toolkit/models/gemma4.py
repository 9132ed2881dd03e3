"""Gemma 4, text only (Gemma Team 2026). Its layers differ in size, share keys and values, and take per-layer inputs.

The sizes are in ``ModelConfig.family_options``, see :mod:`toolkit.models.families.gemma4`.

| name | shape |
|---|---|
| ``attn.qkv.weight`` | (rows, n_embd): queries; keys, if not shared; values, if they are not the keys |
| ``attn.norm_q.weight``, ``attn.norm_k.weight`` | (head_size,); the norm of values has no weight |
| ``layer_scalar`` (a buffer, not trained) | (1,): multiplies the block's output |
| ``per_layer_gate.weight``, ``per_layer_proj.weight`` | (per_layer_size, n_embd), (n_embd, per_layer_size) |
| ``post_per_layer_norm.weight`` | (n_embd,) |
| ``transformer.wte_per_layer.weight`` | (per_layer_vocab_size, n_layer * per_layer_size) |
| ``transformer.per_layer_proj.weight`` | (n_layer * per_layer_size, n_embd) |
| ``transformer.per_layer_norm.weight`` | (per_layer_size,) |
| ``mlp.shared_expert``, ``mlp.gate``, ``mlp.experts`` | of a model with experts: see :mod:`toolkit.models.moe` |
| ``mlp.gate_scale``, ``mlp.expert_scale`` | (n_embd,), (n_expert,) |
| ``mlp.experts_norm.weight``, ``mlp.post_experts_norm.weight``, ``mlp.post_dense_norm.weight`` | (n_embd,) |
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.attention import attend, visible_keys
from toolkit.models.block import Block, BlockInputs
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import LayerCache
from toolkit.models.masks import AttentionMask
from toolkit.models.mlp import GemmaMLP
from toolkit.models.moe import Experts, LLaMAMoE, load_balancing_loss
from toolkit.models.norm import RMSNorm, make_norm
from toolkit.models.rope import RotaryEmbedding

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values that a layer's queries can attend to, (B, groups, n_keys, head_size)."""


def find_sources(config: ModelConfig) -> dict[int, int]:
    """Return which layers share keys and values, and the layer that computes these: the last one with the window."""
    first = config.n_cached_layer
    layers = {config.window(layer): layer for layer in range(first)}
    return {layer: layers[config.window(layer)] for layer in range(first, config.n_layer)}


class Gemma4Attention(nn.Module):
    """Attention with normalized queries, keys and values, which are a layer's own or another layer's.

    Args:
        config: The layer's config.
        n_parts: 3 for queries, keys and values; 2 if the keys before their norm are the values; 1 for queries only.
    """

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig, n_parts: int) -> None:
        super().__init__()
        self.heads = (config.n_head, config.n_query_groups, config.n_query_groups)[:n_parts]
        self.head_size, self.scale = config.head_size, config.attention_scale
        self.qkv = nn.Linear(config.n_embd, sum(self.heads) * self.head_size, bias=config.attn_bias)
        self.proj = nn.Linear(config.n_head * self.head_size, config.n_embd, bias=config.attn_proj_bias)
        self.norm_q = make_norm(config, self.head_size)
        if n_parts > 1:
            self.norm_k = make_norm(config, self.head_size)
            self.norm_v = RMSNorm(self.head_size, eps=config.norm_eps, elementwise_affine=False)

    @property
    def stacked_rows(self) -> tuple[str, tuple[int, ...]]:
        """The fused layer's name, and its number of query, key and value rows, as far as it has them."""
        return "qkv", tuple(heads * self.head_size for heads in self.heads)

    def forward(
        self,
        x: Tensor,
        attn_mask: AttentionMask,
        rope: RotaryEmbedding,
        cache: LayerCache | None = None,
        shared: KeysAndValues | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """(B, T, n_embd) -> (B, T, n_embd), and the keys and values, which are ``shared`` if the layer has none."""
        q, *rest = self.qkv(x).unflatten(-1, (-1, self.head_size)).split(self.heads, dim=2)
        q = self.norm_q(q)
        if shared is None:
            k, v = self.norm_k(rest[0]), self.norm_v(rest[-1])
            q, k = rope.apply(torch.cat((q, k), dim=2)).split(self.heads[:2], dim=2)
            shared = visible_keys(k.transpose(1, 2), v.transpose(1, 2), attn_mask, cache)
        else:
            q = rope.apply(q)
        y = attend(q.transpose(1, 2), *shared, attn_mask, self.scale)
        return self.proj(y.transpose(1, 2).flatten(2)), shared


class GeluExperts(Experts):
    """Experts with GeGLU: proj(gelu(fc_1(x)) * fc_2(x))."""

    def _gated_product(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


class Gemma4MoE(LLaMAMoE):
    """Experts and a dense MLP, the shared expert, with different inputs and a norm after each."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__(config)
        self.experts = GeluExperts(config)
        self.shared_expert = GemmaMLP(config, width)
        self.experts_norm = make_norm(config, is_residual_norm=True)
        self.post_experts_norm, self.post_dense_norm = make_norm(config), make_norm(config)
        self.gate_norm = RMSNorm(config.n_embd, eps=config.norm_eps, elementwise_affine=False)
        self.gate_scale, self.expert_scale = (nn.Parameter(torch.ones(n)) for n in (config.n_embd, config.n_expert))

    def forward(self, x: Tensor, token_mask: Tensor | None = None, normed: Tensor | None = None) -> Any:
        """As :class:`LLaMAMoE`. x is the residual stream; ``normed``, (B, T, n_embd), is the input of the dense MLP."""
        assert normed is not None and self.shared_expert is not None
        probabilities, weights, topk_indices = self._route(x)
        y = self.post_experts_norm(self.mix(self.experts_norm(x), weights, topk_indices))
        y = self.post_dense_norm(self.shared_expert(normed)) + y
        return y if token_mask is None else (y, load_balancing_loss(probabilities, topk_indices, token_mask))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.gate_norm(x) * self.gate_scale * self.gate_scale.numel() ** -0.5
        probabilities, weights, topk_indices = super()._route(x)
        return probabilities, weights * self.expert_scale[topk_indices], topk_indices


class Gemma4Block(Block):
    """A block with post-norms. It may reuse another layer's keys and values, and may take a per-layer input."""

    layer_scalar: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        sizes, options = config.layer(layer), config.family_options or {}
        super().__init__(sizes, layer)
        sources = find_sources(config)
        self.shares = layer in sources.values()
        self.attn = Gemma4Attention(sizes, config.n_attention_parts(layer))
        width = config.intermediate_size * (2 if layer in sources and options["double_wide_mlp"] else 1)
        self.mlp = Gemma4MoE(config, width) if self.has_experts else GemmaMLP(config, width)
        if size := options["per_layer_size"]:
            self.per_layer_gate = nn.Linear(config.n_embd, size, bias=False)
            self.per_layer_proj = nn.Linear(size, config.n_embd, bias=False)
            self.post_per_layer_norm = make_norm(config)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        x: Tensor,
        attn_mask: Any,
        rope: RotaryEmbedding | None,
        cache: LayerCache | None = None,
        token_mask: Tensor | None = None,
        kv_source: Tensor | None = None,
        dropout_bits: Tensor | None = None,
        per_layer_input: Tensor | None = None,
        shared: KeysAndValues | None = None,
    ) -> Any:
        """(B, T, n_embd) -> (B, T, n_embd), the balancing loss or None, and the keys and values to share or None.

        ``per_layer_input``: (B, T, per_layer_size). ``shared``: keys and values of the layer that shares them.
        """
        assert kv_source is None and rope is not None and self.norm_2 is not None
        if not torch.compiler.is_compiling():  # see Block
            self.dropout_bits.tokens = dropout_bits
        y, keys_and_values = self.attn(self.norm_1(x), attn_mask, rope, cache, shared)
        x = x + self.post_attention_norm(y)
        normed, balancing_loss = self.norm_2(x), None
        y = self.mlp(x, token_mask, normed) if self.has_experts else self.mlp(normed)
        if isinstance(y, tuple):
            y, balancing_loss = y
        x = x + self.post_mlp_norm(y)
        if per_layer_input is not None:
            y = F.gelu(self.per_layer_gate(x), approximate="tanh") * per_layer_input
            x = x + self.post_per_layer_norm(self.per_layer_proj(y))
        return x * self.layer_scalar.to(x.dtype), balancing_loss, keys_and_values if self.shares else None


class Gemma4(GPT):
    """See the module's docstring."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, **options)
        sizes: Fields = config.family_options or {}
        if size := sizes["per_layer_size"]:
            width, after = config.n_layer * size, {name: self.transformer.pop(name) for name in ("h", "ln_f")}
            self.transformer["wte_per_layer"] = nn.Embedding(sizes["per_layer_vocab_size"], width)
            self.transformer["per_layer_proj"] = nn.Linear(config.n_embd, width, bias=False)
            self.transformer["per_layer_norm"] = make_norm(config, size)
            self.transformer.update(after)  # in the order of the forward pass

    def make_block(self, config: ModelConfig, layer: int) -> Block:
        return Gemma4Block(config, layer)

    def embed(self, input_ids: Tensor, *args: Any, **options: Any) -> tuple[Tensor, BlockInputs]:
        """See :meth:`GPT.embed`."""
        x, inputs = super().embed(input_ids, *args, **options)
        if "wte_per_layer" in self.transformer:
            inputs = inputs._replace(per_layer=self._per_layer_inputs(input_ids, x))
        return x, inputs

    def _per_layer_inputs(self, input_ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return the input of each layer, (B, T, per_layer_size), from the tokens and their embeddings x."""
        parts, shape = self.transformer, (self.config.n_layer, -1)
        tokens = parts["wte_per_layer"](input_ids).unflatten(-1, shape)
        tokens = tokens * torch.full((), tokens.size(-1) ** 0.5, dtype=tokens.dtype, device=x.device)  # rounded
        context = parts["per_layer_proj"](x) * self.config.n_embd**-0.5
        context = parts["per_layer_norm"](context.unflatten(-1, shape))
        return ((context + tokens) * 2**-0.5).unbind(2)

    def run_blocks(
        self, x: Tensor, layers: range, inputs: BlockInputs, kv_source: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """See :meth:`GPT.run_blocks`. Keys and values are shared within the pass, never stored in a module."""
        balancing_losses: list[Tensor] = []
        shared: dict[int | None, KeysAndValues] = {}
        for i in layers:
            window = self.config.window(i)
            x, balancing_loss, keys_and_values = self.run_block(
                i,
                x,
                inputs,
                per_layer_input=None if inputs.per_layer is None else inputs.per_layer[i],
                shared=shared[window] if i >= self.config.n_cached_layer else None,
            )
            if balancing_loss is not None:
                balancing_losses.append(balancing_loss)
            if keys_and_values is not None:
                shared[window] = keys_and_values
        return x, balancing_losses
