"""Log how often Lion's momentum and the gradients have the same sign."""

from typing import Any

import torch

import toolkit
from toolkit.distributed.ranks import sum_over_ranks


class MomentumAgreement(toolkit.Callback):
    """Adds the column ``momentum_agreement``: the fraction of weights whose momentum and gradient have the same sign.

    A value near 0.5 indicates noise; a larger batch or a smaller learning rate may help. Empty in the first step.
    """

    columns = ("momentum_agreement",)

    def __init__(self) -> None:
        self.counts: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer: Any) -> None:
        """Count on this rank, which has only its shards under FSDP."""
        state = trainer.optimizer.optimizer.state
        weights = map(toolkit.shard_of, trainer.model.parameters())
        pairs = [(p.grad, state[p]["momentum"]) for p in weights if p.grad is not None and state[p]]
        same = sum(((gradient * momentum) > 0).sum() for gradient, momentum in pairs)
        self.counts = torch.tensor([float(same), float(sum(gradient.numel() for gradient, _ in pairs))])

    def on_log(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Sum the counts over all ranks, which all call this at the same step."""
        if self.counts is None:  # before the first step
            return
        same, count = sum_over_ranks(self.counts.to(trainer.fabric.device)).tolist()
        if count:
            metrics["momentum_agreement"] = same / count
