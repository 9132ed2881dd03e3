"""Log-probabilities of the labels of each row, and the load-balancing loss that comes with them."""

from typing import TYPE_CHECKING

from toolkit.objectives.base import Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.batch import Batch

REFERENCE, BALANCING = "reference", "balancing_loss"


def label_log_probs(model: "nn.Module", batch: "Batch", device: "torch.device") -> "tuple[Tensor, dict[str, Tensor]]":
    """Return the summed log-probabilities of the labels of each row, (B,) fp32, and the load-balancing sum, if any."""
    from toolkit.objectives.inputs import forward_inputs, original_module

    log_probs, balancing = model(**forward_inputs(model, batch, device), log_probs=True)
    return log_probs.sum(1), {BALANCING: balancing} if has_balancing(original_module(model)) else {}


def initial_log_probs(model: "nn.Module", batch: "Batch", device: "torch.device") -> "Tensor":
    """Return the first result of :func:`label_log_probs` without adapters and gradients."""
    import torch

    from toolkit.models.lora import without_adapters
    from toolkit.objectives.inputs import original_module

    with torch.no_grad(), without_adapters(original_module(model)):
        return label_log_probs(model, batch, device)[0]


def has_balancing(module: "nn.Module") -> bool:
    config = getattr(module, "config", None)
    return config is not None and config.n_moe_layer > 0 and bool(config.router_aux_loss_coef)


def balancing_parts(module: "nn.Module") -> tuple[Part, ...]:
    """Return the load-balancing loss, if the model has one."""
    return (Part(BALANCING),) if has_balancing(module) else ()
