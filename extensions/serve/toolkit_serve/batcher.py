"""Continuous batching: requests join and leave the batch between decoding steps."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.distributed.device import without_cudnn_attention
from toolkit.errors import GuardError
from toolkit.inference.decode import PREFILL
from toolkit.inference.sampling import Sampling, draw_uniforms, require_finite, sample
from toolkit.models.gpt import GPT

_SPARE_COLUMNS = 64  # the cache is moved to the left once in so many steps, not in each


class NewToken(NamedTuple):
    """A sampled token.

    Args:
        id: Its id.
        log_prob: Its log-probability in nats, from the unmodified logits; 0 unless requested.
        top: Ids and log-probabilities of the most likely tokens, if requested.
    """

    id: int
    log_prob: float = 0.0
    top: Sequence[tuple[int, float]] = ()


@dataclass
class Request:
    """A prompt to continue.

    Args:
        ids: Token ids of the prompt, at least one.
        max_new_tokens: Maximum number of new tokens. Prompt and new tokens must fit the batcher's ``max_length``.
        sampling: Sampling settings.
        seed: Sampling seed; None for torch's default generator.
        eos_ids: End-of-sequence tokens, which are not emitted.
        n_top: Number of most likely tokens to emit with each token; None: without log-probabilities.
        emit: Called in the batcher's thread with each token; last with "stop" (an end-of-sequence token), "length"
            (``max_new_tokens`` reached) or an exception.
    """

    ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int | None = None
    eos_ids: Collection[int] = ()
    n_top: int | None = None
    emit: Callable[[NewToken | str | Exception], object] = print
    is_done: bool = False
    """Set it from any thread to leave the batch."""
    tokens: list[int] = field(default_factory=list)
    uniforms: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the answer so far."""
        return len(self.ids) + len(self.tokens)

    def end(self, reason: str | Exception) -> None:
        """Emit the end of the answer."""
        self.is_done = True
        with suppress(RuntimeError):  # the receiver's event loop is closed
            self.emit(reason)


