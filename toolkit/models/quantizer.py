"""What an extension's quantizer does: weights that are quantized in the forward pass and in exports."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from toolkit.models.config import Fields, ModelConfig

NamedTensors = Iterable[tuple[str, Tensor]]


class Packing(Protocol):
    """The quantized weights of an exported Hugging Face folder."""

    note: str
    """What the numbers are, as one line."""

    @property
    def config(self) -> Fields:
        """The ``quantization_config`` of config.json; empty if there is none. Complete after :meth:`pack`."""

    def dense(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the model's weights with quantized values, under the model's names."""

    def pack(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Replace the quantized ones of the tensors of the folder, under Hugging Face's names; also on meta."""

    def load_verified(self, folder: Path, config: ModelConfig, tensors: dict[str, Tensor], tokens: Tensor) -> Any:
        """Load a folder with transformers and compare it with its dense ``tensors``, under Hugging Face's names.

        Returns transformers' fp32 model of these. Raises a GuardError if a weight differs, or the logits of ``tokens``,
        (B, T).
        """


class Quantizer(Protocol):
    """The functions of a quantizer, of a module or an object. The extension that is loaded last has the quantizer.

    ``ModelConfig.qat`` describes a model's quantization. Checkpoints hold the weights before quantization.
    """

    def configure(self, args: Any, precision: str, config: ModelConfig | None) -> ModelConfig | None:
        """Return the architecture of a run, a :class:`toolkit.planning.run_args.RunArgs`, with its quantization.

        ``config`` is None for a user-provided module.

        Raises a UserError if an option or the architecture is not supported.
        """

    def attach(self, model: nn.Module) -> None:
        """Quantize the weights of a GPT in its forward pass, as its config says. It may be on the meta device."""

    def freeze(self, model: nn.Module, device: torch.device | str, dtype: torch.dtype | None) -> Fields | None:
        """Replace the weights by their quantized values on ``device`` in ``dtype``, one by one, and merge adapters.

        Returns what the model still quantizes.
        """

    def hold(self, model: nn.Module) -> AbstractContextManager[None]:
        """Quantize the weights of a GPT once, adapters merged, for many forward passes without gradients.

        These use the quantized weights within the context, which may be entered again. The object has the copies; as
        long as it is used, the weights must not change. A layer whose weight is sharded or whose copy does not fit into
        memory quantizes in each forward pass.
        """

    def make_packing(self, config: ModelConfig, kind: str, dtype: torch.dtype) -> Packing:
        """Return how to export a model with ``kind`` of ``--quantize`` in a folder of ``dtype``."""
