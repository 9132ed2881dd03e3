"""What adapters to and from peft's format have in common: names, and the linear layers on either side.

Where Hugging Face keeps apart what is fused here (Llama's q_proj, k_proj, v_proj), each part's adapter becomes the one
of its layer. Where both are fused (GPT-NeoX, GPT-2), the parts become one adapter: A one below the other, B in blocks;
its rank is that of all parts together, and its alpha grows so that the scaling stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toolkit.checkpoints.folder import model_on_meta
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.families.tables import Map

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# transformers 5 has renamed GPT-NeoX's head: an adapter of it is written under both names, and read under either.
RENAMED = {"embed_out": "lm_head"}


@dataclass(frozen=True)
class Layer:
    """A linear layer under its name here and the entry of the family's table that has its weight."""

    name: str
    out_features: int
    entry: Map

    @property
    def modules(self) -> list[str]:
        """The Hugging Face layers that it is, by name."""
        return [name.removesuffix(".weight") for name in self.entry.theirs]

    def require_one(self, flag: str) -> None:
        """Refuse adapters of a layer that is one at Hugging Face and several here.

        Raises:
            UserError: It is Phi-3's gate_up_proj, or another such layer.
        """
        if len(self.entry.ours) > 1:
            raise UserError(
                f"{flag}: adapters of {self.modules[0]} are {len(self.entry.ours)} layers' here and one's in peft; "
                "only merged weights go from one to the other (toolkit merge_lora; peft: merge_and_unload)"
            )

    @property
    def is_turned(self) -> bool:
        """Whether theirs are (in, out)."""
        probe = torch.empty(self.out_features, self.out_features + 1, device="meta")
        return self.entry.to_hf([probe])[0].size(0) == self.out_features + 1

    def to_theirs(self, rows: Tensor) -> list[Tensor]:
        """(out, k) -> what of it belongs to each of their layers, (their out, k)."""
        parts = self.entry.to_hf([rows])
        return [part.t() if self.is_turned else part for part in parts]

    def to_ours(self, parts: list[Tensor]) -> Tensor:
        """The inverse."""
        return self.entry.from_hf([part.t() if self.is_turned else part for part in parts])[0]

    def covers(self, rows: range) -> list[bool]:
        """Which of their layers hold some of these rows."""
        return [bool(part.any()) for part in self.to_theirs(in_rows(torch.ones(len(rows), 1), rows, self))]


def linear_layers(config: ModelConfig) -> list[Layer]:
    """All linear layers that adapters may have."""
    config = replace(config, tie_embeddings=False)  # a tied head has no entry of its own
    model, layers = model_on_meta(config), []
    for entry in family_of(config).weights(config):
        name, _, kind = entry.ours[0].rpartition(".")
        part = model.get_submodule(name)
        if kind == "weight" and isinstance(part, torch.nn.Linear):
            layers.append(Layer(name, part.out_features, entry))
    return layers


def in_rows(values: Tensor, rows: range, layer: Layer) -> Tensor:
    """(out, k) with these values in some rows and zeros elsewhere."""
    full = values.new_zeros(layer.out_features, values.size(1))
    full[rows.start : rows.stop] = values
    return full
