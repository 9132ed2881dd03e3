"""Mixture of experts with top-k routing (Shazeer et al. 2017, Jiang et al. 2024: Mixtral).

No token is dropped. Tokens are sorted by expert, three grouped_mm calls compute all experts, and the outputs are
permuted back. All sums are deterministic: the backward pass of a permutation is a permutation.

| name | shape |
|---|---|
| ``mlp.gate.weight`` (the router) | (n_expert, n_embd) |
| ``mlp.experts.fc_1.weight``, ``mlp.experts.fc_2.weight`` | (n_expert, moe_intermediate_size, n_embd) |
| ``mlp.experts.proj.weight`` | (n_expert, n_embd, moe_intermediate_size) |
| ``mlp.gate.bias``, ``mlp.experts.*.bias`` | with biases: (n_expert,), (n_expert, out) |
| ``mlp.correction`` (e_score_correction_bias; a buffer, not trained) | sigmoid, biased_softmax: (n_expert,), fp32 |
| ``mlp.shared_expert.fc_1.weight`` (``fc_2``, ``proj``), ``mlp.shared_expert_gate.weight`` | a LLaMAMLP; (1, n_embd) |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.aligned import AlignedLinear, aligned_size
from toolkit.models.config import ModelConfig
from toolkit.models.lora_layers import AdaptedLayer, LoRALinear
from toolkit.models.mixed_mm import matmul_dtype
from toolkit.models.mlp import LLaMAMLP


# Custom operators, because torch (2.13) compiles grouped_mm in bf16 only.
@torch.library.custom_op("toolkit::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(N, a), (experts, a, b) -> (N, b): multiply rows ends[e - 1] to ends[e] by weights[e]; ends: (experts,) int32."""
    return F.grouped_mm(x, weights, offs=ends)


@torch.library.custom_op("toolkit::grouped_outer_product", mutates_args=())
def grouped_outer_product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """(N, a), (N, b) -> (experts, a, b): x.T @ y over each expert's rows; zero for an expert without rows."""
    return F.grouped_mm(x.t(), y, offs=ends)


@grouped_product.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.size(0), weights.size(2))


@grouped_outer_product.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.size(0), x.size(1), y.size(1))


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weights, ends = inputs
    is_trained = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if is_trained else None, weights, ends)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weights, ends = ctx.saved_tensors
    grad_output, grad_x, grad_weights = grad_output.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_product(grad_output, weights.transpose(-2, -1), ends)
    if ctx.needs_input_grad[1]:  # in the layout of the parameter, the transpose of weights
        grad_weights = grouped_outer_product(grad_output, x, ends).transpose(-2, -1)
    return grad_x, grad_weights, None


grouped_product.register_autograd(_backward, setup_context=_setup_context)


class LoRAStackedLinear(AdaptedLayer):
    """Adds an adapter per expert to :class:`StackedLinear`. No expert's product of factors is ever computed."""

    def forward(self, x: Tensor, ends: Tensor, tokens: Tensor | None = None) -> Tensor:
        """See :class:`StackedLinear`."""
        y: Tensor = super().forward(x, ends, tokens)
        if self.adapters_off:
            return y
        (adapter,) = self.adapters
        a, b = adapter.A.to(x.dtype), adapter.B.to(x.dtype)
        padding = -a.size(1) % 8  # of the rank, see StackedLinear
        hidden = grouped_product(self._drop(x, tokens), F.pad(a, (0, 0, 0, padding)).transpose(-2, -1), ends)
        return y + grouped_product(hidden * self.scaling, F.pad(b, (0, padding)).transpose(-2, -1), ends)

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight`` (experts, out, in) with the adapters merged, in fp32."""
        (adapter,) = self.adapters
        return torch.baddbmm(weight.float(), adapter.B.detach(), adapter.A.detach(), alpha=self.scaling)


class StackedLinear(nn.Module):
    """One linear layer per expert: stacked weights (experts, out, in) and biases (experts, out).

    Both widths must be multiples of 8: grouped_mm needs rows aligned to 16 bytes. ``active`` is the number of experts
    per token.
    """

    adapted_by = LoRAStackedLinear

    def __init__(self, n_expert: int, in_features: int, out_features: int, active: int, bias: bool = False) -> None:
        super().__init__()
        self.sizes = (n_expert, in_features, out_features, active)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(n_expert, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(n_expert, out_features)) if bias else None
        self.active_experts = active
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor, ends: Tensor, tokens: Tensor | None = None) -> Tensor:
        """(N, in) -> (N, out): expert e computes rows ends[e - 1] to ends[e]; ends: (experts,) int32.

        ``tokens``, (N,) int64, are the tokens of the rows, for adapters.
        """
        y = self.project(x, ends)
        if self.bias is None:
            return y
        # A matrix product sums the bias gradient deterministically. The minimum width is 8.
        ones = F.pad(x.new_ones(x.size(0), 1), (0, 7))
        return y + grouped_product(ones, F.pad(self.bias.to(x.dtype).unsqueeze(1), (0, 0, 0, 7)), ends)

    def project(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the output without the biases."""
        return grouped_product(x, self.weight.to(x.dtype).transpose(-2, -1), ends)


