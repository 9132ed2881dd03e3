"""Distillation: train a student to predict as its teacher does, a larger model with the same vocabulary."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from toolkit.config.checks import require_positive
from toolkit.errors import require_option
from toolkit.objectives.base import LOSS, Objective, Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.batch import Batch

DIVERGENCE, NEXT_TOKEN = "divergence", "next_token"
_BETA = 0.5


@dataclass
class Distillation(Objective):
    """The mean over the supervised tokens of (1 - label_weight) T^2 divergence + label_weight cross-entropy, in nats.

    The divergence is between the next-token distributions of student and teacher at temperature T, see
    :mod:`toolkit_align.divergence`. Both means are logged as ``divergence`` and ``next_token``.

    Args:
        teacher_dir: Checkpoint of the teacher, with the same vocabulary: a folder, or a name below checkpoints/.
        divergence: forward_kl covers all that the teacher finds likely, and reverse_kl avoids what it finds unlikely.
            jsd is between them.
        beta: Weight of the teacher in the mixture of jsd, more than 0 (as forward_kl) and less than 1 (as reverse_kl).
        temperature: Temperature T of both distributions.
        label_weight: Weight of the next-token loss, from 0 (only the teacher) to less than 1.
    """

    teacher_dir: str
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float = _BETA
    temperature: float = 1.0
    label_weight: float = 0.5

    frozen_option = "teacher_dir"
    higher_is_better = {DIVERGENCE: False, NEXT_TOKEN: False}

    def __post_init__(self) -> None:
        require_positive("objective", self, "temperature")
        is_share = 0 <= self.label_weight < 1
        require_option(is_share, "objective.label_weight", self.label_weight, "must be at least 0 and less than 1")
        require_option(0 < self.beta < 1, "objective.beta", self.beta, "must be between 0 and 1")
        hint = f"has no effect with --objective.divergence {self.divergence}; remove it"
        require_option(self.divergence == "jsd" or self.beta == _BETA, "objective.beta", self.beta, hint)

    def parts(self, module: "nn.Module") -> tuple[Part, ...]:
        return (Part(LOSS), Part(DIVERGENCE, weight=0), Part(NEXT_TOKEN, weight=0))

    def sums(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "dict[str, Tensor]":
        import torch

        from toolkit.distributed.fsdp import gather_head, release_head
        from toolkit.objectives.inputs import original_module, run_with_head
        from toolkit_align.divergence import DistillationLoss, DistillationOptions

        student: Any = original_module(model)
        teacher: Any = original_module(self.frozen)
        with torch.no_grad():
            hidden, _ = run_with_head(self.frozen, batch, device, lambda model, x, labels: model.head_input(x))
        loss = DistillationLoss(
            DistillationOptions(self.divergence, self.beta, self.temperature, self.label_weight),
            hidden,
            lambda: gather_head(teacher),
            teacher.config.final_logit_softcapping,
            min(teacher.vocab_size, student.vocab_size),
        )
        try:
            loss_sum, balancing = run_with_head(
                model, batch, device, lambda model, x, labels: model.cross_entropy(x, labels, loss)
            )
        finally:
            release_head(teacher)
        return {LOSS: loss_sum + balancing, DIVERGENCE: loss.sums[0], NEXT_TOKEN: loss.sums[1]}
