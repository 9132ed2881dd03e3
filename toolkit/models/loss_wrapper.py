"""User-provided models: adapt their forward to return a loss, and find their blocks."""

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.errors import UserError, did_you_mean
from toolkit.models.labels import IGNORE_INDEX


class LossWrapper(nn.Module):
    """Wraps a module: forward takes input_ids and labels (B, T) and returns ``(loss_sum, n_tokens)``.

    Args:
        module: Its forward takes input_ids and labels and returns this tuple; or it takes input_ids and returns logits
            (B, T, vocabulary) or an object with ``logits``. :func:`toolkit.checkpoints.weights.canonical_name` removes
            the prefix ``module``, so names on disk are the module's.

    A module that returns logits materializes all of them; only GPT guarantees M1.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        parameters = list(inspect.signature(module.forward).parameters)
        self._has_loss = parameters[1:2] == ["labels"]
        # Hugging Face models would allocate a KV cache in every step
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss in nats and the number of supervised tokens."""
        if self._has_loss:
            result = self.module(input_ids, labels)
            if not (isinstance(result, tuple) and len(result) == 2 and getattr(result[0], "shape", None) == ()):
                raise UserError(
                    f"model: {self._get_name()}.forward(input_ids, labels) returns {_describe(result)}; it must return "
                    "(loss_sum, n_tokens): the sum of the losses, a scalar, and the number of supervised tokens"
                )
            return result
        result = self.module(input_ids, **self._options)
        logits = result if isinstance(result, Tensor) else getattr(result, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != labels.shape:
            raise UserError(
                f"model: {self._get_name()}.forward(input_ids) with input_ids {tuple(labels.shape)} returns "
                f"{_describe(result if logits is None else logits)}; it must return logits (batch, tokens, vocabulary)"
                ", or take a second argument named labels and return (loss_sum, n_tokens)"
            )
        loss_sum = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return loss_sum, (labels != IGNORE_INDEX).sum()

    def _get_name(self) -> str:  # torch's hook for the displayed name of a module
        return type(self.module).__name__


def find_blocks(
    module: nn.Module, class_names: Iterable[type[nn.Module] | str] | None = None
) -> tuple[type[nn.Module], ...]:
    """Return the classes in ``class_names``; by default, the classes in the module's longest ``nn.ModuleList``.

    Nested lists (experts in a layer) are ignored. Returns nothing if the module has no list.
    """
    classes = list(dict.fromkeys(type(part) for part in module.modules()))
    if class_names is not None:
        names = [class_names] if isinstance(class_names, str | type) else class_names
        return tuple(_find_class(name, classes) for name in names)
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    outer = [part for name, part in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(dict.fromkeys(type(block) for block in max(outer, key=len, default=())))


def _find_class(requested: type[nn.Module] | str, classes: list[type[nn.Module]]) -> type[nn.Module]:
    match = next((c for c in classes if requested in (c, c.__name__)), None)
    if match is None:
        name, names = requested if isinstance(requested, str) else requested.__name__, [c.__name__ for c in classes]
        near = did_you_mean(name, names) or f"; its classes are {', '.join(names)}"
        raise UserError(f"block_classes {name}: the model has no part of this class{near}")
    return match


def _describe(result: Any) -> str:
    """Return a short description of a forward's return value."""
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, tuple):
        return f"a tuple ({', '.join(_describe(part) for part in result)})"
    return f"an object of type {type(result).__name__}"