class Batcher(threading.Thread):
    """A thread that decodes up to ``n_rows`` requests together.

    Each answer equals :func:`toolkit.inference.generate.generate` for its prompt and seed, up to rounding in matrix
    products, whatever other requests are in the batch. The prompt of a joining request is prefilled alone, directly
    into a row of the KV cache, left-padded: all rows end at the same column.

    Args:
        model: See :func:`toolkit.inference.generate.generate_batch`. If its rows are not independent, it gets one row.
        n_rows: Maximum number of requests in the batch.
        max_length: Maximum number of tokens of a request's prompt and answer.

    Attributes:
        waiting: Put requests here. None ends the thread after the current step.
        running: The requests in the batch.
    """

    def __init__(self, model: GPT, n_rows: int, max_length: int) -> None:
        super().__init__(daemon=True, name="batcher")
        self.model, self.n_rows = model, n_rows if model.is_row_independent else 1
        self.waiting: queue.Queue[Request | None] = queue.Queue()
        self.running: list[Request] = []
        self.max_length = max_length
        self._cache = model.make_cache(self.n_rows, max_length + _SPARE_COLUMNS)
        self._device = self._cache[0].keys.device
        self._starts: list[int] = []  # first column of each row
        self._end = 0  # column after the last of all rows

    @torch.no_grad()
    def run(self) -> None:
        with without_cudnn_attention():  # the length of the cache changes
            while True:
                self._remove_done()
                while len(self.running) < self.n_rows and (not self.running or not self.waiting.empty()):
                    if (request := self.waiting.get()) is None:
                        return
                    self._join(request)
                self._step()

    def stop(self) -> None:
        """End the running requests and the thread."""
        for request in list(self.running):
            request.is_done = True
        self.waiting.put(None)
        self.join(timeout=10)

    @property
    def cache_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._cache.tensors)

    def _join(self, request: Request) -> None:
        """Prefill a request alone, with the tokens that it has, and sample its next token."""
        if request.is_done:
            return
        ids = torch.tensor([request.ids + request.tokens], device=self._device)
        try:
            if request.sampling.temperature and request.uniforms is None:
                request.uniforms = draw_uniforms([request.seed], request.max_new_tokens)[0]
            if ids.size(1) > self._end:
                self._move_columns(ids.size(1) - self._end)
            row, start = len(self.running), self._end - ids.size(1)
            for tensor in self._cache.tensors:  # a softmax weight of 0 does not mask the NaN of an earlier request
                tensor[row, :, :start] = 0
            self._cache.prompt, self._cache.seed, self._cache.state = ids, request.seed or 0, {}
            cache = self._cache.view(slice(row, row + 1), start, 0)
            cache.sequence_length = ids.size(1)
            for chunk in ids.split(PREFILL, dim=1):
                logits = self.model(chunk, kv_cache=cache, logits_to_keep=1)[:, -1]
            self._append([request], logits)
        except Exception as error:  # the request fails, the others continue
            _report(error)
            request.end(error)
        else:
            self.running.append(request)
            self._starts.append(start)

    def _step(self) -> None:
        """Sample the next token of each row."""
        try:
            original_max = self.model.config.original_max_position
            for row in reversed(range(len(self.running))):
                if original_max is not None and self.running[row].length == original_max + 1:
                    request = self._remove(row)  # longrope has other factors from here on
                    self._join(request)
            self._remove_done()
            if not self.running:
                return
            if self._end == self._cache.capacity:
                self._move_columns(-min(self._starts))
            first = min(self._starts)
            cache = self._cache.view(slice(len(self.running)), first, self._end - first)
            if any(start > first for start in self._starts):
                cache.starts = torch.tensor(self._starts, device=self._device) - first
            ids = torch.tensor([[request.tokens[-1]] for request in self.running], device=self._device)
            if original_max is not None:
                lengths = [[request.length] for request in self.running]
                cache.sequence_length = torch.tensor(lengths, device=self._device)
            logits = self.model(ids, kv_cache=cache, logits_to_keep=1)[:, -1]
            self._end += 1
            self._append(self.running, logits)
        except Exception as error:  # these requests fail, the server continues
            _report(error)
            for request in self.running:
                request.end(error)

    def _append(self, requests: list[Request], logits: Tensor) -> None:
        """Sample and emit a token per request from the logits, (B, padded_vocab_size)."""
        groups: dict[Sampling, list[int]] = {}
        for row, request in enumerate(requests):
            groups.setdefault(request.sampling, []).append(row)
        vocab_size, dtype = self.model.config.vocab_size, torch.float32 if logits.device.type == "mps" else None
        for sampling, rows in groups.items():
            uniform = None
            if sampling.temperature:
                numbers = [requests[row].uniforms[len(requests[row].tokens)] for row in rows]  # type: ignore[index]
                uniform = torch.stack(numbers).to(dtype=dtype).to(logits.device)
            tokens = sample(logits[rows], sampling, vocab_size=vocab_size, uniform=uniform).tolist()
            for row, token in zip(rows, tokens, strict=True):
                if not requests[row].is_done:
                    _emit(requests[row], token, logits[row, :vocab_size])

    def _remove_done(self) -> None:
        for row in reversed(range(len(self.running))):
            if self.running[row].is_done:
                self._remove(row)
        if not self.running:
            self._end = 0

    def _remove(self, row: int) -> Request:
        """Remove a row; the last row takes its place."""
        request, last, start = self.running[row], self.running.pop(), self._starts.pop()
        if last is not request:
            self.running[row], self._starts[row] = last, start
            for tensor in self._cache.tensors:
                tensor[row, :, : self._end] = tensor[len(self.running), :, : self._end]
        return request

    def _move_columns(self, count: int) -> None:
        """Move the columns of all rows to the right, or to the left if ``count`` is negative."""
        first, end, n = min(self._starts, default=self._end), self._end, len(self.running)
        try:
            for tensor in self._cache.tensors:
                tensor[:n, :, first + count : end + count] = tensor[:n, :, first:end].clone()
        except Exception as error:  # some layers have moved
            for request in self.running:
                request.end(error)
            raise
        self._starts, self._end = [start + count for start in self._starts], end + count


def _emit(request: Request, token: int, logits: Tensor) -> None:
    """Emit a token, with log-probabilities from the logits, (vocab_size,), or the end of the answer."""
    try:
        require_finite([token])
    except GuardError as error:
        return request.end(error)
    if token in request.eos_ids:
        return request.end("stop")
    request.tokens.append(token)
    new = NewToken(token)
    if request.n_top is not None:
        log_probs = logits.float().log_softmax(-1)
        values, ids = log_probs.topk(min(request.n_top, len(log_probs)))
        new = NewToken(token, log_probs[token].item(), list(zip(ids.tolist(), values.tolist(), strict=True)))
    with suppress(RuntimeError):  # the receiver's event loop is closed
        request.emit(new)
    if len(request.tokens) == request.max_new_tokens:
        request.end("length")


def _report(error: Exception) -> None:
    if not isinstance(error, GuardError):
        traceback.print_exception(error)
