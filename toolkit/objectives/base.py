"""The interface of an objective: sums over the global batch, each divided by a count that depends only on the data.

The loss of a step is ``sum(part.weight * sums[part.name] / counts[part.normalizer])``. The counts of a micro-batch come
from its collation and are summed over the ranks before the forward pass. The loss scale is therefore known before the
backward pass, and the gradient does not depend on the split into micro-batches and ranks (N2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from toolkit.errors import UserError
from toolkit.models.labels import TOKENS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.loader import Batch

LOSS = "loss"


class Part(NamedTuple):
    """A sum that an objective computes.

    Args:
        name: The part is logged as a column of this name; ``loss`` is the objective's only part, or the total.
        normalizer: The count that divides the sum.
        weight: In the loss; a part with weight 0 is only logged.
    """

    name: str
    normalizer: str = TOKENS
    weight: float = 1.0


class Objective(ABC):
    """A training objective. The fields of a subclass, a dataclass, are options: ``--objective NAME --objective.FIELD``.

    Attributes:
        normalizers: The counts of a micro-batch that the parts name.
        is_likelihood: The loss is the negative log-likelihood per supervised token, in nats.
    """

    normalizers: ClassVar[tuple[str, ...]] = (TOKENS,)
    is_likelihood: ClassVar[bool] = False

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """Return the sums that the objective may compute for a model. ``sums`` returns every one with a weight."""
        return (Part(LOSS),)

    def count(self, batch: Batch) -> dict[str, int]:
        """Return the normalizers of a micro-batch but :data:`TOKENS`, its supervised tokens. Filler rows count 0."""
        return {}

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Return the sums of a micro-batch by part, fp32 scalars; the same parts on all ranks.

        Call ``model``, wrapped by the strategy, once, with :func:`toolkit.objectives.inputs.forward_inputs`. A model's
        ``forward(..., labels=labels, log_probs=True)`` returns the log-probabilities of the labels (M1).
        """


def checked_parts(objective: Objective, module: nn.Module) -> tuple[Part, ...]:
    """Return the parts; raise UserError if a normalizer is unknown."""
    parts = objective.parts(module)
    for part in parts:
        if part.normalizer not in objective.normalizers:
            known = ", ".join(objective.normalizers)
            raise UserError(
                f"objective {type(objective).__name__}: part {part.name}: normalizer {part.normalizer!r}: must be one "
                f"of normalizers: {known}"
            )
    return parts


def total_counts(objective: Objective, batches: Iterable[Batch]) -> dict[str, int]:
    """Return the normalizers of micro-batches; raise UserError if ``count`` does not return one."""
    totals = dict.fromkeys(objective.normalizers, 0)
    for batch in batches:
        for name in totals:
            if name not in batch.counts:
                raise UserError(f"objective {type(objective).__name__}: count() must return {name!r}, a normalizer")
            totals[name] += batch.counts[name]
    return totals


def scales(parts: tuple[Part, ...], counts: Mapping[str, int], loss_ranks: int = 1) -> dict[str, float]:
    """Return the factors of the sums in the loss, for gradients that are averaged over ``loss_ranks`` ranks."""
    return {p.name: p.weight * (loss_ranks / max(1, counts[p.normalizer])) for p in parts if p.weight}


def means(
    parts: tuple[Part, ...], sums: Mapping[str, float], counts: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the loss, and the mean of each further part."""
    values = {p.name: sums[p.name] / max(1, counts[p.normalizer]) for p in parts if p.name in sums}
    loss = sum(p.weight * values[p.name] for p in parts if p.weight)
    return loss, {name: value for name, value in values.items() if name != LOSS}
