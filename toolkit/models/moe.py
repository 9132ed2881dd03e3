"""Experts: an MLP of which a router chooses a part for each token (Shazeer et al. 2017, Jiang et al. 2024: Mixtral).

No token is dropped. The tokens are sorted by expert, so that all experts are three grouped matrix products, and put
back in their order. Both are permutations, whose gradients are permutations again: nothing is added up in an order
that chance decides, nothing waits for the device.

| name | shape |
|---|---|
| ``mlp.gate.weight`` (the router) | (n_expert, n_embd) |
| ``mlp.experts.fc_1.weight``, ``mlp.experts.fc_2.weight`` | (n_expert, moe_intermediate_size, n_embd) |
| ``mlp.experts.proj.weight`` | (n_expert, n_embd, moe_intermediate_size) |
| ``mlp.gate.bias``, ``mlp.experts.*.bias`` | where the config has biases: (n_expert,), (n_expert, out) |
| ``mlp.correction`` (no parameter: training leaves it alone) | with sigmoid scores: (n_expert,), always fp32 |
| ``mlp.shared_expert.fc_1.weight`` (``fc_2``, ``proj``), ``mlp.shared_expert_gate.weight`` | a LLaMAMLP; (1, n_embd) |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.models.config import ModelConfig
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.mlp import LLaMAMLP


# Operators of our own, because torch (2.13) lets grouped_mm into compiled code in bf16 only.
@torch.library.custom_op("toolkit::grouped_product", mutates_args=())
def grouped_product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(N, a), (experts, a, b) -> (N, b): the rows from ends[e - 1] to ends[e], (experts,) int32, times weights[e]."""
    return F.grouped_mm(x, weights, offs=ends)


