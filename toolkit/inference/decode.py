"""Decoding loop: prefill the prompts, then run one forward pass per token for all rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from toolkit.data.base import Report
from toolkit.distributed import ranks
from toolkit.distributed.device import without_cudnn_attention
from toolkit.inference.cuda_graph import capture
from toolkit.inference.sampling import Sampling, draw_uniforms, require_finite, sample
from toolkit.models.gpt import GPT, quantizer_of
from toolkit.models.kv_cache import KVCache

PREFILL = 512  # prompt tokens per forward pass, to bound the memory of the activations
READ_EVERY = 8  # tokens per synchronization with a CUDA device
_KEPT = 0.75  # of the rows; if fewer are left, the others are dropped, which copies the KV cache
_MIN_REPLAYS = 16  # fewer steps are not worth a CUDA graph
_without_graph: WeakSet[GPT] = WeakSet()  # models whose CUDA graph has failed


class Decoder:
    """Prompts and new tokens of a batch, on the device. A step does not synchronize with the host.

    Args:
        model: See :func:`toolkit.inference.generate.generate_batch`.
        cache: An empty KV cache, or one that holds a prefix of the single prompt.
        prompts: Token ids of each prompt, (T,) int64, T >= 1.
        count: Maximum number of new tokens.
        sampling: How to choose the tokens.
        seeds: Sampling seed of each row.
        width: Minimum number of columns of the prompts.
        is_alone: Whether other ranks decode other prompts; otherwise all take the tokens of rank 0.
        with_log_probs: Whether to record the log-probability of each token, at the temperature.

    Attributes:
        ids: (B, width + count) int64: the prompts, padded on the left to ``width``, then the new tokens.
        position: (1,) int64: the column of the last token.
        log_probs: (B, width + count) fp32, in nats; None unless recorded.
    """

    def __init__(
        self,
        model: GPT,
        cache: KVCache,
        prompts: Sequence[Tensor],
        count: int,
        sampling: Sampling,
        seeds: Sequence[int | None],
        width: int = 0,
        is_alone: bool = False,
        with_log_probs: bool = False,
    ) -> None:
        self.model, self.cache, self.lengths = model, cache, [len(prompt) for prompt in prompts]
        self.count, self.is_together = count, ranks.world_size() > 1 and not is_alone
        self.width, device = max(width, *self.lengths), cache.device
        self._rows = list(range(len(prompts)))  # that are computed
        self._index: Tensor | None = None  # the same, unless all
        ids = pad_sequence(list(prompts), batch_first=True, padding_side="left")
        ids = F.pad(ids, (self.width - ids.size(1), count))
        self.ids, self.position = ids.to(device), torch.tensor([self.width - 1], device=device)
        starts = [self.width - length for length in self.lengths]
        cache.starts = torch.tensor(starts, device=device) if any(starts) else None
        cache.prompt, cache.seed = self.ids[:, : self.width], seeds[0] or 0
        self.log_probs = torch.zeros(self.ids.shape, dtype=torch.float32, device=device) if with_log_probs else None
        self._sampling, self._uniforms = sampling, None
        if sampling.temperature != 0:
            uniforms = F.pad(draw_uniforms(seeds, count), (self.width, 0))  # a number for each column of ids
            self._uniforms = uniforms.to(torch.float32 if device.type == "mps" else torch.float64).to(device)

    def prefill(self, done: int) -> None:
        """Fill the KV cache with the prompts and ``done`` new tokens, and sample the next token.

        Cached tokens are recomputed if these lengths need other longrope factors.
        """
        original_max, cache = self.model.config.original_max_position, self.cache
        lengths = [length + done for length in self.lengths]
        if original_max is not None:
            long_rows = [length > original_max for length in lengths]
            if long_rows != (cache.long_rows or [cache.length > original_max] * len(lengths)):
                cache.truncate(0)
            cache.long_rows = long_rows
            cache.sequence_length = lengths[0]
            if len(lengths) > 1:
                cache.sequence_length = torch.tensor(lengths, device=self.ids.device)[:, None]
        for chunk in self.ids[:, cache.length : self.width + done].split(PREFILL, dim=1):
            logits = self._logits(chunk)
        self._append(logits)

    def step(self) -> Tensor:
        """Sample the next token of each row and return the logits, (B, padded_vocab_size)."""
        # a nonfinite row is reported when its token is read
        logits = self._logits(self._busy(self.ids.index_select(1, self.position)).clamp(min=0))
        self._append(logits)
        return logits

    def drop(self, has_ended: Sequence[bool]) -> None:
        """Stop computing the rows that have ended, if they are many."""
        busy = [i for i, row in enumerate(self._rows) if not has_ended[row]]
        is_fixed = self.cache.position is not None or self.model.config.original_max_position is not None
        if not is_fixed and len(busy) < _KEPT * len(self._rows):
            self.cache.select(busy)
            self._rows = [self._rows[i] for i in busy]
            self._index = torch.tensor(self._rows, device=self.ids.device)

    def rewind(self, done: int) -> None:
        """Reset the position to ``done`` new tokens and zero keys and values from there on."""
        end = self.width + done - 1
        self.position.fill_(end)
        for tensor in self.cache.tensors:
            tensor[:, :, end:] = 0

    def steps_with_fixed_factors(self, done: int) -> int:
        """Return the steps before a row exceeds longrope's original context; 0 means that prefill is needed."""
        original_max = self.model.config.original_max_position
        if original_max is None:
            return self.ids.size(1)
        until = [original_max + 1 - length - done for length in self.lengths]
        return min((n for n in until if n >= 0), default=self.ids.size(1))

    def read(self, done: int, count: int) -> list[list[int]]:
        """Wait for new tokens and return them by column, from rank 0. Raise GuardError for nonfinite logits."""
        columns = self.ids[:, self.width + done : self.width + done + count]
        tokens = columns.t().tolist()
        if self.is_together:
            tokens = ranks.broadcast_from_rank0(tokens)
            columns.copy_(torch.tensor(tokens).t())
        for column in tokens:
            require_finite(column)
        return tokens

    def recorded(self) -> list[tuple[list[int], list[float]]]:
        """Return the new tokens of each row and their log-probabilities, also those after a token that ends the row."""
        assert self.log_probs is not None
        columns = slice(self.width, int(self.position) + 1)
        return list(zip(self.ids[:, columns].tolist(), self.log_probs[:, columns].tolist(), strict=True))

    def _logits(self, ids: Tensor) -> Tensor:
        return self.model(ids, kv_cache=self.cache, logits_to_keep=1)[:, -1]

    def _append(self, logits: Tensor) -> None:
        self.position += 1
        uniform = None if self._uniforms is None else self._busy(self._uniforms.index_select(1, self.position))[:, 0]
        tokens = sample(logits, self._sampling, vocab_size=self.model.config.vocab_size, uniform=uniform)
        self.ids.index_copy_(1, self.position, self._of_all(tokens))
        if self.log_probs is not None:
            scaled = logits[:, : self.model.config.vocab_size].float() / (self._sampling.temperature or 1.0)
            values = scaled.log_softmax(-1).gather(1, tokens.clamp(min=0)[:, None])
            self.log_probs.index_copy_(1, self.position, self._of_all(values[:, 0]))

    def _busy(self, column: Tensor) -> Tensor:
        return column if self._index is None else column[self._index]

    def _of_all(self, values: Tensor) -> Tensor:
        """Return a column, (B, 1), with the values of the rows that are computed."""
        if self._index is not None:
            values = values.new_zeros(len(self.ids)).index_copy(0, self._index, values)
        return values[:, None]


