"""Objective interface: sums over the global batch, each divided by a count that depends only on the data.

The loss of a step is ``sum(part.weight * sums[part.name] / counts[part.normalizer])``. The counts of a micro-batch come
from collation and are summed over the ranks before the forward pass. The loss scale is therefore known before the
backward pass, and the gradient does not depend on how the batch is split into micro-batches and ranks (N2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from toolkit.data.base import RowKind
from toolkit.errors import UserError
from toolkit.models.config_checks import HeadName
from toolkit.models.labels import TOKENS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.base import PreparedData
    from toolkit.data.batch import Batch

LOSS = "loss"


class Part(NamedTuple):
    """A term of the loss, or a logged metric.

    Args:
        name: Column name in the logs. ``loss`` names the objective's only part, or the total.
        normalizer: Name of the count to divide the sum by.
        weight: Weight in the loss; a part with weight 0 is only logged.
    """

    name: str
    normalizer: str = TOKENS
    weight: float = 1.0


class Objective(ABC):
    """A training objective. Subclasses are dataclasses with options as fields: ``--objective NAME --objective.FIELD``.

    Attributes:
        normalizers: Names of the counts that the parts use.
        is_likelihood: Whether the loss is the negative log-likelihood per supervised token, in nats.
        looks_ahead: Whether ``sums`` depends on other batches of the step.
        frozen_option: Option that names the checkpoint of a frozen model; "" if the objective needs none.
        frozen: This model, as the strategy wraps it; set in the copy of the objective that a run trains with.
        row_kind: What the objective needs a row of instruction data to be.
        rows_per_sample: Rows of a forward pass for each sample of a micro-batch.
        answers: Micro-batches that :meth:`begin_step` makes of each one in training.
        has_reference: Whether the loss compares with a reference model.
        head: The score layer that the objective trains; None trains a language model.
        higher_is_better: Whether the highest value is the best one, by part or metric, for ``--eval.best_by``.
        best_by: The part that ``--eval.best_by auto`` compares.
        gather_weights: Whether FSDP gathers all weights while :meth:`begin_step` generates.
        outputs: In a validation a list, to which ``sums`` may add what :meth:`metrics` needs; otherwise None.
        epochs, learning_rates: Defaults of the finetuning commands if the objective has its own; learning rates for
            adapters and for all weights.
    """

    normalizers: ClassVar[tuple[str, ...]] = (TOKENS,)
    is_likelihood: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    frozen_option: ClassVar[str] = ""
    frozen: Any = None
    has_reference: ClassVar[bool] = False
    row_kind: ClassVar[RowKind] = "answers"
    rows_per_sample: ClassVar[int] = 1
    answers: int = 1
    head: ClassVar[HeadName | None] = None
    higher_is_better: ClassVar[Mapping[str, bool]] = {}
    best_by: ClassVar[str] = LOSS
    gather_weights: bool = False
    outputs: Any = None
    epochs: ClassVar[float | None] = None
    learning_rates: ClassVar[tuple[float, float]] = (2e-4, 2e-5)

    def for_run(self, args: Any) -> Objective:
        """Return the objective with defaults that depend on the options of a run.

        Args:
            args: A :class:`toolkit.planning.run_args.RunArgs`.
        """
        return self

    def prepare(self, launch: Any) -> PreparedData:
        """Return the data of a run, with what the objective computes for it before training. Collective.

        Args:
            launch: A :class:`toolkit.training.launch.Launch`: the processes run, and no model is built.
        """
        return launch.data

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """Return the parts for a model. ``sums`` must return every part with a nonzero weight.

        Validations have a val_loss unless no part has a weight in evaluation mode.
        """
        return (Part(LOSS),)

    def begin_step(self, model: nn.Module, micro_batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches of a step, or with ``model`` in evaluation mode those of a validation. Collective.

        Gets the rows that were read, before their counts are summed, and the weights after the last update. All ranks
        must return equally many. After a read error on this rank, ``micro_batches`` is empty, and the result unused.
        """
        return micro_batches

    def cached_rows(self, row_bytes: int) -> int:
        """Return how many rows :meth:`begin_step` generates at a time, for the memory of their KV cache; 0 for none.

        Args:
            row_bytes: KV cache of a row of the longest length.
        """
        return 0

    @property
    def makes_batches(self) -> bool:
        """Whether :meth:`begin_step` is overridden."""
        return type(self).begin_step is not Objective.begin_step

    def look_ahead(self, model: nn.Module, batches: Iterable[Batch], device: torch.device) -> None:  # noqa: B027
        """See all batches of a step, or of a validation, before ``sums`` sees them one by one. Collective.

        Only called if ``looks_ahead``.
        """

    def count(self, batch: Batch) -> dict[str, int]:
        """Return the normalizers of a micro-batch; :data:`TOKENS` defaults to all supervised. Filler rows count 0."""
        return {}

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Return the sums of a micro-batch by part as fp32 scalars. All ranks must return the same parts.

        Call ``model`` (as the strategy wraps it) once, with :func:`toolkit.objectives.inputs.forward_inputs`.
        ``model(..., labels=labels, log_probs=True)`` returns the log-probabilities of the labels (M1).
        """

    def metric_names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of :meth:`metrics`."""
        return ()

    def metrics(self, module: nn.Module) -> dict[str, float]:
        """Return metrics of a validation that are no sums, from ``outputs``; the same on every rank. Collective."""
        return {}


def checked_parts(objective: Objective, module: nn.Module) -> tuple[Part, ...]:
    """Return the parts; raise UserError if a normalizer is unknown."""
    parts = objective.parts(module)
    for part in parts:
        if part.normalizer not in objective.normalizers:
            known = ", ".join(objective.normalizers)
            raise UserError(
                f"objective {type(objective).__name__}: part {part.name}: unknown normalizer {part.normalizer!r}; "
                f"`normalizers` has {known}"
            )
    return parts


def total_counts(objective: Objective, batches: Iterable[Batch]) -> dict[str, int]:
    """Sum the normalizers over micro-batches; raise UserError if ``count`` does not return all of them."""
    totals = dict.fromkeys(objective.normalizers, 0)
    for batch in batches:
        for name in totals:
            if name not in batch.counts:
                raise UserError(f"objective {type(objective).__name__}: count() must return {name!r}, a normalizer")
            totals[name] += batch.counts[name]
    return totals


def scales(parts: tuple[Part, ...], counts: Mapping[str, int], loss_ranks: int = 1) -> dict[str, float]:
    """Return each sum's factor in the loss. Gradients are averaged over ``loss_ranks`` ranks."""
    return {p.name: p.weight * (loss_ranks / max(1, counts[p.normalizer])) for p in parts if p.weight}


def means(
    parts: tuple[Part, ...], sums: Mapping[str, float], counts: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the loss, and the means of all other parts that have a count."""
    present = [p for p in parts if p.name in sums and (p.weight or counts[p.normalizer])]
    values = {p.name: sums[p.name] / max(1, counts[p.normalizer]) for p in present}
    loss = sum(p.weight * values[p.name] for p in parts if p.weight)
    return loss, {name: value for name, value in values.items() if name != LOSS}
