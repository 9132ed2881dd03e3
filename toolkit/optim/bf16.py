"""Updates in fp32 of weights and moments that are stored in bf16; weights have an fp32 master copy in the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from toolkit.private_torch import copy_

MASTER = "master"
"""Key of the fp32 copy of a bf16 weight in the optimizer state. Checkpoints save it as the weight, and only there."""
ROUNDING = "rounding"
"""Seed of the last stochastic rounding of a parameter's moments; in the state, so that a resume is bit-equal."""
SEED_STEP = 2654435761
"""Distance of the first seeds of two parameters: a prime near 2^32 divided by the golden ratio. A CPU generator uses
only the lower 32 bits of a seed; the seeds of 1,000 parameters are a million steps apart."""
UPDATE_CHUNK = 2**27
"""Elements of bf16 tensors that an optimizer step holds in fp32 at once; or one parameter, if larger."""


class Sized(Protocol):
    def numel(self) -> int:
        """Return the number of elements."""


T = TypeVar("T", bound=Sized)


class BF16Optimizer(torch.optim.Optimizer):
    """Gives fp32 tensors, in place of the stored bf16 ones, to an optimizer that updates each weight independently.

    With ``has_masters`` the optimizer updates an fp32 copy of each weight, ``state[weight]["master"]``, as it would
    update fp32 weights with the same gradients, and the weight is that copy, rounded. Gradients in bf16 are cast for
    some weights at a time, so that no second copy of all of them exists.

    With ``has_bf16_moments`` the parts of the state that have the weight's shape are stored in bf16, rounded
    stochastically: rounding to the nearest would discard updates below 1/256 of the value, which are most updates
    of a moment with a decay rate of 0.999. Random numbers depend on weight and step only: all ranks draw the same.

    Args:
        inner: One of torch's optimizers, or of :mod:`toolkit.optim.hybrid`, over the weights.
        has_masters: Whether the weights are bf16.
        has_bf16_moments: Whether to store the moments in bf16.

    Attributes:
        divisor: Divides the gradients in the next step; fp32, None: 1.
    """

    def __init__(self, inner: torch.optim.Optimizer, *, has_masters: bool, has_bf16_moments: bool) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner, self.has_masters, self._has_bf16_moments = inner, has_masters, has_bf16_moments
        self.divisor: Tensor | None = None
        self._indices = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. ``closure`` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameters in chunks([p for p in group["params"] if p.grad is not None]):
                self._update(group, parameters)
        self.divisor = None

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        targets = [self._master(p) for p in parameters] if self.has_masters else parameters
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for parameter, target in zip(parameters, targets, strict=True):
            if self.has_masters:
                assert parameter.grad is not None
                target.grad = parameter.grad.float()
                if self.divisor is not None:
                    target.grad.div_(self.divisor.to(target.device))
            stored = self.state[parameter]
            if any(key not in (MASTER, ROUNDING) for key in stored):  # otherwise this is the first step
                states[target] = {k: self._to_fp32(v) for k, v in stored.items() if k not in (MASTER, ROUNDING)}
        self._inner.param_groups, self._inner.state = [{**group, "params": targets}], states
        self._inner.step()
        for parameter, target in zip(parameters, targets, strict=True):
            self._store(parameter, states.get(target, {}))
        if self.has_masters:
            for target in targets:
                target.grad = None
            copy_(parameters, targets)

    def _master(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if MASTER not in state:
            state[MASTER] = parameter.detach().float()
        return state[MASTER]

    def _to_fp32(self, value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    def _store(self, parameter: Tensor, values: dict[str, Any]) -> None:
        """Store the inner optimizer's state of a weight in this optimizer's."""
        stored = self.state[parameter]
        generator = self._generator(parameter) if self._has_bf16_moments else None
        for key, value in values.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == torch.float32
            if generator is None or not is_moment:
                stored[key] = value
            elif key in stored:
                stored[key].copy_(round_stochastically(value, generator))
            else:
                stored[key] = round_stochastically(value, generator)

    def _generator(self, parameter: Tensor) -> torch.Generator:
        """Return a generator of random numbers that differ from step to step and from weight to weight.

        They do not depend on the other weights of the step, because ``in_backward`` updates each weight alone.
        """
        state = self.state[parameter]
        # a copy of a weight, on resume, is not among the indices: its seed is replaced by the saved one
        state[ROUNDING] = state.get(ROUNDING, SEED_STEP * self._indices.get(parameter, 0)) + 1
        return torch.Generator(device=parameter.device).manual_seed(state[ROUNDING])


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values to one of the two nearest bf16 values, with probabilities whose mean is the value itself.

    bf16 is the upper half of fp32: a random number below 2^16 carries into it with the probability that the lower half
    is of 2^16. NaN and Inf stay.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def chunks(parameters: Iterable[T], limit: int = UPDATE_CHUNK) -> Iterator[list[T]]:
    """Yield the parameters in parts of at most ``limit`` elements, or of one parameter."""
    part: list[T] = []
    for parameter in parameters:
        if part and sum(p.numel() for p in part) + parameter.numel() > limit:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part