def has_fixed_shapes(model: GPT, device: torch.device) -> bool:
    """Whether to decode with a KV cache of fixed shape, for a CUDA graph. A growing cache is faster on a CPU."""
    # expert matrix products in other dtypes synchronize with the host (torch 2.13), which cannot be captured
    is_captured = not model.config.n_moe_layer or model.get_parameter("transformer.wte.weight").dtype == torch.bfloat16
    return device.type == "cuda" and is_captured and model.is_row_independent


def tokens_per_read(device: torch.device) -> int:
    """Return the number of tokens per synchronization with the host. Tokens after a stop token are dropped."""
    return READ_EVERY if device.type == "cuda" else 1


def fix_shapes(
    model: GPT,
    cache: KVCache,
    position: Tensor,
    step: Callable[[], Tensor],
    undo: Callable[[], None],
    notice: Report,
    graphs: list[Any],
) -> Callable[[], object] | None:
    """Return the step as a CUDA graph with a fixed-shape KV cache; None if that has failed for this model.

    Args:
        model: The model.
        cache: The KV cache that the step appends to.
        position: The column of the step's tokens, (1,) int64. The step adds 1.
        step: Computes the logits of one token per row.
        undo: Undoes a step, except for the cache's length and recurrent states.
        notice, graphs: See :func:`toolkit.inference.cuda_graph.capture`.
    """
    if model in _without_graph:
        return None
    cache.save()

    def undo_step() -> None:
        undo()
        cache.restore()

    expected = step()
    undo_step()
    cache.position = position
    replay = capture(step, undo_step, expected, notice, graphs)
    if replay is None:
        _without_graph.add(model)
        cache.position = None
    return replay


# not inference_mode: cached tensors of the model may later be used in training, which rejects inference tensors
@torch.no_grad()
def decode(decoder: Decoder, notice: Report, cuda_graph: bool) -> Generator[list[int], None, None]:
    """Yield the next token of each row ``decoder.count`` times, without stopping at end-of-sequence tokens.

    Other arguments: see :func:`toolkit.inference.generate.generate_batch`. When the caller stops, the KV cache holds
    the yielded tokens except the last; with recurrent states it may hold fewer, see :meth:`KVCache.truncate`.
    """
    model, cache, count = decoder.model, decoder.cache, decoder.count
    device = decoder.ids.device
    step: Callable[[], object] = decoder.step
    done = n_yielded = 0
    # weights that are quantized in each forward pass: once for all tokens
    held: Any = quantizer_of(model.config).hold(model) if model.config.qat else nullcontext()
    try:
        while done < count:
            with without_cudnn_attention(), held:  # the length of the cache changes
                until = decoder.steps_with_fixed_factors(done)
                if done == 0 or until == 0:
                    cache.position, n = None, 1
                    decoder.prefill(done)
                    step, until = decoder.step, min(count - done - 1, decoder.steps_with_fixed_factors(done + 1))
                    is_worth_it = cuda_graph and not decoder.is_together and until >= _MIN_REPLAYS
                    if is_worth_it and has_fixed_shapes(model, device):
                        undo = partial(decoder.rewind, done + 1)
                        replay = fix_shapes(model, cache, decoder.position, decoder.step, undo, notice, [])
                        step = replay or step
                else:
                    n = min(1 if decoder.is_together else tokens_per_read(device), count - done, until)
                    if n > 1 and len(decoder.lengths) == 1:
                        cache.save()  # the caller may stop within the group and continue from there
                    if cache.position is not None:  # a graph's replay runs no Python code
                        cache.advance(n)  # before it: an interrupted group is truncated
                    for _ in range(n):
                        step()
            for tokens in decoder.read(done, n):
                n_yielded += 1
                yield tokens
            done += n
    finally:
        del held  # an exception's traceback keeps this frame
        cache.position = cache.sequence_length = None
        cache.truncate(min(cache.length, decoder.width + n_yielded - 1))
