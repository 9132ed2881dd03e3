"""Tensor parallelism: each rank of a tensor group holds and computes a part of every layer (Megatron-LM, Shoeybi et al.
2019, arXiv 1909.08053).

| layer | each rank's part | all-reduced |
|---|---|---|
| attention | some of the query, key and value heads, and the columns of ``proj`` that read them | the output |
| MLP | some of the hidden units | the output |
| embedding, head | some of the vocabulary | the embedded tokens; per chunk of the loss, maximum, sum and target |

The gradient of each layer's input is all-reduced, too. Parameters are plain tensors of the local size, which FSDP2
shards over the data-parallel ranks. :class:`Cut` records where a local tensor belongs in the complete one.
Other parameters (norms, biases of outputs) are equal on all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from toolkit.distributed.model_parts import Cut, require_divisible
from toolkit.models.attention import CausalSelfAttention
from toolkit.models.cross_entropy import cross_entropy_
from toolkit.models.gpt import GPT
from toolkit.models.init import ParameterValue
from toolkit.models.lora_layers import LoRALinear, replace_linear
from toolkit.models.mlp import GptNeoxMLP, LLaMAMLP
from toolkit.models.norm import LayerNormPerHead

_COLUMN_LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    CausalSelfAttention: ("qkv",), LLaMAMLP: ("fc_1", "fc_2"), GptNeoxMLP: ("fc",)
}  # fmt: skip
"""Layers whose rows (outputs) are divided, by module class. The layer ``proj`` of each reads them: its columns are."""


def split_model(model: GPT, size: int, rank: int = 0, group: Any = None) -> Callable[[ParameterValue], ParameterValue]:
    """Divide a model on the meta device in place: this rank computes its part of each layer.

    Args:
        size: Number of ranks of the tensor group.
        rank: This rank in the group.
        group: The process group; None for a model that only estimates memory and time: it communicates nothing.

    Returns:
        A function that makes a function of name and shape return this rank's part of a parameter instead of all of it.
    """
    require_divisible(model.config, size)
    cuts = _Split(model, size, rank, group).layers()

    def part_of(value_of: ParameterValue) -> ParameterValue:
        return lambda name, shape: (
            cuts[name].take(value_of(name, cuts[name].shape)) if name in cuts else value_of(name, shape)
        )

    return part_of


class _Split:
    """Divides the layers of a model. Arguments as in :func:`split_model`."""

    def __init__(self, model: GPT, size: int, rank: int, group: Any) -> None:
        self.model, self.size, self.rank, self.group = model, size, rank, group
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters remain one
        self._cuts: dict[nn.Parameter, Cut] = {}

    def layers(self) -> dict[str, Cut]:
        """Divide all layers. Return the cuts by name."""
        for module in list(self.model.modules()):
            for kind, names in _COLUMN_LAYERS.items():
                if isinstance(module, kind):
                    for name in names:
                        self._columns(getattr(module, name), module)
                    self._rows(module)
                    module.register_forward_pre_hook(lambda module, args: (copy(args[0], self.group), *args[1:]))
            if isinstance(module, CausalSelfAttention):
                self._attention(module)
        embedding, head = self.model.transformer.wte, self.model.lm_head
        self._columns(head)
        self._parameter(embedding, "weight")
        size, width = embedding.weight.shape
        local = _Embedding(size, width, device="meta")
        local.weight, local.group, local.first = embedding.weight, self.group, self.rank * size
        self.model.transformer.wte = local
        head.register_forward_hook(self._gather_logits)
        self.model.transformer.ln_f.register_forward_hook(lambda module, args, output: copy(output, self.group))
        loss = partial(cross_entropy_, kernel=partial(_loss_and_grad_, self.group, local.first, size))
        parameters = self.model.named_parameters(remove_duplicate=False)
        cuts = {name: self._cuts[parameter] for name, parameter in parameters if parameter in self._cuts}
        self.model.execute_with(tensor_ranks=self.size, cuts=cuts, compiled_loss=loss)
        return cuts

    def _parameter(self, owner: nn.Module, key: str, dim: int = 0, sections: tuple[int, ...] = ()) -> None:
        """Replace a parameter by a meta tensor of the local size, and record its cut."""
        old = getattr(owner, key)
        if old is None:
            return
        if old not in self._replaced:
            shape = [n // self.size if i == dim else n for i, n in enumerate(old.shape)]
            self._replaced[old] = new = nn.Parameter(old.new_empty(shape), requires_grad=old.requires_grad)
            self._cuts[new] = Cut(old.shape, dim, sections or (old.size(dim),), self.size, self.rank)
        setattr(owner, key, self._replaced[old])

    def _columns(self, layer: nn.Linear, owner: nn.Module | None = None) -> None:
        """Divide the rows of a layer's weight."""
        sections = owner.stacked_rows[1] if isinstance(owner, CausalSelfAttention) else ()
        self._parameter(layer, "weight", 0, sections)
        self._parameter(layer, "bias", 0, sections)
        layer.out_features //= self.size
        for adapter in layer.adapters if isinstance(layer, LoRALinear) else ():
            self._parameter(adapter, "B")
            if layer.dora:
                self._parameter(adapter, "magnitude")
            adapter.rows = range(adapter.rows.start // self.size, adapter.rows.stop // self.size)

    def _rows(self, owner: nn.Module) -> None:
        """Divide the columns of the weight of ``owner.proj``, and let the layer sum over the group."""
        layer = replace_linear(owner, "proj", _RowLinear)
        layer.group = self.group
        self._parameter(layer, "weight", 1)
        layer.in_features //= self.size
        for adapter in layer.adapters if isinstance(layer, LoRALinear) else ():
            self._parameter(adapter, "A", 1)

    def _attention(self, attention: CausalSelfAttention) -> None:
        attention.n_head //= self.size
        attention.n_groups //= self.size
        if attention.sinks is not None:
            self._parameter(attention, "sinks")
        for norm in (attention.norm_q, attention.norm_k):
            if isinstance(norm, LayerNormPerHead):
                self._parameter(norm, "weight")
                norm.heads //= self.size
                norm.normalized_shape = tuple(norm.weight.shape)

    def _gather_logits(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        width = output.size(-1)
        return reduce(F.pad(output, (self.rank * width, (self.size - 1 - self.rank) * width)), self.group)


class _RowLoRALinear(LoRALinear):
    """Adds adapters to :class:`_RowLinear`. Their A also has a part of the columns."""

    group: Any

    def _hidden(self, dropped: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
        return reduce(super()._hidden(dropped, a, dtype), self.group)

    def _row_norms(self, a: Tensor, b: Tensor) -> Tensor:
        return reduce(super()._row_norms(a, b).square(), self.group).sqrt()


class _RowLinear(nn.Linear):
    """A linear layer with a part of the columns. The products are summed over the group, then the bias is added."""

    adapted_by = _RowLoRALinear
    group: Any

    def project(self, x: Tensor) -> Tensor:
        return reduce(F.linear(x, self.weight), self.group)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Embedding(nn.Embedding):
    """An embedding with the rows of the tokens from ``first`` on."""

    group: Any
    first: int

    def forward(self, input: Tensor) -> Tensor:
        ids, is_elsewhere = _local_ids(input, self.first, self.weight.size(0))
        y = F.embedding(ids, self.weight)
        return reduce(y.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.group)


def _loss_and_grad_(
    group: Any, first: int, size: int, logits: Tensor, at: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """:data:`toolkit.models.cross_entropy.LossKernel` over a vocabulary of which this rank has ``size`` tokens from
    ``first``. Exact for any loss.
    """
    logits -= _all_reduce(logits.amax(1, keepdim=True), group, dist.ReduceOp.MAX)
    at, is_elsewhere = _local_ids(at, first, size)
    targets = logits.gather(1, at).masked_fill_(is_elsewhere, 0)
    exponentials = logits.exp_()
    total, targets = _all_reduce(torch.stack((exponentials.sum(1, keepdim=True), targets)), group)
    losses = (total.log() - targets).squeeze(1)
    if needs_grad:
        # one element per row: deterministic
        exponentials.div_(total).scatter_add_(1, at, is_elsewhere.to(logits.dtype) - 1)
    return exponentials, losses


def _local_ids(ids: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens among the ``size`` tokens from ``first``, and a mask of the others, with index 0."""
    ids = ids - first
    is_elsewhere = (ids < 0) | (ids >= size)
    return ids.masked_fill(is_elsewhere, 0), is_elsewhere


def copy(x: Tensor, group: Any) -> Tensor:
    """Return x. Its gradient is summed over the group, because each rank computes with a part of a layer."""
    return x if group is None else _Copy.apply(x, group)


def reduce(x: Tensor, group: Any) -> Tensor:
    """Return the sum of x over the group. The gradient is the output's, which all ranks have."""
    return x if group is None else _Reduce.apply(x, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return _all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _all_reduce(x: Tensor, group: Any, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(x, operation, group)
    return x
