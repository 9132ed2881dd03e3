"""Continue a sequence of tokens, one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.distributed import ranks
from toolkit.distributed.device import without_cudnn_attention
from toolkit.errors import UserError
from toolkit.inference.kv_cache import KVCache
from toolkit.inference.sampling import check_sampling, sample

if TYPE_CHECKING:
    from toolkit.models.gpt import GPT

PREFILL = 512  # tokens of the prompt per forward pass: the logits of a long prompt at once would fill the memory


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
    use_cache: bool = True,
    cache: KVCache | None = None,
    notice: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Iterator[int]:
    """Yield the tokens that follow a prompt.

    Ends after ``max_new_tokens``, at a token of ``eos_ids`` (which is not yielded), or where prompt and new tokens
    together fill the model's ``block_size``, which is said through ``notice``.

    In a run of several ranks all of them call this, and take all tokens (S6): they get those of rank 0.

    Args:
        model: On the device and in the dtype to compute with, in evaluation mode; Fabric's wrapper of it, too.
        prompt_ids: (T,) int64, T >= 1.
        max_new_tokens: See above.
        temperature, top_k, top_p: See :func:`toolkit.inference.sampling.sample`.
        eos_ids: Tokens that end the text.
        seed: Of the draws; torch's own generator when None.
        use_cache: Keep keys and values of earlier tokens. Without it every token costs a pass over all of them.
        cache: Keys and values of the first tokens of the prompt, of fewer than all. Those of the others are added, and
            those of the new tokens, except the last one.
        notice: Takes one line for people.

    Raises:
        UserError: at the call: a setting is out of its range, or the prompt is empty or leaves no room.
        GuardError: the logits are not finite.
    """
    check_sampling(temperature, top_k, top_p)
    if max_new_tokens <= 0:
        raise UserError(f"--max_new_tokens {max_new_tokens}: must be greater than zero")
    length, limit = prompt_ids.numel(), model.config.block_size
    if length == 0:
        raise UserError("--prompt: is empty; give at least one token")
    if length >= limit:
        raise UserError(f"--prompt: has {length} tokens; the model's context of {limit} leaves no room for new ones")
    assert cache is None or (use_cache and cache.length < length)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "vocab_size": model.config.vocab_size}
    count = min(max_new_tokens, limit - length)
    return _generate(model, prompt_ids, count, max_new_tokens, settings, set(eos_ids), seed, use_cache, cache, notice)


def prefill(model: GPT, ids: Tensor, cache: KVCache) -> Tensor:
    """Bring sequences into a cache that holds their first tokens, but for the last token of each, which is returned.

    What the cache holds is computed anew where that is not what the model computes in sequences as long as these.

    Args:
        model: See :func:`generate`.
        ids: (B, T), int64; longer than what the cache holds.
        cache: Keys and values of the first tokens.

    Returns:
        (B, 1): the tokens to run next.
    """
    length, border = ids.size(1), model.config.original_max_position
    if border is not None and (max(cache.made_for, cache.length) > border) != (length > border):
        cache.truncate(0)
    cache.made_for = length
    for chunk in ids[:, cache.length : -1].split(PREFILL, dim=1):
        if chunk.size(1):
            model(chunk, kv_cache=cache, sequence_length=length)
    return ids[:, -1:]


# not inference_mode: autograd refuses its tensors, and what a model keeps from here may be used in training
@torch.no_grad()
def _generate(model, prompt_ids, count, wanted, settings, eos_ids, seed, use_cache, cache, notice) -> Iterator[int]:
    weight = model.transformer.wte.weight  # the head's may be quantised
    device = weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    ids = prompt_ids.to(device).view(1, -1)
    if use_cache:
        room = ids.numel() + count
        if cache is None:
            cache = KVCache(model.config, 1, room, device, weight.dtype)
        cache.reserve(room)
    for _ in range(count):
        with without_cudnn_attention():  # every token has another length of the cache
            inputs = prefill(model, ids, cache) if use_cache else ids
            logits = model(inputs, kv_cache=cache)[:, -1]
        token = ranks.broadcast_from_rank0(int(sample(logits, **settings, generator=generator)))
        if token in eos_ids:
            return
        yield token
        ids = torch.cat([ids, torch.tensor([[token]], device=device)], dim=1)
    if count < wanted:
        notice(f"stopped after {count} new tokens: the model's context of {model.config.block_size} tokens is full")