@torch.library.custom_op("toolkit::grouped_outer_product", mutates_args=())
def grouped_outer_product(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(N, a) and (N, b) -> (experts, a, b): x.T @ y over the rows of each expert, zeros where it has none."""
    return F.grouped_mm(x.t(), y, offs=ends)


@grouped_product.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.size(0), weights.size(2))


@grouped_outer_product.register_fake
def _(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.size(0), x.size(1), y.size(1))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    x, weights, ends = inputs
    is_trained = ctx.needs_input_grad[1]
    ctx.save_for_backward(x if is_trained else None, weights, ends)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, weights, ends = ctx.saved_tensors
    gradient, of_x, of_weights = gradient.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        of_x = grouped_product(gradient, weights.transpose(-2, -1), ends)
    if ctx.needs_input_grad[1]:  # laid out as the parameter is, of which the weights are the transpose
        of_weights = grouped_outer_product(gradient, x, ends).transpose(-2, -1)
    return of_x, of_weights, None


grouped_product.register_autograd(_gradients, setup_context=_keep)


class StackedLinear(nn.Module):
    """One linear layer per expert, in one parameter (experts, out, in), and the biases in one (experts, out).

    Args:
        n_expert: How many.
        in_features: A multiple of 8, as ``out_features``: rows must begin at multiples of 16 bytes.
        out_features: See there.
        active: How many of them each token goes through.
    """

    def __init__(self, n_expert: int, in_features: int, out_features: int, active: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(n_expert, out_features)) if bias else None
        self.active = active
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(N, in) -> (N, out): expert e takes the rows from ends[e - 1] to ends[e], (experts,) int32."""
        y = grouped_product(x, self.weight.to(x.dtype).transpose(-2, -1), ends)
        if self.bias is None:
            return y
        # A product, too: its gradient adds up the rows in an order that is always the same. 8 is the least width.
        ones = F.pad(x.new_ones(x.size(0), 1), (0, 7))
        return y + grouped_product(ones, F.pad(self.bias.to(x.dtype).unsqueeze(1), (0, 0, 0, 7)), ends)


_TINY = 1e-20  # sigmoids may all be zero
_ALPHA = 1.702  # with it, x * sigmoid(alpha x) is near gelu(x)


class Experts(nn.Module):
    """As many SwiGLU MLPs: proj(silu(fc_1(x)) * fc_2(x)) each, or with the clamped product of gpt-oss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n, active = config.n_expert, config.n_expert_per_token
        self.fc_1 = StackedLinear(n, config.n_embd, config.expert_size, active, config.bias)
        self.fc_2 = StackedLinear(n, config.n_embd, config.expert_size, active, config.bias)
        self.proj = StackedLinear(n, config.expert_size, config.n_embd, active, config.bias)
        self.limit = config.swiglu_limit

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """(N, n_embd) tokens and (N, k) their experts -> (N, k, n_embd): what each of them says."""
        experts, order = chosen.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        numbers = torch.arange(self.fc_1.weight.size(0), device=order.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        x = _SortedCopies.apply(x, order, inverse)
        y = self.proj(self._gated(self.fc_1(x, ends), self.fc_2(x, ends)), ends)
        return _Permuted.apply(y, inverse, order).view(*chosen.shape, -1)

    def _gated(self, gate: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self.limit is None:
            return F.silu(gate) * other
        gate, other = gate.clamp(max=self.limit), other.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(_ALPHA * gate) * (other + 1)


def type_of(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type that a weight of that name has in a model whose others are of ``dtype`` (None: as they are).

    A router's correction is fp32 always: its scores lie closer together than 16 bits can tell apart.
    """
    return torch.float32 if name.endswith(".mlp.correction") else dtype


class LLaMAMoE(nn.Module):
    """The sum of what the chosen experts say of a token, weighted by the router's scores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_expert_per_token, self.norm_topk_prob = config.n_expert_per_token, config.norm_topk_prob
        self.n_groups, self.n_topk_groups = config.n_expert_groups, config.n_topk_groups
        self.scaling = config.routed_scaling_factor
        self.gate = nn.Linear(config.n_embd, config.n_expert, bias=config.bias)
        self.experts = Experts(config)
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_expert_intermediate_size is not None:
            self.shared_expert = LLaMAMLP(config, config.shared_expert_intermediate_size)
            if config.shared_expert_gate:
                self.shared_expert_gate = nn.Linear(config.n_embd, 1, bias=config.bias)
        correction = torch.zeros(config.n_expert, dtype=torch.float32) if config.router_scores == "sigmoid" else None
        self.register_buffer("correction", correction)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LLaMAMoE:
        """Every change of type or device goes through here; the correction follows to the device only."""
        before = self.correction
        super()._apply(fn, recurse)
        if before is not None and self.correction.dtype != before.dtype:
            self.correction = before.to(self.correction.device)
        return self

    def forward(
        self, x: torch.Tensor, counted: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(B, T, n_embd) -> (B, T, n_embd); with ``counted`` (B, T) also the rows' :func:`imbalance`, (B,)."""
        probabilities, weights, chosen = self._route(x)
        said = self.experts(x.to(_product_dtype(x)).flatten(0, -2), chosen.flatten(0, -2))  # (B * T, k, n_embd)
        y = torch.bmm(weights.flatten(0, -2).unsqueeze(1).to(said.dtype), said).view(x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            y = y + (shared if self.shared_expert_gate is None else torch.sigmoid(self.shared_expert_gate(x)) * shared)
        return y if counted is None else (y, imbalance(probabilities, chosen, counted))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, T, n_embd) -> the experts' probabilities (B, T, n_expert), weights and numbers of the chosen (B, T, k).

        Scores, weights and probabilities are fp32.
        """
        if self.correction is None:
            probabilities = scores = choice = self.gate(x).float().softmax(-1)
        else:  # fp32 all the way, as these models were trained: unlike a softmax's, these scores all lie close together
            with torch.autocast(x.device.type, enabled=False):
                bias = None if self.gate.bias is None else self.gate.bias.float()
                scores = F.linear(x.float(), self.gate.weight.float(), bias).sigmoid()
            choice, probabilities = scores + self.correction, scores / scores.sum(-1, keepdim=True)
        chosen = self._within_groups(choice).topk(self.n_expert_per_token).indices
        weights = scores.gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return probabilities, weights * self.scaling, chosen

    def _within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Rule out the experts of all but the best groups (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).

        A group is as good as its best expert, with sigmoid scores as its best two together (DeepSeek-V3).
        """
        if self.n_groups is None:
            return choice
        groups = choice.unflatten(-1, (self.n_groups, -1))
        best = groups.topk(1 if self.correction is None else 2).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(self.n_topk_groups).indices, True)
        return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    """That of matrix products with x, also under autocast, which does not know grouped ones."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else x.dtype


def imbalance(probabilities: torch.Tensor, chosen: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """How unevenly each row uses its experts: n_expert * sum over e of f_e * P_e, which is k when it is even.

    f_e is the share of the row's tokens that go to e, P_e the mean of its probability; the gradient is P's alone. So
    have Switch Transformers (Fedus et al. 2021, eq. 4 to 6) and transformers' ``load_balancing_loss_func``, over a
    whole batch; here as in DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20, where f is divided by k) over each row, so
    that nothing depends on which rows are computed together. Documents packed into a row count as one.

    Args:
        probabilities: (B, T, n_expert), of all experts, fp32.
        chosen: (B, T, k), the experts that the tokens go to.
        counted: (B, T), bool: the tokens that count. A row with none has 0.

    Returns:
        (B,), fp32.
    """
    n = counted.sum(1, keepdim=True).clamp(min=1)
    used = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
    share = (used * counted.unsqueeze(-1)).sum(1) / n
    mean = (probabilities * counted.unsqueeze(-1)).sum(1) / n
    return probabilities.size(-1) * (share * mean).sum(-1)


def before_last_label(labels: torch.Tensor) -> torch.Tensor:
    """(B, T) -> (B, T), bool: the tokens up to the last one that is supervised in each row.

    What comes after them, padding above all, cannot change any loss: attention is causal.
    """
    supervised = (labels != IGNORE_INDEX).int()
    return supervised.flip(1).cumsum(1).flip(1) > 0


class _SortedCopies(torch.autograd.Function):
    """(N, d) -> (N * k, d): k copies of each row, in the order of ``order``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = len(order) // len(x)
        return x[order // ctx.copies]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].view(-1, ctx.copies, gradient.size(1)).sum(1), None, None


class _Permuted(torch.autograd.Function):
    """x[order]; plain indexing would add up its gradient row by row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None
