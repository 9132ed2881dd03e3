"""Next-token cross-entropy: the objective of pretraining and supervised finetuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.objectives.base import LOSS, Objective, Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.batch import Batch


@dataclass
class NextToken(Objective):
    """The mean cross-entropy of the supervised tokens, in nats, as the model's forward returns it.

    A model's ``loss_parts`` are also logged, see :class:`toolkit.models.gpt.GPT`.
    """

    is_likelihood = True

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        return (Part(LOSS), *(Part(name, weight=0) for name in getattr(module, "loss_parts", ())))

    def sums(self, model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        from toolkit.objectives.inputs import forward_inputs, original_module

        module: Any = original_module(model)
        if names := getattr(module, "loss_parts", ()):
            module.loss_part_sums = {}
        loss_sum, _ = model(**forward_inputs(model, batch, device))
        parts = module.loss_part_sums if names else {}
        return {LOSS: loss_sum} | {name: parts[name] for name in names if name in parts}
