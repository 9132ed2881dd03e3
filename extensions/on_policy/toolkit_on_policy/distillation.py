"""On-policy distillation (arXiv 2306.13649): the teacher's distribution on the student's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit_align.distillation import Distillation

from toolkit.errors import require_option
from toolkit.models.labels import TOKENS
from toolkit.objectives.base import Part
from toolkit_on_policy.objective import ANSWERS, LOGGED, OnPolicy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.batch import Batch


@dataclass
class OnPolicyDistillation(OnPolicy, Distillation):
    """Predict as the teacher does, on answers that the student samples before each step.

    Validations compare both on greedy answers to held-out prompts.

    Args:
        data_share: Share of answers that are taken from the data instead.
    """

    label_weight: float = 0.0
    data_share: float = 0.0  # type: ignore[misc]

    normalizers = (TOKENS, ANSWERS)
    higher_is_better = Distillation.higher_is_better

    def __post_init__(self) -> None:
        OnPolicy.__post_init__(self)
        Distillation.__post_init__(self)
        hint = "must be at least 0 and less than 1"
        require_option(0 <= self.data_share < 1, "objective.data_share", self.data_share, hint)

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        return (*Distillation.parts(self, module), *(Part(name, ANSWERS, 0) for name in LOGGED))

    def sums(self, model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        logged = {name: batch.value(name, device).sum() for name in LOGGED}
        return Distillation.sums(self, model, batch, device) | logged
