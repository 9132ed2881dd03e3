"""Low-rank adapters beside the model's linear layers.

A layer with adapters keeps the names of its frozen ``weight`` and ``bias``. Trainable parameters are under ``lora``:

| name | shape | initial value |
|---|---|---|
| ``transformer.h.0.attn.qkv.lora.query.A`` (``key``, ``value``) | (r, in) | uniform, +- 1 / sqrt(in) |
| ``transformer.h.0.attn.qkv.lora.query.B`` | (rows of that part, r) | 0 |
| ``transformer.h.0.attn.q_b.lora.query.A``, ``kv_b.lora.key.A`` ... (latent attention) | as above | as above |
| ``transformer.h.0.mlp.proj.lora.whole.A``, ``.B`` (every other layer) | (r, in), (out, r) | as above |
| ``....magnitude`` (DoRA) | (rows of that part,) | the norms of the rows of ``weight`` |

The adapters are fp32 for any base dtype; matrix products run in the base's compute dtype. The parts of a fused layer
are computed as one pair of matrices: A stacked, B block-diagonal, with zero rows for parts without an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.models.init import parameter_generator
from toolkit.models.lora_config import LoRAConfig

if TYPE_CHECKING:
    from toolkit.models.config import ModelConfig
    from toolkit.models.gpt import GPT

WHOLE = "whole"


class Adapter(nn.Module):
    """The trainable low-rank factors for a range of rows of a weight, in fp32."""

    def __init__(self, r: int, in_features: int, rows: range, dora: bool, device: torch.device) -> None:
        super().__init__()
        self.rows = rows
        options = {"dtype": torch.float32, "device": device}
        self.A = nn.Parameter(torch.zeros(r, in_features, **options))
        self.B = nn.Parameter(torch.zeros(len(rows), r, **options))
        if dora:
            self.magnitude = nn.Parameter(torch.ones(len(rows), **options))


class LoRAMixin:
    """Adds adapters to a linear layer class; comes before that class in the MRO.

    The class provides ``weight`` (out, in), ``bias``, ``forward``, ``project(x)`` (forward without the bias) and
    ``base_weight()`` (the weight in a floating-point dtype).
    """

    lora: nn.ModuleDict

    def add_adapters(self, config: LoRAConfig, parts: dict[str, range]) -> None:
        """Create the adapters of ``parts``: names and the rows of the weight they adapt, in ascending order."""
        self.scaling, self.dropout, self.dora = config.scaling, config.dropout, config.dora
        device = self.weight.device
        self.lora = nn.ModuleDict(
            {name: Adapter(config.r, self.in_features, rows, config.dora, device) for name, rows in parts.items()}
        )

    def share_adapters(self, other: LoRAMixin) -> None:
        """Share another layer's adapters."""
        self.lora, self.scaling, self.dropout, self.dora = other.lora, other.scaling, other.dropout, other.dora

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        if self.dora:
            return self._forward_dora(x)
        y = super().forward(x)
        hidden, b = self.low_rank(x, y.dtype)
        return _add_product(y, hidden, b)

    def low_rank(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (..., R) and (out, R), whose product is added to the layer's output; R is the sum of the ranks."""
        a, b = self._factors()
        return self._hidden(self._drop(x), a, dtype), b.to(dtype)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight`` (out, in) with the adapters merged, in fp32."""
        a, b = (factor.detach() for factor in self._factors())
        merged = torch.addmm(weight.float(), b, a, alpha=self.scaling)
        if self.dora:
            merged *= self._row_scales(merged.norm(dim=1)).detach()[:, None]
        return merged

    def _forward_dora(self, x: torch.Tensor) -> torch.Tensor:
        dropped = self._drop(x)
        plain = self.project(x)
        dropped_plain = plain if dropped is x else self.project(dropped)
        a, b = self._factors()
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            norms = torch.addmm(self.base_weight().float(), b, a, alpha=self.scaling).norm(dim=1)
        # Section 4.3 of the paper: the norms are constants. Scales are near 1, where bf16 has steps of 1/256: use fp32.
        y = self._row_scales(norms) * _add_product(
            dropped_plain, self._hidden(dropped, a, plain.dtype), b.to(plain.dtype)
        )
        if dropped_plain is not plain:
            y = y + (plain - dropped_plain)
        return (y if self.bias is None else y + self.bias).to(plain.dtype)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x

    def _hidden(self, dropped: torch.Tensor, a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.linear(dropped.to(dtype), a.to(dtype)) * self.scaling

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, in) and (out, R), fp32."""
        adapters = list(self.lora.values())
        if len(adapters) == 1 and len(adapters[0].rows) == self.out_features:
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

    def _row_scales(self, norms: torch.Tensor) -> torch.Tensor:
        """DoRA's scale of each row, (out,): magnitude / norm; 1 for rows without an adapter."""
        scales, row = [], 0
        for adapter in self.lora.values():
            scales += [norms.new_ones(adapter.rows.start - row)]
            scales += [adapter.magnitude / norms[adapter.rows.start : adapter.rows.stop]]
            row = adapter.rows.stop
        return torch.cat([*scales, norms.new_ones(self.out_features - row)])


class LoRALinear(LoRAMixin, nn.Linear):
    """A linear layer with adapters; shares weight and bias with the layer it replaces."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def base_weight(self) -> torch.Tensor:
        return self.weight


def add_lora(model: GPT, config: LoRAConfig, seed: int = 0) -> None:
    """Add adapters to the selected layers of a GPT, in place, and freeze everything else.

    On the meta device the adapters are meta tensors; elsewhere they are initialized from ``seed``.

    Raises:
        UserError: Adapters are requested for the MLPs of a model with experts.
    """
    if config.mlp and model.config.n_moe_layer:
        raise UserError("--lora_mlp true: adapters on experts are not supported; remove it")
    model.requires_grad_(False)
    for block in model.transformer.h:
        for name, rows_of in attention_rows(model.config).items():
            _adapt(block.attn, name, config, {part: rows for part, rows in rows_of.items() if getattr(config, part)})
        _adapt(block.attn, "proj", config, {WHOLE: config.projection})
        for name, layer in list(block.mlp.named_children()):
            if isinstance(layer, nn.Linear):
                _adapt(block.mlp, name, config, {WHOLE: config.mlp})
    _adapt(model, "lm_head", config, {WHOLE: config.head})
    adapters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    weights = dict(model.named_parameters(remove_duplicate=False))
    value_of = adapter_values(model, seed, weights.__getitem__)
    for name, parameter in adapters.items():
        if not parameter.is_meta:
            parameter.data.copy_(value_of(name, parameter.shape))


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return ".lora." in name


def draw_adapter(name: str, shape: torch.Size | tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the initial value of an adapter's ``A`` or ``B``, a pure function of (seed, name): fp32, on the CPU.

    A is uniform in +- 1 / sqrt(in), Kaiming initialization with a = sqrt(5), as in the paper's code. B is zero, so that
    the adapted model initially equals the base.
    """
    kind = name.rpartition(".")[2]
    assert kind in ("A", "B"), f"{name}: a magnitude is computed from the base weight, see adapter_values"
    if kind == "B":
        return torch.zeros(shape, device="cpu")
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=parameter_generator(name, seed))


