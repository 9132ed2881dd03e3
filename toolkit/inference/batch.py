"""Continue many texts, several in each forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.generate import generate_batch
from toolkit.inference.text import TextStream, encode_prompt, stop_tokens

if TYPE_CHECKING:
    from toolkit.models.gpt import GPT


class Continuation(NamedTuple):
    prompt: str
    text: str
    """The new text, without the prompt."""
    seed: int
    tokens: int
    """Number of new tokens."""


def continue_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    batch_size: int,
    seeds: Sequence[int],
    notice: Callable[[str], None],
    **sampling: Any,
) -> Iterator[Continuation]:
    """Yield the continuations of each prompt in turn, one for each seed: the same whatever the batch size, up
    to rounding in the matrix products.

    Args:
        model: See :func:`toolkit.inference.generate.generate`.
        batch_size: Sequences per forward pass.
        seeds: Sampling seeds, for each prompt.
        sampling: ``max_new_tokens``, ``temperature``, ``top_k`` and ``top_p``.
        notice: Called with one line for the user.

    Raises:
        UserError: A prompt does not fit, before anything is generated; or a setting is out of range.
        GuardError: The logits contain NaN or Inf.
    """
    eos_ids, limit = stop_tokens(tokenizer), model.config.block_size
    encoded = [encode_prompt(tokenizer, prompt, model.config) for prompt in prompts]
    for number, ids in enumerate(encoded, 1):
        if len(ids) >= limit:
            hint = f"the model's context of {limit} leaves no room for new ones"
            raise UserError(f"prompt {number}: has {len(ids)} tokens; {hint}")
    rows = [(i, seed) for i in range(len(prompts)) for seed in seeds]
    size = batch_size if model.is_row_independent else 1
    for batch in (rows[i : i + size] for i in range(0, len(rows), size)):
        tensors = [torch.tensor(encoded[i], dtype=torch.long) for i, _ in batch]
        names = [f"prompt {i + 1}" if len(prompts) > 1 else "" for i, _ in batch]
        steps = generate_batch(
            model, tensors, eos_ids=eos_ids, seeds=[seed for _, seed in batch], names=names, notice=notice, **sampling
        )
        for (i, seed), column in zip(batch, zip(*steps, strict=True), strict=True):
            tokens = [token for token in column if token is not None]
            text = "".join(TextStream(tokenizer, encoded[i]).read(tokens))
            yield Continuation(prompts[i], text, seed, len(tokens))


def read_prompts(path: str) -> list[str]:
    """Read a file of prompts: JSON Lines with a field ``prompt`` (.jsonl), else text with one prompt per line.

    Empty lines are skipped.

    Raises:
        UserError: The file cannot be read, or a line has no prompt.
    """
    try:
        # not splitlines, which also splits at characters that JSON and text may contain, such as U+2028
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise UserError(f"--prompts_path {path}: cannot be read as UTF-8 text: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompts_path {path}: has no prompts; write one per line")
    if path.endswith(".json"):
        raise UserError(f"--prompts_path {path}: must be text with one prompt per line, or JSON Lines (.jsonl)")
    if not path.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [_read_prompt(path, number, line) for number, line in numbered]


def _read_prompt(path: str, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
        prompt.encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        hint = 'must be {"prompt": "text"}'
        raise UserError(f"--prompts_path {path}: line {number}: {hint}") from error
    return prompt