_EPS = 1e-20  # all sigmoid scores may be zero
_SWIGLU_ALPHA = 1.702  # x * sigmoid(alpha x) approximates gelu(x)


class Experts(nn.Module):
    """All experts of a layer: SwiGLU MLPs, proj(silu(fc_1(x)) * fc_2(x)), or gpt-oss's clamped SwiGLU."""

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n, active = config.n_expert, config.n_expert_per_token
        self.fc_1 = StackedLinear(n, config.n_embd, config.expert_size, active, config.bias)
        self.fc_2 = StackedLinear(n, config.n_embd, config.expert_size, active, config.bias)
        self.proj = StackedLinear(n, config.expert_size, config.n_embd, active, config.bias)
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor, topk_indices: Tensor) -> Tensor:
        """Tokens (N, n_embd) and expert indices (N, k) -> expert outputs (N, k, n_embd)."""
        experts, order = topk_indices.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        expert_ids = torch.arange(self.fc_1.sizes[0], device=order.device)
        ends = torch.searchsorted(experts, expert_ids, right=True, out_int32=True)
        k = topk_indices.size(-1)
        tokens = order // k
        x = _CopyAndPermute.apply(x, tokens, inverse, k)
        y = self._gated_product(self.fc_1(x, ends, tokens), self.fc_2(x, ends, tokens))
        y = self.proj(y, ends, tokens)
        return _CopyAndPermute.apply(y, inverse, order, 1).view(*topk_indices.shape, -1)

    def _gated_product(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(_SWIGLU_ALPHA * gate) * (up + 1)


class LLaMAMoE(nn.Module):
    """Mixture of experts: the sum of the top-k experts' outputs, weighted by the router."""

    may_be_unit = True  # of FSDP, by size or class

    correction: Tensor | None  # a buffer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_expert_per_token, self.norm_topk_prob = config.n_expert_per_token, config.norm_topk_prob
        self.n_groups, self.n_topk_groups = config.n_expert_groups, config.n_topk_groups
        self.scaling, self.has_sigmoid = config.routed_scaling_factor, config.router_scores == "sigmoid"
        self.gate = AlignedLinear(config.n_embd, config.n_expert, bias=config.bias)
        self.experts = Experts(config)
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_expert_intermediate_size is not None:
            self.shared_expert = LLaMAMLP(config, config.shared_expert_intermediate_size)
            if config.shared_expert_gate:
                self.shared_expert_gate = AlignedLinear(config.n_embd, 1, bias=config.bias)
        correction = torch.zeros(config.n_expert, dtype=torch.float32) if config.router_scores != "softmax" else None
        self.register_buffer("correction", correction)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LLaMAMoE:
        """Apply ``fn``, but keep the dtype of the correction bias."""
        before = self.correction
        super()._apply(fn, recurse)
        after = self.correction
        if before is not None and after is not None and after.dtype != before.dtype:
            self.correction = before.to(after.device)
        return self

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """(B, T, n_embd) -> (B, T, n_embd); with ``token_mask`` (B, T) also :func:`load_balancing_loss`, (B,)."""
        probabilities, weights, topk_indices = self._route(x)
        y = self.mix(x, weights, topk_indices)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            y = y + (shared if self.shared_expert_gate is None else torch.sigmoid(self.shared_expert_gate(x)) * shared)
        return y if token_mask is None else (y, load_balancing_loss(probabilities, topk_indices, token_mask))

    def mix(self, x: Tensor, weights: Tensor, topk_indices: Tensor) -> Tensor:
        """Return the sum of the experts' outputs for x, (B, T, n_embd), with the router's weights and indices."""
        outputs = self.experts(x.to(matmul_dtype(x)).flatten(0, -2), topk_indices.flatten(0, -2))  # (B * T, k, n_embd)
        weights = weights.flatten(0, -2).to(outputs.dtype)
        n, k = weights.shape
        if aligned_size(k, x.device, weights.dtype) == k:
            y = torch.bmm(weights.unsqueeze(1), outputs)
        elif self.training and n % 8 == 0 and not torch.compiler.is_compiling():
            # A product of 8 tokens with 8 k outputs has aligned rows, and less traffic than uncompiled operators. Zeros
            # spread NaN and infinity to other tokens, so not in generation, whose batches have unused rows.
            blocks = torch.diag_embed(weights.view(-1, 8, k).mT, 0, 1, 2).flatten(2)  # (n / 8, 8, 8 k)
            y = torch.bmm(blocks, outputs.view(len(blocks), 8 * k, -1))
        else:
            y = (weights.unsqueeze(2) * outputs).sum(1, dtype=weights.dtype)
        return y.view(x.shape)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, n_embd) -> router probabilities (B, T, n_expert), top-k weights and top-k indices (B, T, k).

        Scores, weights and probabilities are fp32.
        """
        if self.correction is None:
            probabilities = scores = choice = self.gate(x).float().softmax(-1)
        else:  # computed in fp32, as these models were trained: their scores are close together
            with torch.autocast(x.device.type, enabled=False):
                logits = self._fp32_logits(x.float())
                scores = logits.sigmoid() if self.has_sigmoid else logits.softmax(-1)
            choice, probabilities = scores + self.correction, scores / scores.sum(-1, keepdim=True)
        topk_indices = self._mask_groups(choice).topk(self.n_expert_per_token).indices
        weights = scores.gather(-1, topk_indices)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _EPS)
        return probabilities, weights * self.scaling, topk_indices

    def _fp32_logits(self, x: Tensor) -> Tensor:
        gate = self.gate
        logits = F.linear(x, gate.weight.float(), None if gate.bias is None else gate.bias.float())
        if isinstance(gate, LoRALinear) and not gate.adapters_off:
            logits = logits + F.linear(*gate.low_rank(x, torch.float32))
        return logits

    def _mask_groups(self, choice: Tensor) -> Tensor:
        """Mask the experts outside the top groups (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).

        A group's score is its best expert's score; with sigmoid scores, the sum of its best two (DeepSeek-V3).
        """
        if self.n_groups is None or self.n_topk_groups is None:
            return choice
        groups = choice.unflatten(-1, (self.n_groups, -1))
        group_scores = groups.topk(2 if self.has_sigmoid else 1).values.sum(-1)
        selected = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
            -1, group_scores.topk(self.n_topk_groups).indices, True
        )
        return groups.masked_fill(~selected.unsqueeze(-1), float("-inf")).flatten(-2)


def load_balancing_loss(probabilities: Tensor, topk_indices: Tensor, token_mask: Tensor) -> Tensor:
    """Return the load-balancing loss per row, n_expert * sum over e of f_e * P_e. It is k for a uniform load.

    f_e is the fraction of the row's tokens routed to expert e. P_e is the expert's mean probability; only P has a
    gradient. Switch Transformers (Fedus et al. 2021, eq. 4 to 6) and transformers' ``load_balancing_loss_func`` compute
    it over the complete batch. Here it is computed per row, independent of the batch, as in DeepSeek-V3 (arXiv
    2412.19437, eq. 17 to 20, where f is divided by k). Documents packed into a row count as one.

    Args:
        probabilities: Router probabilities, (B, T, n_expert), fp32.
        topk_indices: Expert indices of each token, (B, T, k).
        token_mask: Tokens to include, (B, T), bool. A row without any has loss 0.
    """
    n = token_mask.sum(1, keepdim=True).clamp(min=1)
    used = torch.zeros_like(probabilities).scatter_(-1, topk_indices, 1.0)
    share = (used * token_mask.unsqueeze(-1)).sum(1) / n
    mean = (probabilities * token_mask.unsqueeze(-1)).sum(1) / n
    return probabilities.size(-1) * (share * mean).sum(-1)


class _CopyAndPermute(torch.autograd.Function):
    """(N, d) -> (N * copies, d): take the rows ``order``, a permutation of ``copies`` copies of each.

    The backward pass is a gather; plain indexing would scatter-add the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad_output[inverse]
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.size(1)).sum(1)
        return grad, None, None, None
