"""The Lion optimizer: sign of the momentum."""

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion moves each weight by the learning rate, in the direction of the sign of the averaged gradient.

    With gradient g and momentum m (Chen et al. 2023, arXiv 2302.06675, algorithm 2):

        w <- w - lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * w)
        m <- b2 * m + (1 - b2) * g

    The state is one number per weight; Adam's is two. Use a learning rate 3 to 10 times smaller than Adam's, and a
    weight decay larger by the same factor. Each weight is updated independently, so FSDP is supported.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: b1 and b2.
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: A beta is not in [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas}: must be from 0 (inclusive) to 1 (exclusive)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for weight in (p for p in group["params"] if p.grad is not None):
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"]
                update = momentum.lerp(weight.grad, 1 - beta1).sign_()
                weight.mul_(1 - lr * group["weight_decay"]).sub_(update, alpha=lr)
                momentum.lerp_(weight.grad, 1 - beta2)
        return loss
