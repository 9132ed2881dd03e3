"""What a rank holds of a model under tensor and pipeline parallelism. Imports neither of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.distributed.names import canonical_name
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.private_torch import local_shard

if TYPE_CHECKING:
    from toolkit.distributed.pipeline import Pipeline


class Cut(NamedTuple):
    """A rank's part of a parameter.

    Args:
        shape: Shape of the complete parameter, as in files.
        dim: The divided dimension.
        sections: Sizes along ``dim`` of sections that are each divided: queries, keys and values of a fused layer.
        n_ranks: Number of ranks that share the parameter.
        rank: This rank among them.
    """

    shape: torch.Size
    dim: int
    sections: tuple[int, ...]
    n_ranks: int
    rank: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Start and stop in the complete parameter of each range along ``dim`` that the local tensor consists of."""
        ranges, start = [], 0
        for section in self.sections:
            part = section // self.n_ranks
            ranges.append((start + self.rank * part, start + (self.rank + 1) * part))
            start += section
        return ranges

    def take(self, whole: Tensor) -> Tensor:
        """Return the local tensor."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def gather(self, local: Tensor) -> Tensor:
        """Return the complete tensor. Collective over the tensor group."""
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.n_ranks)]
        dist.all_gather(parts, local.contiguous(), group=ranks.group("tensor"))
        whole = local.new_empty(self.shape)
        for rank, part in enumerate(parts):
            lengths = [section // self.n_ranks for section in self.sections]
            for (start, stop), values in zip(
                self._replace(rank=rank).ranges, part.split(lengths, self.dim), strict=True
            ):
                whole.narrow(self.dim, start, stop - start).copy_(values)
        return whole

    def rows(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Return the ranges that ``count`` local rows from ``first`` consist of.

        A range is its first row in the complete tensor, its offset among the ``count`` rows, and its length.
        """
        if self.dim:
            return [(first, 0, count)] if count else []
        ranges, at = [], 0
        for start, stop in self.ranges:
            begin, end = max(first, at), min(first + count, at + stop - start)
            if begin < end:
                ranges.append((start + begin - at, begin - first, end - begin))
            at += stop - start
        return ranges

    @property
    def columns(self) -> slice:
        """The columns of the complete tensor that the local tensor has."""
        return slice(*self.ranges[0]) if self.dim else slice(None)


def cuts_of(module: nn.Module) -> dict[str, Cut]:
    """Return the cut of each divided parameter of a model, by name; empty without tensor parallelism."""
    return module.execution.cuts if isinstance(module, GPT) else {}


def pipeline_of(module: nn.Module) -> Pipeline | None:
    """Return the pipeline of a rank's model; None without pipeline parallelism."""
    return module.execution.pipeline if isinstance(module, GPT) else None


def require_divisible(config: ModelConfig, size: int) -> None:
    """Check that a tensor parallel size divides everything that :func:`split_model` divides.

    Raises:
        UserError: names the sizes that do.
    """
    counts = {
        "attention heads": config.n_head,
        "key/value heads": config.n_query_groups,
        "hidden units of the MLP": config.intermediate_size,
    }
    if config.padded_vocab_size is not None:  # otherwise the tokenizer defines it later
        counts["rows of the embedding"] = config.padded_vocab_size
    for what, count in counts.items():
        if count % size:
            valid = [str(n) for n in range(1, config.n_head + 1) if not any(each % n for each in counts.values())]
            use = f"use {'one of ' if len(valid) > 1 else ''}{', '.join(valid)}"
            if count == config.padded_vocab_size:
                use += f", or set --model_config.padded_vocab_size {-(-count // size) * size}"
            name = config.name or "the model"
            raise UserError(f"--tensor_parallel_size {size}: does not divide the {count} {what} of {name}; {use}")


def reduce_gradients(module: nn.Module, device: torch.device) -> None:
    """Complete the gradients of what all ranks of a tensor group hold, with one all-reduce on ``device``.

    If the ranks use a parameter for different heads or rows, its gradient is the sum. Otherwise all ranks have the same
    gradient, and the mean makes it bit-equal (N4) even if a kernel is not deterministic.
    """
    cuts, gradients, sizes = cuts_of(module), list[Tensor](), list[int]()
    for name, parameter in module.named_parameters() if cuts else ():
        if canonical_name(name) not in cuts and parameter.grad is not None:
            gradients.append(local_shard(parameter.grad))
            sizes.append(1 if _is_shared_by_parts(canonical_name(name)) else ranks.layout().tensor)
    if gradients:  # shards may be offloaded
        ranks.divide_sums_(gradients, sizes, device, "tensor")


def _is_shared_by_parts(name: str) -> bool:
    """Whether each rank computes a part of the gradient: the QK-norm of all heads, xIELU's slopes of all hidden units,
    and A of a layer with some rows.
    """
    return ".norm_q." in name or ".norm_k." in name or name.endswith((".A", ".alpha_p", ".alpha_n"))
