"""Linear layers with low-rank adapters.

The frozen ``weight`` and ``bias`` keep their names. Trainable parameters are under ``lora``:

| name | shape | initial value |
|---|---|---|
| ``transformer.h.0.attn.qkv.lora.query.A`` (``key``, ``value``) | (r, in) | uniform, +- 1 / sqrt(in) |
| ``transformer.h.0.attn.qkv.lora.query.B`` | (rows of that part, r) | 0 |
| ``transformer.h.0.attn.q_b.lora.query.A``, ``kv_b.lora.key.A`` ... (latent attention) | as above | as above |
| ``transformer.h.0.mlp.proj.lora.whole.A``, ``.B`` (every other layer) | (r, in), (out, r) | as above |
| ``transformer.h.0.mlp.experts.fc_1.lora.whole.A``, ``.B`` | (n_expert, r, in), (n_expert, out, r) | as above |
| ``....magnitude`` (DoRA) | (rows of that part,) | the norms of the rows of ``weight`` |

Adapters are fp32 for any base dtype; matmuls run in the base's compute dtype. A fused layer combines its adapters into
one pair of matrices: stacked A, and block-diagonal B with zero rows where there is no adapter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.aligned import AlignedLinear, aligned_size
from toolkit.models.keyed_random import DropoutBits, keyed_dropout
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.mixed_mm import matmul_dtype


class Adapter(nn.Module):
    """Trainable fp32 low-rank factors for a range of weight rows. ``stack``: the number of experts, if any."""

    def __init__(
        self, r: int, in_features: int, rows: range, dora: bool, device: torch.device, stack: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.rows = rows
        self.A = nn.Parameter(torch.zeros(*stack, r, in_features, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.zeros(*stack, len(rows), r, dtype=torch.float32, device=device))
        if dora:
            self.magnitude = nn.Parameter(torch.ones(len(rows), dtype=torch.float32, device=device))


class AdaptedLayer(nn.Module):
    """A layer with adapters. The layer class provides the attributes below and follows in the MRO."""

    in_features: int
    out_features: int
    weight: Any  # Tensor, (out, in) or (experts, out, in)
    lora: nn.ModuleDict
    adapters_off = False
    """Whether the layer computes without its adapters."""
    dropout_bits = DropoutBits()
    number = 0
    """Its position among the adapted layers of its block; with ``dropout_bits``, it determines what is dropped."""

    layer_class: Any

    def __reduce__(self) -> tuple[Any, ...]:  # pickle finds classes by name, and not these
        return _new_adapted, (self.layer_class,), self.__dict__

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters in row order."""
        return cast(list[Adapter], list(self.lora.values()))

    def add_adapters(self, config: LoRAConfig, parts: dict[str, range]) -> None:
        """Create adapters. ``parts`` maps adapter names to weight rows, in ascending order."""
        self.scaling, self.dropout, self.dora = config.scaling, config.dropout, config.dora
        *stack, _, n = self.weight.shape
        kind = config.dora, self.weight.device, tuple(stack)
        self.lora = nn.ModuleDict({name: Adapter(config.r, n, rows, *kind) for name, rows in parts.items()})

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight`` with the adapters merged, in fp32."""
        raise NotImplementedError

    def _drop(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        if not (self.training and self.dropout):
            return x
        if (bits := self.dropout_bits.tokens) is None:
            return F.dropout(x, self.dropout)
        return keyed_dropout(x, bits if tokens is None else bits.flatten()[tokens], self.number, self.dropout)


class LoRALinear(AdaptedLayer):
    """Adds adapters to a linear layer class, see :func:`adapted`."""

    weight: Tensor  # (out, in)
    bias: nn.Parameter  # or None, as in nn.Linear
    project: Callable[[Tensor], Tensor]  # forward without bias and adapters: (..., in) -> (..., out)
    base_weight: Callable[[], Tensor]  # the weight in a floating-point dtype

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if self.adapters_off:
            return super().forward(x)
        if self.dora:
            return self._forward_dora(x)
        y = self.padded(x) if isinstance(self, AlignedLinear) else super().forward(x)
        hidden, b = self.low_rank(x, y.dtype)
        if (padding := y.size(-1) - self.out_features) > 0:
            return _addmm(y, hidden, F.pad(b, (0, 0, 0, padding)))[..., :-padding]
        return _addmm(y, hidden, b)

    def low_rank(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return factors (..., R) and (out, R) whose product is added to the output. R is the sum of the ranks."""
        a, b = _aligned(*self._factors(), dtype)
        return self._hidden(self._drop(x), a, dtype), b.to(dtype)

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight`` (out, in) with the adapters merged, in fp32."""
        a, b = (factor.detach() for factor in self._factors())
        merged = torch.addmm(weight.float(), b, a, alpha=self.scaling)
        if self.dora:
            merged *= self._row_scales(merged.norm(dim=1)).detach()[:, None]
        return merged

    def _forward_dora(self, x: Tensor) -> Tensor:
        dropped = self._drop(x)
        plain = self.project(x)
        dropped_plain = plain if dropped is x else self.project(dropped)
        a, b = self._factors()
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            norms = self._row_norms(a, b)
        # Section 4.3 of the paper: the norms are constants. Scales are near 1, where bf16 has steps of 1/256: use fp32.
        a, b = _aligned(a, b, plain.dtype)
        hidden = self._hidden(dropped, a, plain.dtype)
        y = self._row_scales(norms) * _addmm(dropped_plain, hidden, b.to(plain.dtype))
        if dropped_plain is not plain:
            y = y + (plain - dropped_plain)
        return (y if self.bias is None else y + self.bias).to(plain.dtype)

    def _row_norms(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(self.base_weight().float(), b, a, alpha=self.scaling).norm(dim=1)

    def _hidden(self, dropped: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(dropped.to(dtype), a.to(dtype)) * self.scaling

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return the combined A, (R, in), and B, (out, R), in fp32."""
        adapters = self.adapters
        if len(adapters) == 1 and adapters[0].B.size(0) == self.out_features:  # dynamo has no len of a symbolic range
            return adapters[0].A, adapters[0].B
        ranks = sum(adapter.A.size(0) for adapter in adapters)
        blocks, before, row = [], 0, 0
        for adapter in adapters:
            r = adapter.A.size(0)
            blocks += [adapter.B.new_zeros(adapter.rows.start - row, ranks)]
            blocks += [F.pad(adapter.B, (before, ranks - before - r))]
            before, row = before + r, adapter.rows.stop
        blocks += [adapters[0].B.new_zeros(self.out_features - row, ranks)]
        return torch.cat([adapter.A for adapter in adapters]), torch.cat(blocks)

    def _row_scales(self, norms: Tensor) -> Tensor:
        """Return DoRA's scale per row, (out,): magnitude / norm; 1 for rows without an adapter."""
        scales, row = [], 0
        for adapter in self.adapters:
            scales += [norms.new_ones(adapter.rows.start - row)]
            scales += [adapter.magnitude / norms[adapter.rows.start : adapter.rows.stop]]
            row = adapter.rows.stop
        return torch.cat([*scales, norms.new_ones(self.out_features - row)])


