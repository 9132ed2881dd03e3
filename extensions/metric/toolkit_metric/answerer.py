"""Answer many prompts greedily, and compute log-probabilities of answers, with one model or on the ranks of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
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
SAMPLED_ROWS, CACHE_BYTES = 64, 4 << 30
"""The most answers that are sampled in a forward pass, and the most bytes of their KV cache."""
T = TypeVar("T")
U = TypeVar("U")
_GRAPH_SHARE = 0.25  # of a device's memory that must be free for a CUDA graph


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
        is_sharded: Whether the weights are sharded; the ranks then compute each forward pass together (S6).
        gathers_weights: Whether to gather sharded weights once per call instead. It needs memory for all weights.
        padding: Padding of batches of answers.
    """

    model: Any
    device: torch.device
    is_divided: bool = False
    is_sharded: bool = False
    gathers_weights: bool = False
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

        if not prompts:
            return []
        # equally many batches on each rank, of equal sizes, of prompts of similar lengths
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        row_bytes = self.model.make_cache(1, len(prompts[order[-1]]) + options["max_new_tokens"]).nbytes
        rows = sampled_rows(row_bytes) if self.model.is_row_independent else 1
        n_ranks = ranks.world_size() if self.is_divided else 1
        size = math.ceil(len(prompts) / (n_ranks * math.ceil(len(prompts) / (n_ranks * rows))))
        pairs = [(torch.tensor(prompts[i]), seeds[i]) for i in order]
        answers = dict(zip(order, self._map(pairs, size, sample), strict=True))
        return [answers[i] for i in range(len(prompts))]

    @property
    def _is_in_lockstep(self) -> bool:
        return self.is_sharded and not self.gathers_weights

    @property
    def _batch_size(self) -> int:
        return BATCH_SIZE if self.model.is_row_independent else 1

    def _options(self, of_all_ranks: Sequence[Tensor]) -> dict[str, Any]:
        lockstep = of_all_ranks if self.is_divided and self._is_in_lockstep else ()
        is_alone = self.is_divided and not self._is_in_lockstep
        has_graph = not self.is_sharded and _has_room(self.device)  # FSDP's hooks cannot be captured
        return {"lockstep": lockstep, "is_alone": is_alone, "cuda_graph": has_graph, "notice": lambda line: None}

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
        from toolkit.distributed.fsdp import gathered_weights

        parts, results = list(split(items, size)), []
        rank, n = (ranks.global_rank(), ranks.world_size()) if self.is_divided else (0, 1)
        with gathered_weights(self.model) if self.gathers_weights else nullcontext():
            for turn in split(parts, n):
                if rank < len(turn) or self._is_in_lockstep:  # a rank without a batch takes part in the forward passes
                    results.append(compute(turn[rank % len(turn)], [item for one in turn for item in one]))
        everywhere = ranks.all_gather_object(results) if self.is_divided else [results]
        return [result for i in range(len(parts)) for result in everywhere[i % n][i // n]]


def _end(tokens: list[int], log_probs: list[float], length: int, eos_ids: Collection[int]) -> Sampled:
    """Return an answer of ``length`` tokens, with the next one if that ends it."""
    has_ended = length < len(tokens) and tokens[length] in eos_ids
    return Sampled(tokens[: length + has_ended], log_probs[: length + has_ended], has_ended)


def sampled_rows(row_bytes: int) -> int:
    """Return how many answers to sample in a forward pass, if each needs a KV cache of ``row_bytes``."""
    return max(1, min(SAMPLED_ROWS, CACHE_BYTES // row_bytes))


def _has_room(device: torch.device) -> bool:
    """Whether a CUDA device has memory for a CUDA graph."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free > _GRAPH_SHARE * total


def split(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return batches of at most ``size`` items."""
    return (items[i : i + size] for i in range(0, len(items), size))
