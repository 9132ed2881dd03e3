"""Generate continuations of many prompts in batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from toolkit.data.base import Report
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.inference.generate import complete
from toolkit.inference.sampling import Sampling
from toolkit.inference.text import TextStream, encode_prompt, stop_tokens
from toolkit.models.gpt import GPT


class Continuation(NamedTuple):
    number: int
    """Index of the prompt."""
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
    max_new_tokens: int,
    sampling: Sampling,
    batch_size: int,
    seeds: Sequence[int],
    notice: Report,
    names: Sequence[str] = (),
) -> Iterator[Continuation]:
    """Yield one continuation per prompt and seed. The batch size changes only the rounding of matrix products.

    Args:
        model: See :func:`toolkit.inference.generate.generate_batch`.
        tokenizer: The model's tokenizer.
        prompts: Texts to continue.
        max_new_tokens: Maximum number of new tokens per continuation.
        sampling: How to choose the tokens.
        batch_size: Sequences per forward pass.
        seeds: Sampling seeds; each prompt is continued once per seed.
        notice: Called with one line for the user.
        names: Names of the prompts in messages; default: their numbers.
    """
    eos_ids, limit = stop_tokens(tokenizer), model.config.block_size
    encoded = [encode_prompt(tokenizer, prompt, model.config) for prompt in prompts]
    names = names or [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    for name, ids in zip(names, encoded, strict=True):
        if len(ids) >= limit:
            hint = "shorten the prompt"
            raise UserError(f"{name}: has {len(ids)} tokens, but the model's context length is {limit}; {hint}")
    rows = [(i, seed) for i in range(len(prompts)) for seed in seeds]
    size = batch_size if model.is_row_independent else 1
    for batch in (rows[i : i + size] for i in range(0, len(rows), size)):
        tensors = [torch.tensor(encoded[i], dtype=torch.long) for i, _ in batch]
        shown = [names[i] if len(prompts) > 1 else "" for i, _ in batch]
        answers = complete(
            model, tensors, max_new_tokens=max_new_tokens, sampling=sampling, eos_ids=eos_ids,
            seeds=[seed for _, seed in batch], names=shown, notice=notice,
        )  # fmt: skip
        for (i, seed), tokens in zip(batch, answers, strict=True):
            text = "".join(TextStream(tokenizer, encoded[i]).read(tokens))
            yield Continuation(i, text, seed, len(tokens))


def read_prompts(path: str) -> dict[str, dict[str, Any]]:
    """Read prompts from JSON Lines with a ``prompt`` field (.jsonl) or from text with one per line ("-": stdin).

    Returns a dict from ``--prompts_path FILE:LINE`` to the row's fields. Skips empty lines.
    """
    flag = f"--prompts_path {path}"
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        text.encode()  # stdin replaces invalid bytes by surrogates
    except UnicodeError as error:
        raise UserError(f"{flag}: is not valid UTF-8") from error
    except OSError as error:
        raise UserError(f"{flag}: {error.strerror or error}; give a file with one prompt per line") from error
    # not splitlines, which also splits at characters that JSON and text may contain, such as U+2028
    lines = text.removeprefix("\ufeff").split("\n")
    numbered = {f"{flag}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
    if not numbered:
        raise UserError(f"{flag}: has no prompts; write one per line")
    if path.endswith(".json"):
        raise UserError(f"{flag}: must be text with one prompt per line, or JSON Lines (.jsonl)")
    read = _read_row if path.endswith(".jsonl") else lambda _, line: {"prompt": line}
    return {name: read(name, line) for name, line in numbered.items()}


def _read_row(name: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        row["prompt"].encode()
        json.dumps(row, ensure_ascii=False).encode()  # an unpaired surrogate in another field cannot be printed
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f'{name}: must be {{"prompt": "text"}}, with valid Unicode') from error
    return row
