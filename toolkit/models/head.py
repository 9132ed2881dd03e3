"""The LM head."""

from torch import Tensor, nn

from toolkit.models.aligned import AlignedLinear, aligned_rows
from toolkit.models.cross_entropy import CrossEntropy
from toolkit.models.lora_layers import LoRALinear
from toolkit.models.loss import RowLoss, head_loss


class Head(AlignedLinear):
    """A linear layer with a second forward method, :meth:`loss`. FSDP gathers its weights for both."""

    def loss(
        self,
        x: Tensor,
        labels: Tensor,
        softcap: float | None,
        compiled: bool | CrossEntropy | RowLoss,
        log_probs: bool = False,
        reusable: bool = False,
    ) -> Tensor:
        """Return the loss or the label log-probabilities, see :func:`toolkit.models.loss.head_loss`."""
        low_rank = None
        if isinstance(self, LoRALinear) and not self.adapters_off:
            low_rank = self.low_rank(x, x.dtype)
        options = low_rank, softcap, compiled
        return head_loss(x, self.weight, self.bias, labels, *options, log_probs=log_probs, reusable=reusable)


class LoRAHead(LoRALinear, Head):
    """A head with adapters."""


def pad_head(model: nn.Module) -> None:
    """Give the head's weight zero rows at the end of its storage: matmuls in its dtype then need no padded copy."""
    for head in model.modules():
        if isinstance(head, Head):
            weight = head.weight
            weight.data = aligned_rows(weight.data, weight.dtype)[: weight.size(0)]
