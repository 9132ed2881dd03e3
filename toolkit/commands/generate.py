"""`toolkit generate`: generate text from a prompt."""

import json
import sys
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

from jsonargparse.typing import PositiveInt

from toolkit.commands.inference_options import InferenceOptions
from toolkit.errors import UserError, notice, require_option
from toolkit.inference.text import TextStream, encode_prompt, stop_tokens

DEFAULT_PROMPT = "def main("


def setup(
    checkpoint_dir: str,
    prompt: str = DEFAULT_PROMPT,
    prompts_path: str | None = None,
    batch_size: PositiveInt | None = None,
    max_new_tokens: PositiveInt = 50,
    num_samples: PositiveInt = 1,
    seed: int = 1234,
    shared: InferenceOptions = InferenceOptions(),
) -> None:
    """Generate text from a prompt, or from each prompt of a file: text on stdout, statistics on stderr.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged.
        prompt: The text to continue; "-" reads it from stdin.
        prompts_path: Continue the prompts in a file instead: one per line, or the "prompt" field of each .jsonl line;
            "-" reads lines from stdin. Prints one line of JSON per sample: the row's fields, text and seed.
        batch_size: With prompts_path, sequences per forward pass (default 8). Changes the text only through rounding,
            which matters in bf16.
        max_new_tokens: Maximum number of tokens to generate.
        num_samples: Number of samples; sample i (from 0) uses seed + i.
        seed: Random seed.
        shared: See :class:`InferenceOptions`.
    """
    from toolkit.inference.batch import read_prompts
    from toolkit.inference.load import load_checkpoint

    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": shared.sampling}
    if prompts_path is None:
        require_option(batch_size is None, "batch_size", batch_size, "has no effect without --prompts_path")
    else:
        require_option(prompt == DEFAULT_PROMPT, "prompt", prompt, "has no effect with --prompts_path; remove it")
    rows = {} if prompts_path is None else read_prompts(prompts_path)
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UserError("--prompt: is not valid UTF-8") from error
    loaded = load_checkpoint(checkpoint_dir, **shared.loading)
    seeds = range(seed, seed + num_samples)
    if rows:
        print_continuations(loaded, rows, seeds, batch_size or 8, sampling)
    else:
        stream_samples(loaded, text, seeds, sampling)


def print_continuations(
    loaded: Any, rows: dict[str, dict[str, Any]], seeds: range, batch_size: int, sampling: dict[str, Any]
) -> None:
    """Print a line of JSON for each continuation of each row's prompt."""
    from toolkit.inference.batch import continue_texts

    started, count = time.perf_counter(), 0
    fields = list(rows.values())
    samples = continue_texts(
        loaded.model,
        loaded.tokenizer,
        [row["prompt"] for row in fields],
        names=list(rows),
        batch_size=batch_size,
        seeds=seeds,
        notice=notice,
        **sampling,
    )
    for sample in samples:
        count += sample.tokens
        line = fields[sample.number] | {"text": sample.text, "seed": sample.seed}
        print(json.dumps(line, ensure_ascii=False), flush=True)
    speed = describe_speed(count, started)
    notice(f"{len(rows)} prompt{'s' * (len(rows) > 1)}: {speed}; {loaded.device}")


def stream_samples(loaded: Any, text: str, seeds: range, sampling: dict[str, Any]) -> None:
    """Print the prompt and its continuation for each seed, token by token."""
    import torch

    from toolkit.inference.generate import generate

    model, tokenizer, notes = loaded.model, loaded.tokenizer, list[str]()
    ids, eos_ids = encode_prompt(tokenizer, text, model.config), stop_tokens(tokenizer)
    prompt_ids = torch.tensor(ids, dtype=torch.long)
    for i, seed in enumerate(seeds, 1):
        tokens = generate(model, prompt_ids, eos_ids=eos_ids, seed=seed, notice=notes.append, **sampling)
        started = time.perf_counter()
        n_pieces = print_stream(chain([text], TextStream(tokenizer, ids).read(tokens)), notes)
        speed = describe_speed(n_pieces - 2, started)  # the prompt, and the rest after the last token
        notice(f"sample {i} of {len(seeds)}: {speed}; seed {seed}; {loaded.device}")


def print_stream(pieces: Iterable[str], notes: list[str]) -> int:
    """Print pieces of text as they arrive, then the notes that their generation added. Return the number of pieces."""
    count = 0
    for piece in pieces:
        count += 1
        print(piece, end="", flush=True)
    print(flush=True)
    while notes:
        notice(notes.pop(0))
    return count


def describe_speed(n_tokens: int, started: float) -> str:
    """Return the number of tokens and tokens/s since ``started``, a ``time.perf_counter()``."""
    seconds = time.perf_counter() - started
    return f"{n_tokens} tokens in {seconds:.2f} s, {n_tokens / seconds:.1f} tokens/s"
