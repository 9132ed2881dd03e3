"""Continuous batching: requests join and leave the batch between decoding steps."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.distributed.device import without_cudnn_attention
from toolkit.errors import GuardError, notice
from toolkit.inference.decode import PREFILL, READ_EVERY, fix_shapes, has_fixed_shapes, tokens_per_read
from toolkit.inference.sampling import Sampling, draw_uniforms, require_finite, sample
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import KVCache

_SPARE_COLUMNS = 64  # the cache is moved to the left once in so many steps, not in each
_MIN_COLUMNS = 256  # of a CUDA graph
_JOINT_PREFILL = 8 * PREFILL  # maximum number of tokens, with padding, of several prompts in one forward pass


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
    reason: str | Exception | None = None
    """The end of the answer, once it is known."""

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the answer so far."""
        return len(self.ids) + len(self.tokens)

    def send(self, item: NewToken | str | Exception) -> None:
        """Emit a token or the end of the answer, unless the request has left."""
        if not self.is_done:
            self.is_done = not isinstance(item, NewToken)
            with suppress(RuntimeError):  # the receiver's event loop is closed
                self.emit(item)


class Batcher(threading.Thread):
    """A thread that decodes up to ``n_rows`` requests together.

    Each answer equals :func:`toolkit.inference.generate.generate` for its prompt and seed, up to rounding in matrix
    products, whatever other requests are in the batch. The prompt of a joining request is prefilled directly into a row
    of the KV cache, left-padded: all rows end at the same column.

    On CUDA the forward pass has a fixed shape: a power of two of rows and of columns of the cache. Each shape is
    captured once, as a CUDA graph. Rows without a request compute tokens that nobody reads. Tokens are read in groups
    of :data:`toolkit.inference.decode.READ_EVERY`. While the device computes a group, the tokens of the last one are
    emitted, and waiting requests are prefilled together: a request waits for at most the rest of one group and the
    next one. It leaves between groups.

    Args:
        model: See :func:`toolkit.inference.generate.generate_batch`. If its rows are not independent, it gets one row.
        n_rows: Maximum number of requests in the batch.
        max_length: Maximum number of tokens of a request's prompt and answer.

    Attributes:
        waiting: Put requests here. None ends the thread after the current group of tokens.
        running: The requests in the batch.
    """

    def __init__(self, model: GPT, n_rows: int, max_length: int) -> None:
        super().__init__(daemon=True, name="batcher")
        self.model, self.n_rows = model, n_rows if model.is_row_independent else 1
        self.waiting: queue.Queue[Request | None] = queue.Queue()
        self.running: list[Request] = []
        self.max_length = max_length
        self._cache = model.make_cache(self.n_rows, max_length + _SPARE_COLUMNS)
        self._device = self._cache.device
        self._starts: list[int] = []  # first column of each row
        self._end = 0  # column after the last of all rows
        self._is_fixed = has_fixed_shapes(model, self._device)
        self._shapes: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._graphs: list[Any] = []
        self._is_stopping = False
        self._unsent: list[tuple[Request, NewToken | str | Exception]] = []
        # inputs of a step: each row's last token and its first column, and the column of the last tokens
        self._ids, self._first, self._position = (
            torch.zeros(n, dtype=torch.long, device=self._device) for n in (self.n_rows, self.n_rows, 1)
        )

    @torch.no_grad()
    def run(self) -> None:
        with without_cudnn_attention():  # the length of the cache changes
            while True:
                self._remove_done()
                if not self.running:
                    self._send()
                if not (self._is_stopping or (self.running and self._is_fixed)):
                    self._admit()
                if self._is_stopping:
                    return self._send()
                self._step()

    def stop(self) -> None:
        """End the running requests and the thread."""
        for request in list(self.running):
            request.is_done = True
        self.waiting.put(None)
        self.join(timeout=10)

    @property
    def cache_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._cache.tensors + self._cache.recurrent_states)

    def _admit(self) -> None:
        """Take waiting requests into the batch. Wait for one if the batch is empty."""
        requests: list[Request] = []
        while (n := len(self.running) + len(requests)) < self.n_rows and (n == 0 or not self.waiting.empty()):
            if (request := self.waiting.get()) is None:
                self._is_stopping = True
                break
            requests.append(request)
        self._join(requests)

    def _join(self, requests: list[Request]) -> None:
        """Prefill requests, with the tokens that they have, and sample their next tokens."""
        if not (requests := [request for request in requests if not request.is_done]):
            return
        longest = max(request.length for request in requests)
        if len(requests) > 1 and (not self._is_fixed or len(requests) * longest > _JOINT_PREFILL):
            return self._join_halves(requests)
        try:
            for request in requests:
                if request.sampling.temperature and request.uniforms is None:
                    uniforms = draw_uniforms([request.seed], request.max_new_tokens)[0]
                    request.uniforms = F.pad(uniforms, (0, READ_EVERY))  # tokens after the last are dropped
            if longest > self._end:
                self._move_columns(longest - self._end)
            rows, start = slice(len(self.running), len(self.running) + len(requests)), self._end - longest
            for tensor in self._cache.tensors:  # a softmax weight of 0 does not mask the NaN of an earlier request
                tensor[rows, :, :start] = 0
                if self._is_fixed:  # it reads all columns
                    tensor[rows, :, self._end :] = 0
            pads = [longest - request.length for request in requests]
            padded = [[r.ids[0]] * pad + r.ids + r.tokens for r, pad in zip(requests, pads, strict=True)]
            ids, lengths = (torch.tensor(x, device=self._device) for x in (padded, [r.length for r in requests]))
            self._cache.prompt, self._cache.seed, self._cache.state = ids, requests[0].seed or 0, {}
            cache = self._cache.view(rows, slice(start, None), 0)
            cache.truncate(0)  # forgets the recurrent states of an earlier request
            cache.sequence_length = lengths[:, None] if any(pads) else longest
            cache.starts = longest - lengths if any(pads) else None
            for chunk in ids.split(PREFILL, dim=1):
                logits = self.model(chunk, kv_cache=cache, logits_to_keep=1)[:, -1]
            self._read(requests, self._sampler(requests, 1)(logits, 0)[None], [logits])
        except Exception as error:  # the request fails, the others continue
            if len(requests) > 1:
                self._join_halves(requests)
            else:
                self._fail(requests, error)
        else:
            self.running += requests
            self._starts += [start + pad for pad in pads]

    def _join_halves(self, requests: list[Request]) -> None:
        for half in (requests[: len(requests) // 2], requests[len(requests) // 2 :]):
            self._join(half)

    def _step(self) -> None:
        """Sample the next tokens of each row."""
        try:
            original_max = self.model.config.original_max_position
            for row in reversed(range(len(self.running))):
                if original_max is not None and self.running[row].length == original_max + 1:
                    request = self._remove(row)  # longrope has other factors from here on
                    self._join([request])
            self._remove_done()
            if not self.running:
                return
            step, count = self._next_step()
            until = [original_max + 1 - request.length for request in self.running if original_max is not None]
            remaining = max(request.max_new_tokens - len(request.tokens) for request in self.running)
            count = min(count, remaining, *(n for n in until if n > 0))
            requests = list(self.running)
            choose = self._sampler(requests, count)
            needs_logits = count > 1 and any(request.n_top is not None for request in requests)
            tokens, kept = [], []
            for i in range(count):
                logits = step()
                tokens.append(choose(logits, i))
                self._ids[: len(requests)] = tokens[-1]
                kept.append(logits.clone() if needs_logits else logits)  # a graph's next replay overwrites them
            self._end += count
            if self._is_fixed:  # while the device computes the tokens
                self._send()
                self._admit()
            self._read(requests, torch.stack(tokens), kept)
        except Exception as error:  # these requests fail, the server continues
            self._fail(self.running, error)

    def _next_step(self) -> tuple[Callable[[], Tensor], int]:
        """Return a function that computes the logits of one token per row, and for how many tokens it can be called."""
        first, n = min(self._starts), len(self.running)
        count = tokens_per_read(self._device) if self._is_fixed else 1
        is_shorter = self._n_columns(self._end - first + _SPARE_COLUMNS) < self._n_columns(self._end + count)
        if self._end == self._cache.capacity or (self._is_fixed and is_shorter):
            self._move_columns(-first)
            first = 0
        self._set_inputs()
        if self._is_fixed:
            shape = min(1 << (n - 1).bit_length(), self.n_rows), self._n_columns(self._end + count)
            if shape not in self._shapes:
                self._send()  # a capture takes longer than a token
            if (step := self._shapes.get(shape) or self._fix_shapes(*shape)) is not None:
                self._shapes[shape] = step
                return step, min(count, shape[1] - self._end)
            self._is_fixed = False
            self._shapes.clear()
            self._graphs.clear()
        cache = self._cache.view(slice(n), slice(first, None), self._end - first)
        if any(start > first for start in self._starts):
            cache.starts = self._first[:n] - first
        return partial(self._forward, cache, n), 1

    def _n_columns(self, end: int) -> int:
        """Return the columns of the fixed shape that has ``end`` or more: a power of two, or the whole cache."""
        n = max(1 << (end - 1).bit_length(), _MIN_COLUMNS)
        return n if 2 * n <= self._cache.capacity else self._cache.capacity

    def _fix_shapes(self, n_rows: int, n_columns: int) -> Callable[[], Tensor] | None:
        """Return the forward pass with a fixed shape, captured; None if that fails."""
        cache, logits = self._cache.view(slice(n_rows), slice(n_columns), self._end), list[Tensor]()
        cache.starts = self._first[:n_rows]

        def step() -> Tensor:
            logits[:] = [self._forward(cache, n_rows)]
            return logits[0][: len(self.running)]

        replay = fix_shapes(self.model, cache, self._position, step, self._set_inputs, notice, self._graphs)
        if replay is None:
            return None

        def replayed() -> Tensor:
            replay()
            return logits[0]

        return replayed

    def _forward(self, cache: KVCache, n_rows: int) -> Tensor:
        """Return the logits of the next token of each row, (n_rows, padded_vocab_size). Does not wait for the host."""
        if self.model.config.original_max_position is not None:
            cache.sequence_length = (self._position - self._first[:n_rows] + 1)[:, None]
        ids = self._ids[:n_rows, None].clamp(min=0)  # a nonfinite row is reported when its token is read
        logits = self.model(ids, kv_cache=cache, logits_to_keep=1)[:, -1]
        self._position += 1
        return logits

    def _set_inputs(self) -> None:
        """Set a step's inputs. The address of each stays the same. A row without a request attends to itself."""
        free = self.n_rows - len(self.running)
        last = [request.tokens[-1] for request in self.running]
        self._ids.copy_(torch.tensor(last + [0] * free))
        self._first.copy_(torch.tensor(self._starts + [self._end] * free))
        self._position.fill_(self._end)

    def _sampler(self, requests: Sequence[Request], count: int) -> Callable[[Tensor, int], Tensor]:
        """Return a function to sample a token per request, (B,), for each of the next ``count`` tokens.

        It takes the logits, (B or more, padded_vocab_size), and the number of the token, and does not wait for the
        device.
        """
        groups: dict[Sampling, list[int]] = {}
        for row, request in enumerate(requests):
            groups.setdefault(request.sampling, []).append(row)
        vocab_size, dtype = self.model.config.vocab_size, torch.float32 if self._device.type == "mps" else None
        parts: list[tuple[Sampling, Tensor, Tensor | None]] = []
        for sampling, rows in groups.items():
            uniforms = None
            if sampling.temperature:
                numbers = [requests[row].uniforms[len(requests[row].tokens) :][:count] for row in rows]  # type: ignore[index]
                uniforms = torch.stack(numbers, 1).to(dtype=dtype).to(self._device)
            parts.append((sampling, torch.tensor(rows, device=self._device), uniforms))

        def choose(logits: Tensor, number: int) -> Tensor:
            tokens = torch.empty(len(requests), dtype=torch.long, device=self._device)
            for sampling, rows, uniforms in parts:
                uniform = None if uniforms is None else uniforms[number]
                tokens[rows] = sample(logits[rows], sampling, vocab_size=vocab_size, uniform=uniform)
            return tokens

        return choose

    def _read(self, requests: Sequence[Request], tokens: Tensor, logits: Sequence[Tensor]) -> None:
        """Wait for tokens, (count, B). ``logits`` has a tensor per token, (B or more, padded_vocab_size)."""
        for ids, of_rows in zip(tokens.tolist(), logits, strict=True):
            for row, request in enumerate(requests):
                if request.reason is None and not request.is_done:
                    items = _items(request, ids[row], of_rows[row, : self.model.config.vocab_size])
                    self._unsent += [(request, item) for item in items]
        if not self._is_fixed:
            self._send()

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        for request, item in unsent:
            request.send(item)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        """End the requests with an error."""
        if not isinstance(error, GuardError):
            traceback.print_exception(error)
        self._send()
        for request in requests:
            request.send(error)

    def _remove_done(self) -> None:
        for row in reversed(range(len(self.running))):
            if self.running[row].is_done or self.running[row].reason is not None:
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
            for state in self._cache.recurrent_states:
                state[row] = state[len(self.running)]
        return request

    def _move_columns(self, count: int) -> None:
        """Move the columns of all rows to the right, or to the left if ``count`` is negative."""
        first, end, n = min(self._starts, default=self._end), self._end, len(self.running)
        try:
            for tensor in self._cache.tensors:
                tensor[:n, :, first + count : end + count] = tensor[:n, :, first:end].clone()
        except Exception as error:  # some layers have moved
            self._send()
            for request in self.running:
                request.send(error)
            raise
        self._starts, self._end = [start + count for start in self._starts], end + count


def _items(request: Request, token: int, logits: Tensor) -> list[NewToken | str | Exception]:
    """Add a token to a request; return what to emit, with log-probabilities from the logits, (vocab_size,)."""
    try:
        require_finite([token])
    except GuardError as error:
        request.reason = error
        return [error]
    if token in request.eos_ids:
        request.reason = "stop"
        return ["stop"]
    request.tokens.append(token)
    new = NewToken(token)
    if request.n_top is not None:
        log_probs = logits.float().log_softmax(-1)
        values, ids = log_probs.topk(min(request.n_top, len(log_probs)))
        new = NewToken(token, log_probs[token].item(), list(zip(ids.tolist(), values.tolist(), strict=True)))
    if len(request.tokens) < request.max_new_tokens:
        return [new]
    request.reason = "length"
    return [new, "length"]
