"""LoRA configuration: the ``--lora_*`` options of finetuning. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from toolkit.errors import UserError, require_option

Quantize = Literal["bnb.nf4", "bnb.nf4-dq"]
# The parts of the model that can have adapters, each a field of LoRAConfig.
PARTS = ("query", "key", "value", "projection", "mlp", "head", "experts", "router", "linear_attention")
SCORE, TRAINED_SCORE = "score.weight", "score.lora.weight"
"""Names of the score layer's weight: in a model, and in a model with adapters."""


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2021): W x becomes W x + scaling B A x; A and B are trained.

    Args:
        r: LoRA rank.
        alpha: LoRA scaling is alpha / r.
        dropout: LoRA dropout probability.
        query: Adapt the query projection.
        key: Adapt the key projection.
        value: Adapt the value projection.
        projection: Adapt the attention output projection.
        mlp: Adapt all linear layers of the MLPs: of dense layers and shared experts; and of per-layer inputs.
        head: Adapt the LM head.
        experts: Adapt all linear layers of the experts, with an adapter per expert.
        router: Adapt the router of the experts.
        linear_attention: Adapt all linear layers of linear attention.
        rslora: Rank-stabilized LoRA (Kalajdzievski 2023): scaling is alpha / sqrt(r).
        dora: Weight-decomposed LoRA (DoRA, Liu et al. 2024): train magnitude and direction separately.
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
    experts: bool = False
    router: bool = False
    linear_attention: bool = False
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        require_option(self.r > 0, "lora_r", self.r, "must be greater than zero")
        require_option(0 < self.alpha < math.inf, "lora_alpha", self.alpha, "must be greater than zero")
        require_option(0 <= self.dropout < 1, "lora_dropout", self.dropout, "must be at least 0 and below 1")
        if not self.parts:
            flags = " ".join(f"--lora_{part} false" for part in PARTS)
            raise UserError(f"{flags}: selects nothing to train; set one of them to true")
        if self.head and self.dora:
            raise UserError(
                "--lora_head true: cannot be combined with --lora_dora true, which would need the logits of a complete "
                "batch; choose one of the two"
            )
        part = "experts" if self.experts else "router"
        if self.dora and (self.experts or self.router):
            raise UserError(
                f"--lora_{part} true: cannot be combined with --lora_dora true, which would need every expert's dense "
                "weights in each step, and which peft does not load; choose one of the two"
            )

    @property
    def scaling(self) -> float:
        """The LoRA scaling factor."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def parts(self) -> tuple[str, ...]:
        """The selected :data:`PARTS`."""
        return tuple(part for part in PARTS if getattr(self, part))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a file. Older versions refuse the names of newer parts: write these if used."""
        newer = ("experts", "router", "linear_attention")
        return {name: value for name, value in asdict(self).items() if value or name not in newer}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> LoRAConfig:
        """Create a config from finetune_lora's options (``lora_r``, ``lora_alpha``, ...). Other options are ignored."""
        return cls(**{f.name: options[f"lora_{f.name}"] for f in fields(cls)})

    def to_options(self) -> dict[str, Any]:
        """The inverse of :meth:`from_options`."""
        return {f"lora_{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class LoRAOptions:
    """Options of finetune_lora for the adapters and the base model.

    Args:
        lora_r: Rank of the adapters.
        lora_alpha: LoRA scaling is lora_alpha / lora_r.
        lora_dropout: LoRA dropout probability.
        lora_query: Adapt the query projections.
        lora_key: Adapt the key projections.
        lora_value: Adapt the value projections.
        lora_projection: Adapt the attention output projections.
        lora_mlp: Adapt all linear layers of the MLPs; with experts: of dense layers and shared experts.
        lora_head: Adapt the language model head.
        lora_experts: Adapt all linear layers of the experts, with an adapter per expert.
        lora_router: Adapt the router of the experts.
        lora_linear_attention: Adapt all linear layers of linear attention; query, key, value and projection are
            attention's.
        lora_rslora: Rank-stabilized LoRA: scaling is lora_alpha / sqrt(lora_r).
        lora_dora: DoRA: also train the magnitude of each row.
        loraplus_lr_ratio: LoRA+ (Hayou et al. 2024): ratio of the learning rates of B and A, such as 16.
        from_peft: Start from the adapters in this peft folder, which also determines the adapted layers.
        quantize: Quantize the base to 4 bits: bnb.nf4, or bnb.nf4-dq with quantized scales (double quantization).
    """

    is_flat: ClassVar[bool] = True  # the fields are options without a prefix

    lora_r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    lora_query: bool = True
    lora_key: bool = False
    lora_value: bool = True
    lora_projection: bool = False
    lora_mlp: bool = False
    lora_head: bool = False
    lora_experts: bool = False
    lora_router: bool = False
    lora_linear_attention: bool = False
    lora_rslora: bool = False
    lora_dora: bool = False
    loraplus_lr_ratio: float = 1.0
    from_peft: str | None = None
    quantize: Quantize | None = None


def is_adapter(name: str) -> bool:
    """Whether this parameter name belongs to an adapter, or to a score layer that is trained with adapters."""
    return ".lora." in name
