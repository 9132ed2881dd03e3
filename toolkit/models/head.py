"""The LM head."""

from typing import Any

from torch import Tensor, nn

from toolkit.models.aligned import AlignedLinear, aligned_rows
from toolkit.models.lora_layers import LoRALinear
from toolkit.models.loss import head_loss


class Head(AlignedLinear):
    """A linear layer with a second forward method, :meth:`loss`. FSDP gathers its weights for both."""

    def loss(self, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss or the label log-probabilities. ``options``: of :func:`toolkit.models.loss.head_loss`."""
        low_rank = self.low_rank(x, x.dtype) if isinstance(self, LoRALinear) and not self.adapters_off else None
        return head_loss(x, self.weight, self.bias, labels, low_rank, **options)


class LoRAHead(LoRALinear, Head):
    """A head with adapters."""


def pad_head(model: nn.Module) -> None:
    """Give the head's weight zero rows at the end of its storage: matmuls in its dtype then need no padded copy."""
    for head in model.modules():
        if isinstance(head, Head):
            weight = head.weight
            weight.data = aligned_rows(weight.data, weight.dtype)[: weight.size(0)]
