"""The LM head, and the score layer that replaces it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.aligned import AlignedLinear, aligned_rows
from toolkit.models.loss import head_loss


class Head(AlignedLinear):
    """A linear layer with a second forward method, :meth:`loss`. FSDP gathers its weights for both."""

    adapters_off = True
    low_rank: Any  # with adapters, see toolkit.models.lora_layers

    def loss(self, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss or the label log-probabilities. ``options``: of :func:`toolkit.models.loss.head_loss`."""
        low_rank = None if self.adapters_off else self.low_rank(x, x.dtype)
        return head_loss(x, self.weight, self.bias, labels, low_rank, **options)


class Score(nn.Linear):
    """The score layer of a classification or reward head. Computes in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class TrainedScore(nn.Module):
    """A score layer that is trained with adapters. Its weight has the name of an adapter, and is saved with them."""

    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.lora = score.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return self.lora(x)


def pad_head(model: nn.Module) -> None:
    """Give the head's weight zero rows at the end of its storage: matmuls in its dtype then need no padded copy."""
    for head in model.modules():
        if isinstance(head, Head):
            weight = head.weight
            weight.data = aligned_rows(weight.data, weight.dtype)[: weight.size(0)]
