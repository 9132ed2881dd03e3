"""Answer many prompts greedily, and compute log-probabilities of answers, with one model or on the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from toolkit.data.batch import NO_ROUNDING, Padding, batch_texts
from toolkit.data.chat.template import Encoding
from toolkit.distributed import ranks
from toolkit.inference.decode import Decoder
from toolkit.inference.generate import complete
from toolkit.inference.sampling import GREEDY

BATCH_SIZE = 16
"""Prompts, or answers, per forward pass. The same on any number of ranks, so that rounding is the same."""
T = TypeVar("T")
U = TypeVar("U")


class Sampled(NamedTuple):
    """An answer with the probabilities that the decoder computed."""

    tokens: list[int]
    """With the token that ends it."""
    log_probs: list[float]
    """Of each token, in nats, at the temperature."""
    has_ended: bool
    """False if it is cut off."""


class Answerer(NamedTuple):
    """A model that answers prompts.

    Args:
        model: In evaluation mode: complete, or on several ranks sharded or divided.
        device: Compute device.
        is_divided: Whether ranks answer different prompts; otherwise all compute all, together.
        is_sharded: Whether the ranks compute each forward pass together (S6).
        padding: Padding of batches of answers.
    """

    model: Any
    device: torch.device
    is_divided: bool = False
    is_sharded: bool = False
    padding: Padding = NO_ROUNDING

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        """Return the tokens that follow each prompt. ``options``: of :func:`complete`. Collective."""

        def answer(batch: Sequence[Tensor], of_all_ranks: Sequence[Tensor]) -> list[list[int]]:
            return complete(self.model, batch, sampling=GREEDY, **self._options(of_all_ranks), **options)

        return self._map([torch.tensor(ids) for ids in prompts], self._batch_size, answer)

    def sample(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], eos_ids: Collection[int], **options: Any
    ) -> list[Sampled]:
        """Return an answer to each prompt, sampled with its seed. ``options``: of :func:`complete`. Collective."""
        Seeded = tuple[Tensor, int]

        def sample(batch: Sequence[Seeded], of_all_ranks: Sequence[Seeded]) -> list[Sampled]:
            record: list[Decoder] = []
            ids, row_seeds = zip(*batch, strict=True)
            more = self._options([prompt for prompt, _ in of_all_ranks]) | options
            answers = complete(self.model, ids, eos_ids=eos_ids, seeds=row_seeds, record=record, **more)
            lengths = map(len, answers)
            rows = record[0].recorded()
            return [_end(*row, length, eos_ids) for row, length in zip(rows, lengths, strict=True)]

        pairs = list(zip(map(torch.tensor, prompts), seeds, strict=True))
        return self._map(pairs, self._batch_size, sample)

    @property
    def _batch_size(self) -> int:
        return BATCH_SIZE if self.model.is_row_independent else 1

    def _options(self, of_all_ranks: Sequence[Tensor]) -> dict[str, Any]:
        lockstep = of_all_ranks if self.is_divided and self.is_sharded else ()
        is_alone = self.is_divided and not self.is_sharded
        return {"lockstep": lockstep, "is_alone": is_alone, "notice": lambda line: None}

    @torch.no_grad()
    def log_probs(self, answers: Sequence[Encoding]) -> list[float]:
        """Return the log-probability of each answer in nats. Collective.

        Args:
            answers: Prompts with their answers, whose tokens have loss.
        """

        def compute(batch: Sequence[Encoding], of_all_ranks: Sequence[Encoding]) -> list[float]:
            inputs = batch_texts(batch, self.padding).inputs(self.device)
            log_probs, _ = self.model(**inputs, log_probs=True)
            return log_probs.sum(1).tolist()

        return self._map(answers, BATCH_SIZE, compute)

    def _map(self, items: Sequence[T], size: int, compute: Callable[[Sequence[T], Sequence[T]], list[U]]) -> list[U]:
        """Return the results for all items in order, on every rank.

        ``compute`` takes a batch, and the batches that all ranks compute at the same time.
        """
        parts = list(split(items, size))
        if not self.is_divided:
            return [result for part in parts for result in compute(part, part)]
        rank, n, results = ranks.global_rank(), ranks.world_size(), []
        for turn in split(parts, n):
            if rank < len(turn) or self.is_sharded:  # a rank without a batch takes part in the forward passes
                results.append(compute(turn[rank % len(turn)], [item for one in turn for item in one]))
        everywhere = ranks.all_gather_object(results)
        return [result for i in range(len(parts)) for result in everywhere[i % n][i // n]]


def _end(tokens: list[int], log_probs: list[float], length: int, eos_ids: Collection[int]) -> Sampled:
    """Return an answer of ``length`` tokens, with the next one if that ends it."""
    has_ended = length < len(tokens) and tokens[length] in eos_ids
    return Sampled(tokens[: length + has_ended], log_probs[: length + has_ended], has_ended)


def split(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return batches of at most ``size`` items."""
    return (items[i : i + size] for i in range(0, len(items), size))
