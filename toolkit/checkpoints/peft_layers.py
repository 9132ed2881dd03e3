"""What adapters to and from peft's format have in common: names, and the linear layers on either side.

Where Hugging Face keeps apart what is fused here (Llama's q_proj, k_proj, v_proj), each part's adapter becomes the one
of its layer. Where both are fused (GPT-NeoX, GPT-2), or only theirs is (Phi-3's gate_up_proj), the parts become one
adapter: A one below the other, B in blocks; its rank is that of all parts together, and its alpha grows so that the
scaling stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.checkpoints.folder import model_on_meta
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.families.tables import WeightMapping
from toolkit.models.gpt import GPT
from toolkit.models.lora import Adapter, LoRALinear

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Where a model that sees images, too, has its text model: in "model.language_model.layers" instead of "model.layers".
TEXT_MODEL = "language_model."
# transformers 5 has renamed GPT-NeoX's head: an adapter of it is written under both names, and read under either.
RENAMED = {"embed_out": "lm_head"}


class Placed(NamedTuple):
    """An adapter of a :class:`Layer`: its name, the part that it is of, the rows of the layer that are the part's."""

    name: str
    part: str
    rows: range
    adapter: Adapter


@dataclass(frozen=True)
class Layer:
    """A linear layer, or those that are one at Hugging Face: names here, rows of each, the family's entry of weights.

    Several count as one layer with the rows of the first, then those of the next.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    entry: WeightMapping

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    @property
    def rows(self) -> dict[str, range]:
        """Those of each layer here, by the last part of its name."""
        stops = accumulate(self.sizes)
        return {
            name.rpartition(".")[2]: range(stop - size, stop)
            for name, size, stop in zip(self.names, self.sizes, stops, strict=True)
        }

    @property
    def is_joined(self) -> bool:
        """Whether it is several layers here."""
        return len(self.names) > 1

    @property
    def modules(self) -> list[str]:
        """The Hugging Face layers that it is, by name."""
        return [name.removesuffix(".weight") for name in self.entry.hf]

    def adapters(self, model: GPT) -> list[Placed]:
        """Its adapters in a model, in the order of their rows; the parts of several layers are these."""
        found = []
        for name, (last, rows) in zip(self.names, self.rows.items(), strict=True):
            layer = model.get_submodule(name)
            for part, adapter in layer.lora.items() if isinstance(layer, LoRALinear) else ():
                own = rows[adapter.rows.start : adapter.rows.stop]
                found.append(Placed(f"{name}.lora.{part}", last if self.is_joined else part, own, adapter))
        return found

    @property
    def is_turned(self) -> bool:
        """Whether theirs are (in, out)."""
        probe = torch.empty(self.out_features, self.out_features + 1, device="meta")
        return self.entry.to_hf(list(probe.split(self.sizes)))[0].size(0) == self.out_features + 1

    def to_theirs(self, rows: Tensor) -> list[Tensor]:
        """(out, k) -> what of it belongs to each of their layers, (their out, k)."""
        parts = self.entry.to_hf(list(rows.split(self.sizes)))
        return [part.t() if self.is_turned else part for part in parts]

    def to_ours(self, parts: list[Tensor]) -> Tensor:
        """The inverse."""
        return torch.cat(self.entry.from_hf([part.t() if self.is_turned else part for part in parts]))

    def covers(self, rows: range) -> list[bool]:
        """Which of their layers hold some of these rows."""
        return [bool(part.any()) for part in self.to_theirs(in_rows(torch.ones(len(rows), 1), rows, self))]


def linear_layers(config: ModelConfig) -> list[Layer]:
    """All linear layers that adapters may have."""
    config = replace(config, tie_embeddings=False)  # a tied head has no entry of its own
    model, layers = model_on_meta(config), []
    for entry in family_of(config).weights(config):
        names = tuple(name.rpartition(".")[0] for name in entry.native)
        parts = [model.get_submodule(name) for name in names]
        if entry.native[0].endswith(".weight") and all(isinstance(part, torch.nn.Linear) for part in parts):
            layers.append(Layer(names, tuple(part.out_features for part in parts), entry))
    return layers


def in_rows(values: Tensor, rows: range, layer: Layer) -> Tensor:
    """(out, k) with these values in some rows and zeros elsewhere."""
    full = values.new_zeros(layer.out_features, values.size(1))
    full[rows.start : rows.stop] = values
    return full