def initial_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """DoRA's initial magnitudes, (rows,) fp32: the row norms of the base weight."""
    return torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)


def adapter_values(
    model: nn.Module, seed: int, weight_of: Callable[[str], torch.Tensor]
) -> Callable[[str, torch.Size], torch.Tensor]:
    """Return a function that maps an adapter parameter's name and shape to its initial value.

    Args:
        model: With adapters, before a strategy wraps its parameters; may be on the meta device.
        seed: Seed of the run.
        weight_of: Returns the unsharded base weight of a name such as ``transformer.h.0.attn.qkv.weight``; called
            only for DoRA's magnitudes.
    """
    rows = {name: module.rows for name, module in model.named_modules() if isinstance(module, Adapter)}

    def value_of(name: str, shape: torch.Size) -> torch.Tensor:
        adapter, _, kind = name.rpartition(".")
        if kind != "magnitude":
            return draw_adapter(name, shape, seed)
        weight = weight_of(adapter.partition(".lora.")[0] + ".weight")
        return initial_magnitude(weight[rows[adapter].start : rows[adapter].stop])

    return value_of


def attention_rows(config: ModelConfig) -> dict[str, dict[str, range]]:
    """Return the rows of queries, keys and values in the projections of attention, by layer name."""
    q, kv = config.n_head * config.head_size, config.n_query_groups * config.head_size
    if config.latent_attention is not None:
        k = config.n_head * config.latent_attention["qk_nope_head_dim"]
        keys_and_values = {"key": range(k), "value": range(k, k + config.n_head * config.value_size)}
        return {"q_b": {"query": range(q)}, "kv_b": keys_and_values}
    return {"qkv": {"query": range(q), "key": range(q, q + kv), "value": range(q + kv, q + 2 * kv)}}


def _adapt(owner: nn.Module, name: str, config: LoRAConfig, parts: dict[str, range | bool]) -> None:
    """Replace ``owner.name`` by a layer with adapters for ``parts``: ranges of rows, or True for all rows."""
    linear = getattr(owner, name)
    parts = {part: range(linear.out_features) if rows is True else rows for part, rows in parts.items() if rows}
    if not parts:
        return
    layer = LoRALinear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    layer.weight, layer.bias = linear.weight, linear.bias  # the same parameters: preserves ties
    layer.train(linear.training)
    layer.add_adapters(config, parts)
    setattr(owner, name, layer)


def _add_product(y: torch.Tensor, hidden: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y + hidden @ b.T, rounded once, without a second tensor of y's size."""
    return torch.addmm(y.flatten(0, -2), hidden.flatten(0, -2), b.t()).view_as(y)
