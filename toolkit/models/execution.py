"""How a process computes a model, apart from its architecture: decided by the strategy, the compiler and the seed."""

from dataclasses import dataclass, field
from typing import Any

from toolkit.config.options import DEFAULT_SEED
from toolkit.models.context_parallel import ContextGroup
from toolkit.models.cross_entropy import CrossEntropy


@dataclass(frozen=True)
class Execution:
    """How a GPT is computed. Set by :meth:`toolkit.models.gpt.GPT.execute_with`.

    Args:
        seed: Seed of the initial weights and of random numbers that a subclass draws in training.
        uniform_length: Build masks and rotary embeddings for rows of this many tokens, so that compiled blocks share
            one graph for all lengths. 0 picks the fastest form per batch.
        uses_kernels: Use the kernels of :mod:`toolkit.models.attention_kernels` instead of masks where supported.
        compiled_loss: Whether to use a compiled cross-entropy kernel if available, or the function to use.
        reusable_loss: Whether the backward pass runs through the loss several times.
        autocasts_residual: Whether the residual stream has autocast's dtype instead of the embedding's.
        context: With context parallelism, the ranks that share the tokens of a row. A forward pass with labels takes
            complete rows, computes this rank's tokens, and returns their loss. Others compute all tokens on every rank.
        tensor_ranks: Number of ranks that divide each layer, and with it the attention heads.
        cuts: This rank's part of each divided parameter, by name, see :mod:`toolkit.distributed.tensor_parallel`.
        neftune_alpha: See :class:`toolkit.models.neftune.SampleNoise`; 0 for none.
        pipeline: With pipeline parallelism, the stages, whose ``forward`` replaces the model's. See
            :mod:`toolkit.distributed.pipeline`.
    """

    seed: int = DEFAULT_SEED
    uniform_length: int = 0
    uses_kernels: bool = True
    compiled_loss: bool | CrossEntropy = False
    reusable_loss: bool = False
    autocasts_residual: bool = False
    context: ContextGroup | None = None
    tensor_ranks: int = 1
    cuts: dict[str, Any] = field(default_factory=dict)
    neftune_alpha: float = 0.0
    pipeline: Any = None
