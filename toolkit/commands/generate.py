"""`toolkit generate`: generate text from a prompt."""

from __future__ import annotations

import json
import sys
import time
from typing import Literal

from jsonargparse.typing import PositiveInt

from toolkit.errors import UserError, for_terminal, require_option

DEFAULT_PROMPT = "def main("


def setup(
    checkpoint_dir: str,
    prompt: str = DEFAULT_PROMPT,
    prompts_path: str | None = None,
    batch_size: PositiveInt | None = None,
    max_new_tokens: PositiveInt = 50,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    num_samples: PositiveInt = 1,
    seed: int = 1234,
    base_checkpoint_dir: str | None = None,
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    precision: Literal["32-true", "bf16-true"] | None = None,
    quantize: Literal["bnb.nf4", "bnb.nf4-dq"] | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Generate text from a prompt, or from each prompt of a file: text on stdout, statistics on stderr.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged.
        prompt: The text to continue; "-" reads it from stdin.
        prompts_path: Continue each line of a text file, or the "prompt" of each line of a .jsonl file, instead; "-"
            reads lines of text from stdin. Prints a line of JSON for each sample: the fields of the row, text and seed.
        batch_size: With prompts_path, sequences per forward pass (default 8). The text does not depend on it, up to
            rounding: in bf16 it may.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Sample from the k most likely tokens; 0 disables.
        top_p: Nucleus sampling: sample from the most likely tokens with this total probability; 1 disables.
        num_samples: Number of samples; sample i (from 0) uses seed + i.
        seed: Random seed.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: Dtype of weights and computation. Default: bf16-true on CUDA, else that of the checkpoint.
        quantize: Linear layers of the blocks in 4 bits (bitsandbytes): bnb.nf4, or bnb.nf4-dq with quantized scales.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    import torch

    from toolkit.inference.batch import continue_texts, read_prompts
    from toolkit.inference.generate import generate
    from toolkit.inference.load import load_checkpoint
    from toolkit.inference.sampling import check_sampling
    from toolkit.inference.text import TextStream, encode_prompt, stop_tokens

    check_sampling(temperature, top_k, top_p)
    if prompts_path is None:
        require_option(batch_size is None, "batch_size", batch_size, "has no effect without --prompts_path")
    else:
        require_option(prompt == DEFAULT_PROMPT, "prompt", prompt, "has no effect with --prompts_path; leave it out")
    rows = {} if prompts_path is None else read_prompts(prompts_path)
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
        quantize=quantize,
        verify_checkpoint=verify_checkpoint,
    )
    notes: list[str] = []
    tokenizer = loaded.tokenizer
    if rows:
        started, count = time.perf_counter(), 0
        fields = list(rows.values())
        samples = continue_texts(
            loaded.model, tokenizer, [row["prompt"] for row in fields], names=list(rows),
            batch_size=batch_size or 8, seeds=range(seed, seed + num_samples),
            notice=lambda line: print(line, file=sys.stderr), max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p,
        )  # fmt: skip
        for sample in samples:
            count += sample.tokens
            line = fields[sample.number] | {"text": sample.text, "seed": sample.seed}
            print(json.dumps(line, ensure_ascii=False), flush=True)
        seconds = time.perf_counter() - started
        speed = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
        print(f"{len(rows)} prompt{'s' * (len(rows) > 1)}: {speed}; {loaded.device}", file=sys.stderr)
        return
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
        print(for_terminal(text), end="", flush=True)
        for piece in TextStream(tokenizer, ids).read(tokens):
            count += 1
            print(for_terminal(piece), end="", flush=True)
        print(flush=True)
        while notes:
            print(notes.pop(0), file=sys.stderr)
        seconds = time.perf_counter() - start
        speed = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
        print(f"sample {i + 1} of {num_samples}: {speed}; seed {seed + i}; {loaded.device}", file=sys.stderr)
