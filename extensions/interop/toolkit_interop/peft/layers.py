"""Map native linear layers to Hugging Face layers, for import and export of peft adapters.

Fused only natively (Llama's q_proj, k_proj, v_proj): each part's adapter maps to one Hugging Face layer.

Fused on both sides (GPT-NeoX, GPT-2), or only in Hugging Face (Phi-3's gate_up_proj): the parts' adapters are combined,
with A stacked and B block-diagonal. The rank is the sum of the parts' ranks, and alpha is scaled to keep the same
scaling factor.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.families.tables import WeightMapping
from toolkit.models.gpt import GPT, model_on_meta
from toolkit.models.lora_layers import Adapter, LoRALinear
from toolkit_interop.peft.experts import hf_module

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Prefix of the text model in a multimodal model: "model.language_model.layers" instead of "model.layers".
TEXT_MODEL = "language_model."
# transformers 5 renamed GPT-NeoX's head: write its adapter under both names, read either.
RENAMED = {"embed_out": "lm_head"}


class PlacedAdapter(NamedTuple):
    """An adapter in a :class:`Layer`, with its name, part and row range."""

    name: str
    part: str
    rows: range
    adapter: Adapter


@dataclass(frozen=True)
class Layer:
    """A native linear layer, or several that are fused in Hugging Face.

    Several layers are treated as one, with their rows concatenated. ``sizes`` has the number of rows of each layer, and
    ``entry`` is the weight map entry.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    entry: WeightMapping

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    @property
    def rows(self) -> dict[str, range]:
        """Row range of each native layer, by the last part of its name."""
        stops = accumulate(self.sizes)
        return {
            name.rpartition(".")[2]: range(stop - size, stop)
            for name, size, stop in zip(self.names, self.sizes, stops, strict=True)
        }

    @property
    def is_fused_in_hf(self) -> bool:
        """Whether several native layers are fused in Hugging Face."""
        return len(self.names) > 1

    @property
    def modules(self) -> list[str]:
        """Names of the corresponding Hugging Face layers."""
        return [hf_module(name.removesuffix(".weight")) for name in self.entry.hf]

    def adapters(self, model: GPT) -> list[PlacedAdapter]:
        """Return the layer's adapters in ``model``, ordered by rows. If several layers are fused, each is a part."""
        placed = []
        for name, (last, rows) in zip(self.names, self.rows.items(), strict=True):
            layer = model.get_submodule(name)
            for part, adapter in zip(layer.lora, layer.adapters, strict=True) if isinstance(layer, LoRALinear) else ():
                of_part = rows[adapter.rows.start : adapter.rows.stop]
                part_name = last if self.is_fused_in_hf else part
                placed.append(PlacedAdapter(f"{name}.lora.{part}", part_name, of_part, adapter))
        return placed

    @property
    def is_transposed(self) -> bool:
        """Whether the Hugging Face weights are (in, out)."""
        probe = torch.empty(self.out_features, self.out_features + 1, device="meta")
        return self.entry.to_hf(list(probe.split(self.sizes)))[0].size(0) == self.out_features + 1

    def to_hf(self, rows: Tensor) -> list[Tensor]:
        """Split a native tensor (out, k) into one tensor per Hugging Face layer."""
        parts = self.entry.to_hf(list(rows.split(self.sizes)))
        return [part.t() if self.is_transposed else part for part in parts]

    def to_native(self, parts: list[Tensor]) -> Tensor:
        """Invert :meth:`to_hf`."""
        return torch.cat(self.entry.from_hf([part.t() if self.is_transposed else part for part in parts]))

    def covers(self, rows: range) -> list[bool]:
        """Return, for each Hugging Face layer, whether it contains any of these rows."""
        return [bool(part.any()) for part in self.to_hf(scatter_rows(torch.ones(len(rows), 1), rows, self))]


def linear_layers(config: ModelConfig) -> list[Layer]:
    """Return all linear layers that can have adapters."""
    config = replace(config, tie_embeddings=False)  # a tied head has no entry
    model, layers = model_on_meta(config), []
    for entry in family_of(config).weight_map(config):
        names = tuple(name.rpartition(".")[0] for name in entry.native)
        sizes = [part.out_features for name in names if isinstance(part := model.get_submodule(name), nn.Linear)]
        is_adaptable = not names[0].endswith(".shared_expert_gate")
        if is_adaptable and entry.native[0].endswith(".weight") and len(sizes) == len(names):
            layers.append(Layer(names, tuple(sizes), entry))
    return layers


def scatter_rows(values: Tensor, rows: range, layer: Layer) -> Tensor:
    """Return a tensor (out, k) with ``values`` in ``rows`` and zeros elsewhere."""
    full = values.new_zeros(layer.out_features, values.size(1))
    full[rows.start : rows.stop] = values
    return full
