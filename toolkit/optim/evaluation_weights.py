"""Averaged weights, which validation, samples and checkpoints use in place of the trained ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from toolkit.optim.bf16 import MASTER, chunks

AVERAGE, TRAINED = "average", "trained"
"""Optimizer state keys in a checkpoint: of a weight's fp32 average if the weight itself cannot hold it, and of the
trained weight."""


class EvaluationWeights:
    """Exchanges the trained weights of a run for averaged ones.

    The averages are an exponential moving average of the weights after each update (an fp32 copy of each), or belong to
    an optimizer with ``train()`` and ``eval()`` that set the weights, such as schedule-free ones. Otherwise nothing is
    exchanged.

    Args:
        optimizer: The optimizer before Fabric wraps it.
        decay: Decay rate of the moving average per step; None for none.
    """

    def __init__(self, optimizer: Optimizer, decay: float | None = None) -> None:
        self._optimizer: Any = optimizer
        self._decay, self._sets_weights = decay, sets_weights(type(optimizer))
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._averages: dict[Tensor, Tensor] = {}
        self._depth = 0
        begin_training(optimizer)

    @torch.no_grad()
    def update(self, fault: Tensor | None = None) -> None:
        """Update the averages after an optimizer step. They begin with the weights after the first one.

        ``fault`` is a scalar on the device, which the host has not read: 1 leaves the averages as they are.
        """
        if self._decay is None:
            return
        average = get_ema_multi_avg_fn(self._decay)
        for part in chunks(self._parameters, Tensor.numel):
            weights = [self._weight(p).float() for p in part]
            if part[0] in self._averages and fault is not None:
                share = (1 - self._decay) * (1 - fault)
                for parameter, weight in zip(part, weights, strict=True):
                    self._averages[parameter].lerp_(weight, share)
            elif part[0] in self._averages:
                average([self._averages[p] for p in part], weights, 0)
            else:
                self._averages |= zip(part, [weight.clone() for weight in weights], strict=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model has the averaged weights. May be nested.

        The optimizer's state has the trained weights, so a checkpoint that is taken in this context holds both.
        """
        self._depth += 1
        try:
            if self._depth == 1:
                self._exchange()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.restore()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter in self._parameters if self._sets_weights else self._averages:
            state, weight = self._optimizer.state[parameter], self._weight(parameter)
            average = self._averages.get(parameter, weight)
            if average is weight or average.dtype != weight.dtype:
                state[TRAINED] = weight.clone()
                state |= {} if average is weight else {AVERAGE: average}
            else:
                state[TRAINED], average = _swap(weight, average), weight
            parameter.copy_(average)
        if self._sets_weights:
            self._optimizer.eval()

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the trained weights in the optimizer's state, which may be from a checkpoint."""
        begin_training(self._optimizer)
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            if (trained := state.pop(TRAINED, None)) is None:
                continue
            if self._decay is not None:
                weight, average = self._weight(parameter), state.pop(AVERAGE, None)
                self._averages[parameter] = _swap(weight, trained) if average is None else average
                trained = weight if average is None else trained
            parameter.copy_(trained)

    def _weight(self, parameter: Tensor) -> Tensor:
        """Return the fp32 copy of a weight, if the optimizer has one, else the weight."""
        weight: Tensor = self._optimizer.state.get(parameter, {}).get(MASTER, parameter)
        return weight.detach()


def sets_weights(cls: type[Optimizer]) -> bool:
    """Whether an optimizer of this class sets the weights to averages in ``eval()``, and back in ``train()``."""
    return all(callable(getattr(cls, name, None)) for name in ("train", "eval"))


def begin_training(optimizer: Any) -> None:
    """Let an optimizer that sets the weights to averages make steps."""
    if sets_weights(type(optimizer)):
        optimizer.train()


def _swap(weight: Tensor, other: Tensor) -> Tensor:
    """Exchange the values of two tensors in place. Returns ``other``."""
    values = weight.clone()
    weight.copy_(other)
    return other.copy_(values)
