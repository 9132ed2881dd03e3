"""`toolkit generate`: generate text from a prompt."""

from __future__ import annotations

import sys
import time
from typing import Literal

from jsonargparse.typing import PositiveInt

from toolkit.errors import UserError


def setup(
    checkpoint_dir: str,
    prompt: str = "def main(",
    max_new_tokens: PositiveInt = 50,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    num_samples: PositiveInt = 1,
    seed: int = 1234,
    base_checkpoint_dir: str | None = None,
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    precision: Literal["32-true", "bf16-true"] | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Generate text from a prompt: text on stdout, statistics on stderr.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged.
        prompt: The text to continue; "-" reads it from stdin.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Sample from the k most likely tokens; 0 disables.
        top_p: Nucleus sampling: sample from the most likely tokens with this total probability; 1 disables.
        num_samples: Number of samples; sample i (from 0) uses seed + i.
        seed: Random seed.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: Dtype of weights and computation. Default: that of the checkpoint.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    import torch

    from toolkit.inference.generate import generate
    from toolkit.inference.load import load_checkpoint
    from toolkit.inference.text import TextStream, encode_prompt, stop_tokens

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UserError("--prompt: is not valid UTF-8") from error
    loaded = load_checkpoint(
        checkpoint_dir,
        base_checkpoint_dir=base_checkpoint_dir,
        accelerator=accelerator,
        precision=precision,
        verify_checkpoint=verify_checkpoint,
    )
    notes: list[str] = []
    tokenizer = loaded.tokenizer
    ids, eos_ids = encode_prompt(tokenizer, text, loaded.model.config), stop_tokens(tokenizer)
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
        count, start = -1, time.perf_counter()  # the text after the last token is one piece more
        print(text, end="", flush=True)
        for piece in TextStream(tokenizer, ids).read(tokens):
            count += 1
            print(piece, end="", flush=True)
        print(flush=True)
        while notes:
            print(notes.pop(0), file=sys.stderr)
        seconds = time.perf_counter() - start
        speed = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
        print(f"sample {i + 1} of {num_samples}: {speed}; seed {seed + i}; {loaded.device}", file=sys.stderr)
