"""Adafactor for weights that are sharded by rows."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.distributed.shards import largest_shard, sharding_of
from toolkit.optim.bf16 import chunks


class ShardedAdafactor(torch.optim.Adafactor):
    """torch's Adafactor with the statistics of the unsharded weights.

    Row statistics belong to a shard. Column statistics, the mean of the row statistics, and the norms of weights and
    updates are summed over the shard group: two all-reduces per chunk of weights.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. ``closure`` is not supported."""
        assert closure is None
        for group in self.param_groups:
            weights = [_Weight(p, self.state[p], group) for p in group["params"] if p.grad is not None]
            for part in chunks(weights, lambda weight: largest_shard(weight.tensor)):
                _update(part)


@dataclass(frozen=True)
class _Weight:
    """A weight or its shard on this rank."""

    tensor: Tensor
    state: dict[str, Any]
    options: dict[str, Any]

    @property
    def shape(self) -> torch.Size:
        """Shape of the unsharded weight."""
        sharding = sharding_of(self.tensor)
        return self.tensor.shape if sharding is None else sharding.shape

    @property
    def gradient(self) -> Tensor:
        gradient = self.tensor.grad
        assert gradient is not None
        return -gradient if self.options["maximize"] else gradient

    @property
    def eps(self) -> float:
        eps: float | None = self.options["eps"][0]
        return torch.finfo(self.tensor.dtype).eps if eps is None else eps

    @property
    def beta(self) -> float:
        """1 minus the decay rate of the statistics."""
        return float(self.state["step"]) ** self.options["beta2_decay"]

    def begin_step(self) -> None:
        """Create the state in the first step, and count the step."""
        if not self.state:
            gradient, shape = self.gradient, self.tensor.shape
            self.state["step"] = torch.tensor(0.0)
            if gradient.ndim > 1:
                self.state["row_var"] = gradient.new_zeros(*shape[:-1], 1)
                self.state["col_var"] = gradient.new_zeros(*shape[:-2], 1, shape[-1])
            else:
                self.state["variance"] = torch.zeros_like(gradient)
        self.state["step"] += 1

    def statistics(self) -> Tensor:
        """Return the square of the weight's norm and, for a matrix, its row and column statistics, in fp32.

        They add up over the shards.
        """
        gradient, norm = self.gradient, self.tensor.float().norm().square().view(1)
        if gradient.ndim < 2:
            return norm
        row_mean = gradient.norm(dim=-1, keepdim=True).square_().div_(gradient.shape[-1])
        row_var: Tensor = self.state["row_var"].lerp_(row_mean, self.beta)
        if gradient.ndim > 2:  # the matrices of a stack are not divided
            return norm
        return torch.cat([norm, row_var.float().sum().view(1), gradient.norm(dim=-2).float().square_()])

    def direction(self, statistics: Tensor) -> Tensor:
        """Return the update before clipping, from the summed statistics."""
        gradient, state = self.gradient, self.state
        if gradient.ndim < 2:
            variance = state["variance"].lerp_(gradient.square(), self.beta).clone()
        else:
            row_var, n_rows = state["row_var"], gradient.shape[-2] if gradient.ndim > 2 else self.shape[0]
            columns = (
                statistics[2:].view(1, -1) if gradient.ndim == 2 else gradient.norm(dim=-2, keepdim=True).square_()
            )
            state["col_var"].lerp_((columns / n_rows).to(row_var.dtype), self.beta)
            mean = row_var.mean(dim=-2, keepdim=True) if gradient.ndim > 2 else statistics[1] / n_rows
            variance = (row_var @ state["col_var"]).div_(mean.clamp(min=self.eps))
        return variance.clamp_(min=self.eps**2).rsqrt_().mul_(gradient)


def _update(weights: list[_Weight]) -> None:
    for weight in weights:
        weight.begin_step()
    statistics = _sum(weights, [weight.statistics() for weight in weights])
    norms = torch.stack([part[0] for part in statistics]).tolist()
    updates = [weight.direction(part) for weight, part in zip(weights, statistics, strict=True)]
    squares = _sum(weights, [update.float().norm().square().view(1) for update in updates])
    update_norms = torch.cat(squares).tolist()
    for weight, update, norm, update_norm in zip(weights, updates, norms, update_norms, strict=True):
        options, numel = weight.options, max(1, weight.shape.numel())  # a new state is made from this rank's rows
        rho = min(options["lr"], 1 / math.sqrt(float(weight.state["step"])))
        alpha = max(options["eps"][1], math.sqrt(norm / numel)) * rho
        clipping = max(1.0, math.sqrt(update_norm / numel) / options["d"])
        weight.tensor.mul_(1 - options["lr"] * options["weight_decay"])
        weight.tensor.add_(update, alpha=-alpha / clipping)


def _sum(weights: list[_Weight], values: list[Tensor]) -> list[Tensor]:
    """Sum the values of sharded weights over their shard group, with one all-reduce."""
    shardings = [sharding_of(weight.tensor) for weight in weights]
    sharded = [i for i, sharding in enumerate(shardings) if sharding is not None]
    if sharded:
        sharding = shardings[sharded[0]]
        assert sharding is not None
        flat = torch.cat([values[i] for i in sharded]).to(sharding.device)
        dist.all_reduce(flat, group=sharding.group)
        sums = flat.to(values[0].device).split([values[i].numel() for i in sharded])
        values = list(values)
        for i, total in zip(sharded, sums, strict=True):
            values[i] = total
    return values
