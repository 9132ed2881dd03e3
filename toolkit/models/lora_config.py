"""What is adapted by low rank, and how: the options ``--lora_*`` of finetuning. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.errors import UserError

# The parts of the model that can be adapted: a field of LoRAConfig each.
PARTS = ("query", "key", "value", "projection", "mlp", "head")


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2021): W x becomes W x + scaling B A x, of which A and B are trained.

    Args:
        r: Rank: rows of A, columns of B.
        alpha: The adapters' share is multiplied by alpha / r.
        dropout: Chance for each input of the adapters to be left out of a training step.
        query: Adapt the query rows of the attention's fused projection.
        key: Adapt its key rows.
        value: Adapt its value rows.
        projection: Adapt the attention's output projection.
        mlp: Adapt every linear layer of the MLP.
        head: Adapt the language model's head.
        rslora: Multiply by alpha / sqrt(r) instead (Kalajdzievski 2023), so that higher ranks learn as fast.
        dora: Train the norms of the rows beside their directions (Liu et al. 2024).

    Raises:
        UserError: naming the flag, for values that make no sense.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    query: bool = True
    key: bool = False
    value: bool = True
    projection: bool = False
    mlp: bool = False
    head: bool = False
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        if self.r <= 0:
            raise UserError(f"--lora_r {self.r}: must be greater than zero")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"--lora_alpha {self.alpha}: must be greater than zero")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--lora_dropout {self.dropout}: must be at least 0 and below 1")
        if not self.parts:
            flags = " ".join(f"--lora_{part} false" for part in PARTS)
            raise UserError(f"{flags}: selects nothing to train; set one of them to true")
        if self.head and self.dora:
            raise UserError(
                "--lora_head true: not with --lora_dora true, which would need the logits of a whole batch; "
                "choose one of the two"
            )

    @property
    def scaling(self) -> float:
        """The factor of B A x."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def parts(self) -> tuple[str, ...]:
        """The selected ones of :data:`PARTS`."""
        return tuple(part for part in PARTS if getattr(self, part))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
