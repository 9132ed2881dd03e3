"""Continue a sequence of tokens, one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.distributed import ranks
from toolkit.distributed.device import without_cudnn_attention
from toolkit.errors import UserError, require_option
from toolkit.inference.kv_cache import KVCache
from toolkit.inference.sampling import check_sampling, sample

if TYPE_CHECKING:
    from toolkit.models.gpt import GPT

PREFILL = 512  # prompt tokens per forward pass, to bound the memory of the logits


def generate(
    model: GPT,
    prompt_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    eos_ids: Collection[int] = (),
    seed: int | None = None,
    cache: KVCache | None = None,
    notice: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Iterator[int]:
    """Yield the tokens that follow a prompt.

    Ends after ``max_new_tokens``, at a token in ``eos_ids`` (not yielded), or when prompt and new tokens fill the
    model's ``block_size``, which is reported through ``notice``.

    With several ranks, all ranks must call this and consume all tokens (S6); all get the tokens of rank 0.

    Args:
        model: In evaluation mode, on the compute device and in the compute dtype; may be wrapped by Fabric.
        prompt_ids: (T,) int64, T >= 1.
        max_new_tokens: Maximum number of new tokens.
        temperature, top_k, top_p: See :func:`toolkit.inference.sampling.sample`.
        eos_ids: End-of-sequence tokens.
        seed: Sampling seed; None for torch's default generator.
        cache: KV cache of a proper prefix of the prompt. The remaining prompt tokens and the new tokens, except the
            last, are added to it.
        notice: Called with one line for the user.

    Raises:
        UserError: At the call: a setting is out of range, or the prompt is empty or too long.
        GuardError: The logits contain NaN or Inf.
    """
    check_sampling(temperature, top_k, top_p)
    require_option(max_new_tokens > 0, "max_new_tokens", max_new_tokens, "must be greater than zero")
    length, limit = prompt_ids.numel(), model.config.block_size
    if length == 0:
        raise UserError("--prompt: is empty; provide at least one token")
    if length >= limit:
        raise UserError(f"--prompt: has {length} tokens; the model's context of {limit} leaves no room for new ones")
    assert cache is None or cache.length < length
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "vocab_size": model.config.vocab_size}
    count = min(max_new_tokens, limit - length)
    return _generate(model, prompt_ids, count, max_new_tokens, settings, set(eos_ids), seed, cache, notice)


def prefill(model: GPT, ids: Tensor, cache: KVCache) -> Tensor:
    """Fill the KV cache with all but the last token of each sequence; return the last tokens.

    Cached tokens are recomputed if they were computed with other longrope factors than this sequence length needs.

    Args:
        model: See :func:`generate`.
        ids: (B, T), int64; longer than the cache.
        cache: KV cache of the first tokens.

    Returns:
        (B, 1): the next inputs of the model.
    """
    length, original_max = ids.size(1), model.config.original_max_position
    cached_for = max(cache.sequence_length, cache.length)
    if original_max is not None and (cached_for > original_max) != (length > original_max):
        cache.truncate(0)
    cache.sequence_length = length
    for chunk in ids[:, cache.length : -1].split(PREFILL, dim=1):
        if chunk.size(1):
            model(chunk, kv_cache=cache, sequence_length=length)
    return ids[:, -1:]


# not inference_mode: cached tensors of the model may later be used in training, which rejects inference tensors
@torch.no_grad()
def _generate(model, prompt_ids, count, max_new_tokens, settings, eos_ids, seed, cache, notice) -> Iterator[int]:
    weight = model.get_parameter("transformer.wte.weight")  # the head's weight may be quantized
    device = weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    ids = prompt_ids.to(device).view(1, -1)
    max_length = ids.numel() + count
    if cache is None:
        cache = KVCache(model.config, 1, max_length, device, weight.dtype)
    cache.reserve(max_length)
    cache.prompt, cache.seed = ids, seed or 0
    for _ in range(count):
        with without_cudnn_attention():  # the length of the cache changes with every token
            logits = model(prefill(model, ids, cache), kv_cache=cache)[:, -1]
        token = ranks.broadcast_from_rank0(int(sample(logits, **settings, generator=generator)))
        if token in eos_ids:
            return
        yield token
        ids = torch.cat([ids, torch.tensor([[token]], device=device)], dim=1)
    if count < max_new_tokens:
        notice(f"stopped after {count} new tokens: the model's context of {model.config.block_size} tokens is full")
