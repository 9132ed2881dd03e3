"""Generate tokens for one prompt or a batch of prompts."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, cast

from torch import Tensor

from toolkit.data.base import Report
from toolkit.distributed import ranks
from toolkit.errors import UserError, notice, require_option
from toolkit.inference.decode import Decoder, decode
from toolkit.inference.sampling import Sampling
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import KVCache

_SAMPLING = Sampling()


def generate(model: GPT, prompt_ids: Tensor, *, seed: int | None = None, **options: Any) -> Iterator[int]:
    """Yield the tokens that follow a prompt: :func:`generate_batch` with one row.

    Args:
        model: See :func:`generate_batch`.
        prompt_ids: Token ids of the prompt, (T,) int64, T >= 1.
        seed: Sampling seed; None for torch's default generator.
        options: Further arguments of :func:`generate_batch`.
    """
    rows = generate_batch(model, [prompt_ids], seeds=[seed], **options)
    return (cast(int, token) for (token,) in rows)  # the only row ends with the batch


def complete(model: Any, prompts: Sequence[Tensor], **options: Any) -> list[list[int]]:
    """Return all tokens that follow each prompt, see :func:`generate_batch`."""
    columns = list(zip(*generate_batch(model, prompts, **options), strict=True)) or [()] * len(prompts)  # all are empty
    return [[token for token in column if token is not None] for column in columns]


def generate_batch(
    model: GPT,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    sampling: Sampling = _SAMPLING,
    eos_ids: Collection[int] = (),
    seeds: Sequence[int | None] | None = None,
    cache: KVCache | None = None,
    cuda_graph: bool = True,
    names: Sequence[str] = (),
    notice: Report = notice,
    is_alone: bool = False,
    lockstep: Sequence[Tensor] = (),
    record: list[Decoder] | None = None,
) -> Generator[list[int | None], None, None]:
    """Continue several prompts together; yield the next token of each row, None for rows that have ended.

    Each row equals the output of :func:`generate` for its prompt and seed, up to rounding in matrix products.
    Shorter prompts are padded on the left; the padding is masked and has no position.

    A row ends after ``max_new_tokens``, at a token in ``eos_ids`` (not yielded), or when prompt and new tokens fill the
    model's ``block_size``, which is reported through ``notice``. Ends when all rows have ended.

    With several ranks, all ranks must call this and consume all tokens (S6); all get the tokens of rank 0.

    Args:
        model: Model in evaluation mode, on the compute device, in the compute dtype. Fabric may wrap it.
        prompts: Token ids of each prompt, (T,) int64, T >= 1. One prompt only, if the model's rows are not independent
            (:class:`~toolkit.models.gpt.GPT`).
        max_new_tokens: Maximum number of new tokens.
        sampling: How to choose the tokens.
        eos_ids: End-of-sequence tokens.
        seeds: Sampling seed of each row; None for torch's default generator.
        cache: KV cache of a proper prefix of the only prompt. The remaining prompt tokens and the new tokens, except
            the last, are added to it.
        cuda_graph: Whether to decode with a CUDA graph, if possible. It needs additional memory.
        names: Names of the prompts in notices; by default none.
        notice: Called with one line for the user.
        is_alone: Whether this rank generates without the others, with a complete model.
        lockstep: The prompts of all ranks, if each rank generates its own with sharded weights: all ranks then take
            equally many forward passes. Not supported with longrope.
        record: Gets the decoder, which then records log-probabilities. Its tokens include those that end a row.
    """
    require_option(max_new_tokens > 0, "max_new_tokens", max_new_tokens, "must be greater than zero")
    limit = model.config.block_size
    for length in map(len, prompts):
        if length == 0:
            raise UserError("--prompt: is empty; give at least one token")
        if length >= limit:
            hint = f"must have fewer than {limit} (the model's context length); shorten it"
            raise UserError(f"--prompt: has {length} tokens, but {hint}")
    assert cache is None or (len(prompts) == 1 and cache.length < len(prompts[0]))
    assert len(prompts) == 1 or model.is_row_independent
    counts = [min(max_new_tokens, limit - len(prompt)) for prompt in prompts]
    seeds = [None] * len(prompts) if seeds is None else seeds
    lengths = list(map(len, lockstep or prompts))
    count, width = min(max_new_tokens, limit - min(lengths)), max(lengths)
    cache = model.make_cache(len(prompts), width + count) if cache is None else cache
    cache.reserve(width + count)
    is_alone = is_alone or bool(lockstep)
    decoder = Decoder(model, cache, prompts, count, sampling, seeds, width, is_alone, record is not None)
    if record is not None:
        record.append(decoder)
    steps = decode(decoder, notice, cuda_graph)

    def is_over(has_ended: list[bool]) -> bool:
        busy = not all(has_ended)
        return not (ranks.all_reduce_sum(busy=int(busy))["busy"] if lockstep else busy)

    def ended_rows() -> Generator[list[int | None], None, None]:
        with closing(steps):
            has_ended = [False] * len(counts)
            for step, tokens in enumerate(steps, 1):
                has_ended = [ended or token in eos_ids for ended, token in zip(has_ended, tokens, strict=True)]
                if is_over(has_ended):
                    return
                yield [None if ended else token for ended, token in zip(has_ended, tokens, strict=True)]
                for row, (name, count) in enumerate(zip(names or [""] * len(prompts), counts, strict=True)):
                    if step == count < max_new_tokens and not has_ended[row]:
                        context = f"the model's context of {limit} tokens is full"
                        notice(f"{name}{': ' if name else ''}stopped after {count} new tokens: {context}")
                    has_ended[row] |= step == count
                if is_over(has_ended):
                    return
                decoder.drop(has_ended)

    return ended_rows()
