"""Update bf16 weights and moments in fp32. Weights have an fp32 master copy in the optimizer state."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from toolkit.distributed.shards import largest_shard, sharding_of
from toolkit.private_torch import copy_

MASTER = "master"
"""Optimizer state key of a weight's fp32 master copy. Checkpoints save it as the weight, not in the state."""
ROUNDING = "rounding"
"""Optimizer state key of a parameter's last stochastic rounding seed. Saved for a bit-exact resume."""
SEED_STEP = 2654435761
"""Difference between the initial seeds of consecutive parameters: a prime near 2^32 divided by the golden ratio. A CPU
generator uses only the lower 32 bits of a seed; the seeds of 1,000 parameters are a million steps apart."""
UPDATE_CHUNK = 2**27
"""Maximum bf16 elements that an optimizer step converts to fp32 at once, or one parameter if larger."""


T = TypeVar("T")


class BF16Optimizer(torch.optim.Optimizer):
    """Wraps an optimizer that updates each weight independently, and gives it fp32 copies of bf16 tensors.

    With ``has_masters``, the optimizer updates an fp32 copy of each weight, ``state[weight]["master"]``. The weight is
    that copy, rounded. Gradients are cast one chunk of weights at a time, to avoid an fp32 copy of all of them.

    With ``has_bf16_moments``, state tensors with the weight's shape are stored in bf16 with stochastic rounding.
    Rounding to nearest would discard updates below 1/256 of the value: most updates of a moment with a decay rate of
    0.999. Random numbers depend only on weight, shard and step, so all replicas draw the same.

    Args:
        inner: An optimizer from torch or :mod:`toolkit.optim.hybrid`, over the weights.
        has_masters: Whether the weights are bf16.
        has_bf16_moments: Whether to store the moments in bf16.

    Attributes:
        divisor: fp32 scalar that divides the gradients in the next step; None does not divide.
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
            trained = [p for p in group["params"] if p.grad is not None]
            for parameters in chunks(trained, largest_shard):  # the same on every rank
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
        states.clear()  # the inner optimizer refers to it: fp32 moments would live until the next chunk's exist
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
        """Copy a weight's state from the inner optimizer to this one."""
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
        """Return a random generator with a different seed for each step and weight.

        The seed does not depend on the other weights, because ``in_backward`` updates one weight at a time.
        """
        state = self.state[parameter]
        # On resume, a copied weight is not in ``_indices``. The saved seed replaces its seed.
        state[ROUNDING] = state.get(ROUNDING, SEED_STEP * self._indices.get(parameter, 0)) + 1
        sharding = sharding_of(parameter)
        shard = 0 if sharding is None else SEED_STEP * len(self._indices) * sharding.rank
        return torch.Generator(device=parameter.device).manual_seed(state[ROUNDING] + shard)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values to bf16 stochastically, without bias.

    bf16 is the upper 16 bits of fp32. Adding a random integer below 2^16 carries into them with the probability
    (lower 16 bits) / 2^16. NaN and Inf are unchanged.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def chunks(parameters: Iterable[T], size: Callable[[T], float], limit: int = UPDATE_CHUNK) -> Iterator[list[T]]:
    """Yield the parameters in chunks of at most ``limit`` elements, or one parameter if larger.

    ``size`` returns a parameter's elements.
    """
    part: list[T] = []
    for parameter in parameters:
        if part and sum(map(size, part)) + size(parameter) > limit:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part