class _PlainLinear(nn.Module):
    """What :class:`LoRALinear` needs of a layer whose class does not define it."""

    weight: Tensor

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def base_weight(self) -> Tensor:
        return self.weight


@functools.cache
def adapted(layer_class: Any) -> type[nn.Module]:
    """Return the class of ``layer_class``'s layers with adapters: of :class:`LoRALinear`, or of its ``adapted_by``."""
    mixin = getattr(layer_class, "adapted_by", LoRALinear)
    return type(f"LoRA{layer_class.__name__}", (mixin, layer_class, _PlainLinear), {"layer_class": layer_class})


def _new_adapted(layer_class: Any) -> nn.Module:
    cls = adapted(layer_class)
    return cls.__new__(cls)


def replace_linear(owner: nn.Module, name: str, new_class: Any, merged: nn.Parameter | None = None) -> Any:
    """Put a ``new_class``, with the adapters, in the place of a linear layer, with the same parameters (also if tied).

    Layers of other sizes than (in, out), such as stacked ones, have their constructor's arguments in ``sizes``.
    ``merged`` is a weight with the adapters merged: the new layer has it and no adapters.
    """
    old = getattr(owner, name)
    has_adapters = isinstance(old, AdaptedLayer) and merged is None
    if has_adapters:
        new_class = adapted(new_class)
    with torch.device("meta"):
        sizes = getattr(old, "sizes", None) or (old.in_features, old.out_features)
        new: Any = new_class(*sizes, bias=old.bias is not None)
    new.weight, new.bias = old.weight if merged is None else merged, old.bias
    if hasattr(old, "weight_fake_quantizer"):  # see toolkit.models.quantizer
        new.weight_fake_quantizer = old.weight_fake_quantizer
    if has_adapters:
        new.lora, new.scaling, new.dropout, new.dora = old.lora, old.scaling, old.dropout, old.dora
        new.dropout_bits, new.number = old.dropout_bits, old.number
    new.train(old.training)
    setattr(owner, name, new)
    return new


def _aligned(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pad the rank R of A, (R, in), and B, (out, R); see :mod:`toolkit.models.aligned`."""
    padding = aligned_size(a.size(0), a.device, matmul_dtype(a, dtype)) - a.size(0)
    return (F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))) if padding else (a, b)


def _addmm(y: Tensor, hidden: Tensor, b: Tensor) -> Tensor:
    """Return y + hidden @ b.T, rounded once, without a temporary of y's size."""
    return torch.addmm(y.flatten(0, -2), hidden.flatten(0, -2), b.t()).view_as(y)
