"""Muon for stacked matrices and for matrices that are sharded by rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from toolkit.distributed.shards import RowSharding, sharding_of
from toolkit.optim.bf16 import chunks
from toolkit.private_torch import muon_learning_rate

STACK_NUMEL = 1 << 22
"""Maximum elements of the matrices that are orthogonalized together, so that small models need few kernels."""


class StackedMuon(torch.optim.Muon):
    """torch's Muon for stacked and for sharded matrices.

    ``rows`` in a group gives the rows per stacked matrix; each is orthogonalized and scaled separately.

    The momentum of a sharded matrix has its sharding. Each matrix is gathered on one rank of its shard group, which
    orthogonalizes it and scatters the update. Matrices are exchanged in batches of one per rank, the most expensive
    first. The matrices of a batch therefore have similar costs, and the total costs of two ranks differ by at most the
    cost of one matrix. In fp32 the update equals one process up to the rounding of the gradients; in bf16, as on CUDA,
    the iterations amplify that rounding.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient. ``closure`` is not supported."""
        assert closure is None
        sharded: dict[torch.dtype, list[_Matrix]] = {}
        for group in self.param_groups:
            unsharded: list[_Matrix] = []
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, sharding = self.state[weight], sharding_of(weight)
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad, memory_format=torch.preserve_format)
                matrix = _Matrix(weight, state["momentum_buffer"], group, sharding)
                if sharding is None:
                    unsharded.append(matrix)
                else:
                    sharded.setdefault(weight.grad.dtype, []).append(matrix)
            for matrices in chunks(unsharded, lambda m: m.weight.numel(), STACK_NUMEL):
                parts = _orthogonalized(matrices, [matrix.direction() for matrix in matrices])
                for matrix in matrices:
                    matrix.update(islice(parts, len(matrix.rows)))
        for matrices in sharded.values():
            matrices.sort(key=lambda matrix: -matrix.flops)
            n_ranks = len(matrices[0].shard_sizes)
            for i in range(0, len(matrices), n_ranks):
                _exchange(matrices[i : i + n_ranks])


@dataclass(frozen=True)
class _Matrix:
    """A matrix or its shard on this rank, with its momentum and the options of its group."""

    weight: Tensor
    momentum: Tensor
    options: dict[str, Any]
    sharding: RowSharding | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the unsharded matrix."""
        return self.weight.shape if self.sharding is None else self.sharding.shape

    @property
    def shard_sizes(self) -> list[int]:
        """Elements of each rank's shard; empty if the matrix is not sharded."""
        return [] if self.sharding is None else [self.sharding.numel(rank) for rank in range(self.sharding.size)]

    @property
    def rows(self) -> tuple[int, ...]:
        """Row counts of the stacked matrices."""
        rows = self.options.get("rows")
        # loading a checkpoint steps on a copy of a shard, which has no sharding
        return rows if rows and sum(rows) == self.shape[0] else (self.shape[0],)

    @property
    def flops(self) -> float:
        return sum(newton_schulz_flops(n, self.shape[1]) for n in self.rows)

    def direction(self) -> Tensor:
        """Update the momentum and return the update before orthogonalization."""
        gradient, momentum = self.weight.grad, self.options["momentum"]
        assert gradient is not None
        self.momentum.lerp_(gradient, 1 - momentum)
        return gradient.lerp(self.momentum, momentum) if self.options["nesterov"] else self.momentum

    def update(self, parts: Iterable[Tensor]) -> None:
        """Decay the weight and add the update. ``parts`` are this rank's rows of each stacked matrix."""
        options = self.options
        self.weight.mul_(1 - options["lr"] * options["weight_decay"])
        for target, part, n_rows in zip(self.split(self.weight), parts, self.rows, strict=True):
            lr = muon_learning_rate(options["lr"], options["adjust_lr_fn"], (n_rows, self.shape[1]))
            target.add_(part.to(target.device), alpha=-lr)

    def split(self, shard: Tensor) -> Iterator[Tensor]:
        """Yield this rank's rows of each stacked matrix."""
        start = 0 if self.sharding is None else -self.sharding.first_row(self.sharding.rank)
        for n_rows in self.rows:
            yield shard[max(start, 0) : max(start + n_rows, 0)]
            start += n_rows


def _exchange(matrices: list[_Matrix]) -> None:
    """Gather the i-th matrix on rank i, orthogonalize it there, and scatter the update. At most one per rank."""
    sharding = matrices[0].sharding
    assert sharding is not None
    own = matrices[sharding.rank] if sharding.rank < len(matrices) else None
    no_matrix = [0] * (sharding.size - len(matrices))
    sizes = [matrix.weight.numel() for matrix in matrices] + no_matrix  # of this rank's shards
    own_sizes = [0] * sharding.size if own is None else own.shard_sizes
    sent = torch.cat([matrix.direction().flatten() for matrix in matrices]).to(sharding.device)
    gathered = sent.new_empty(sum(own_sizes))
    dist.all_to_all_single(gathered, sent, own_sizes, sizes, group=sharding.group)
    del sent
    update = torch.empty_like(gathered, dtype=torch.float32 if sharding.device == "cpu" else torch.bfloat16)
    if own is not None:
        parts = update.view(own.shape).split(own.rows)
        for target, part in zip(parts, _orthogonalized([own], [gathered.view(own.shape)]), strict=True):
            target.copy_(part)
    del gathered
    received = update.new_empty(sum(sizes))
    dist.all_to_all_single(received, update, sizes, own_sizes, group=sharding.group)
    for matrix, shard in zip(matrices, received.split(sizes[: len(matrices)]), strict=True):
        matrix.update(matrix.split(shard.view_as(matrix.weight)))


def _orthogonalized(matrices: list[_Matrix], unsharded: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the orthogonalized parts of each unsharded matrix. Parts of the same shape are processed together."""
    parts = [part for m, matrix in zip(matrices, unsharded, strict=True) for part in matrix.split(m.rows)]
    results: dict[int, Tensor] = {}
    for shape in dict.fromkeys(part.shape for part in parts):
        same = [i for i, part in enumerate(parts) if part.shape == shape]
        stack = torch.stack([parts[i] for i in same]) if len(same) > 1 else parts[same[0]][None]
        results |= zip(same, _orthogonalize(stack, matrices[0].options), strict=True)
    return (results[i] for i in range(len(parts)))


def _orthogonalize(stack: Tensor, options: dict[str, Any]) -> Tensor:
    """Orthogonalize matrices by quintic Newton-Schulz iteration (Jordan et al. 2024).

    In fp32 on a CPU, where bf16 matmuls are 40 times slower without hardware support; otherwise in bf16.
    """
    a, b, c = options["ns_coefficients"]
    is_tall = stack.size(1) > stack.size(2)
    update = (stack.mT if is_tall else stack).to(torch.float32 if stack.is_cpu else torch.bfloat16)
    update = update / update.norm(dim=(1, 2), keepdim=True).clamp(min=options["eps"])
    for _ in range(options["ns_steps"]):
        gram = torch.bmm(update, update.mT)
        update = torch.baddbmm(update, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), update, beta=a)
    return update.mT if is_tall else update


def newton_schulz_flops(n_rows: int, n_columns: int, iterations: int = 1) -> float:
    """Return the FLOPs to orthogonalize a matrix.

    An iteration computes G = X X^T, G^2 and (b G + c G^2) X for an r x c matrix X with r <= c.
    """
    r, c = sorted((n_rows, n_columns))
    return float(iterations * (4 * r * r * c + 2 * r**3))
