"""`toolkit generate`: let a model continue a text."""

from __future__ import annotations

from typing import Literal


def setup(
    checkpoint_dir: str,
    prompt: str = "def main(",
    max_new_tokens: int = 50,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    num_samples: int = 1,
    seed: int = 1234,
    base_checkpoint_dir: str | None = None,
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    precision: Literal["32-true", "bf16-true"] | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Let a model continue a text: prompt and continuation on stdout, statistics on stderr.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are taken as they are, unmerged.
        prompt: The text to continue; "-" reads it from stdin.
        max_new_tokens: Stop after so many tokens, if the model does not end the text before.
        temperature: Flattens (above 1) or sharpens (below 1) the distribution; 0 always takes the likeliest token.
        top_k: Draw among so many of the likeliest tokens; 0 for all.
        top_p: Draw among the fewest likeliest tokens whose probabilities reach this sum; 1 for all.
        num_samples: Continue the prompt so many times; sample i has the seed seed + i.
        seed: Chooses the draws.
        base_checkpoint_dir: The base of adapters; the folder that it had in training when not given.
        accelerator: Where to compute.
        precision: Type of weights and computation; that of the checkpoint when not given.
        verify_checkpoint: Compare files with their checksums before they are used; false also reads edited files.
    """
    import sys
    import time

    import torch

    from toolkit.errors import UserError
    from toolkit.inference.generate import generate
    from toolkit.inference.load import load_checkpoint
    from toolkit.inference.text import TextStream, require_embedded, stop_tokens

    if num_samples <= 0:
        raise UserError(f"--num_samples {num_samples}: must be greater than zero")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UserError("--prompt: is not valid UTF-8") from error
    loaded = load_checkpoint(
        checkpoint_dir, base_checkpoint_dir=base_checkpoint_dir, accelerator=accelerator, precision=precision,
        verify=verify_checkpoint,
    )  # fmt: skip
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(text)
    if not ids:  # the beginning of a document
        ids = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
    require_embedded(ids, loaded.model.config, tokenizer.name)
    eos_ids = stop_tokens(tokenizer)

    notes: list[str] = []
    for i in range(num_samples):
        tokens = generate(
            loaded.model,
            torch.tensor(ids, dtype=torch.long),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_ids=eos_ids,
            seed=seed + i,
            notice=notes.append,
        )
        stream, count, start = TextStream(tokenizer, ids), 0, time.perf_counter()
        print(text, end="", flush=True)
        for token in tokens:
            count += 1
            print(stream.push(token), end="", flush=True)
        print(stream.finish(), flush=True)
        while notes:
            print(notes.pop(0), file=sys.stderr)
        seconds = time.perf_counter() - start
        speed = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
        print(f"sample {i + 1} of {num_samples}: {speed}; seed {seed + i}; {loaded.device}", file=sys.stderr)
