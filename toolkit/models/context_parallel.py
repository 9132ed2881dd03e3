"""Context parallelism: each rank computes some tokens of every row and gathers the keys and values of all tokens.

Attention then sees the complete keys, so any mask, window, soft cap or sink applies unchanged.

Each row is split into two chunks per rank. Rank r of n has chunks r and 2n - 1 - r: an early chunk, whose queries
attend to few keys, and a late one. Causal attention therefore costs all ranks the same. Source: Llama 3,
arXiv 2407.21783, section 3.3.2.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

# their names before torch 2.13 are deprecated
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_process_groups: dict[str, Any] = {}


class ContextGroup(NamedTuple):
    """The ranks that share the tokens of a row. Holds plain values only, so compiled blocks can take it.

    Args:
        rank: This rank's index in the group.
        size: Number of ranks.
        name: Name of the process group.
    """

    rank: int
    size: int
    name: str = ""

    @classmethod
    def of(cls, process_group: Any) -> "ContextGroup":
        _process_groups[process_group.group_name] = process_group
        return cls(dist.get_rank(process_group), dist.get_world_size(process_group), process_group.group_name)

    def split(self, tensor: Tensor) -> Tensor:
        """Return this rank's tokens, (..., T / size), of a tensor (..., T).

        Raises:
            ValueError: T is not a multiple of twice the number of ranks.
        """
        if tensor.size(-1) % (2 * self.size):
            raise ValueError(
                f"sequence length {tensor.size(-1)} is not a multiple of {2 * self.size}, two chunks per rank"
            )
        chunks = tensor.chunk(2 * self.size, dim=-1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim=-1)

    def chunk_starts(self, chunk_size: int) -> tuple[int, int]:
        """Return the index in the row of the first token of this rank's chunks."""
        return self.rank * chunk_size, (2 * self.size - 1 - self.rank) * chunk_size

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of complete rows, (B, groups, T, width), from (B, groups, T / size, width).

        The widths of keys and values may differ. The gradient is the sum over the ranks.
        """
        gathered = _gather(torch.cat((k, v), dim=-1), self.size, self.name)
        k, v = gathered.split((k.size(-1), v.size(-1)), dim=-1)
        return k, v


def gather_tokens(tensor: Tensor, size: int, group: str) -> Tensor:
    """All-gather (B, groups, T / size, width) to (B, groups, T, width) in the order of the row."""
    parts = tensor.new_empty((size, *tensor.shape))
    _all_gather(parts.flatten(0, 1), tensor.contiguous(), group=_process_groups[group])
    early, late = parts.chunk(2, dim=3)
    return torch.cat((early, late.flip(0))).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


def scatter_tokens(gradient: Tensor, size: int, group: str) -> Tensor:
    """Sum the gradients of :func:`gather_tokens`'s output over the ranks. Each rank gets the part of its tokens."""
    chunks = gradient.unflatten(2, (2 * size, -1)).permute(2, 0, 1, 3, 4)
    parts = torch.cat((chunks[:size], chunks[size:].flip(0)), dim=3).contiguous()
    summed = torch.empty_like(parts[0])
    _reduce_scatter(summed, parts.flatten(0, 1), group=_process_groups[group])
    return summed


# custom ops are opaque to torch.compile
_gather = torch.library.custom_op("toolkit::gather_context", gather_tokens, mutates_args=())
_scatter = torch.library.custom_op("toolkit::scatter_context", scatter_tokens, mutates_args=())
OPAQUE: dict[str, Any] = {"toolkit::gather_context": gather_tokens, "toolkit::scatter_context": scatter_tokens}


@_gather.register_fake
def _(tensor: Tensor, size: int, group: str) -> Tensor:
    B, groups, n, width = tensor.shape
    return tensor.new_empty((B, groups, size * n, width))


@_scatter.register_fake
def _(gradient: Tensor, size: int, group: str) -> Tensor:
    B, groups, n, width = gradient.shape
    return gradient.new_empty((B, groups, n // size, width))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.group = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _scatter(gradient, ctx.size, ctx.group), None, None


_gather.register_autograd(_backward, setup_context=_setup_context)
